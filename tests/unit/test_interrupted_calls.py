"""Ctrl-C at every instruction of a call, over a native group and calls that the test makes up."""

import contextlib
import itertools
import sys
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any, Final

import numpy as np
import pytest
from unit.in_process import in_ranks

from shoal import Group


class Running:
    """A native call that does not end; Ctrl-C interrupts each wait."""

    def done(self) -> bool:
        return False

    def wait(self, _timeout_s: float) -> bool:
        raise KeyboardInterrupt


class Native:
    """A native group that posts calls like these, and raises Ctrl-C `n` instructions later."""

    def __init__(self, n: int) -> None:
        self.n_left = n
        self.is_posted = False

    def post(self, *_call: object) -> Running:
        self.is_posted = True
        return Running()

    post_in_place = post_message = post

    def trace(self, frame: FrameType, event: str, _: object) -> Any:
        if "/shoal/group/" not in frame.f_code.co_filename:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode" and self.is_posted:
            if self.n_left == 0:
                raise KeyboardInterrupt
            self.n_left -= 1
        return self.trace


CALLS: Final[dict[str, Callable[[Group, Any], object]]] = {
    "in place": lambda group, data: group.all_reduce(data),
    "in the background": lambda group, data: group.all_reduce(data, async_op=True),
    "between buffers": lambda group, data: group.all_gather(data, np.ones(1)),
    "message": lambda group, data: group.recv(data, 1),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@in_ranks(2)
def test_a_buffer_outlives_its_call_wherever_ctrl_c_interrupts_it(
    group: Any, call: Callable[[Group, Any], object]
) -> None:
    if group.rank == 1:
        return
    own = group._native
    for n in itertools.count():
        group._native = native = Native(n)
        data = np.ones(2)
        seen = weakref.ref(data)
        sys.settrace(native.trace)
        with contextlib.suppress(KeyboardInterrupt):
            call(group, data)
        sys.settrace(None)
        del data
        assert native.is_posted
        assert seen() is not None, f"freed after an interrupt {n} instructions after the post"
        if native.n_left > 0:
            break
    assert n > 10
    group._native = own
