"""How an operation of torch becomes calls on a shoal group, and what it returns for them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist

from shoal.frontend.torch.operations.agreeing import agree, debugging
from shoal.frontend.torch.unsupported import NotThereYet
from shoal.frontend.torch.work import NO_TIMEOUT, FinishedWork, PendingWork, profiling

if TYPE_CHECKING:
    from shoal.frontend.torch.spans import Spans
    from shoal.group.group import Group

Tensors = list[torch.Tensor]

NO_TENSORS: Final[Tensors] = []

# What dist.record_comm (torch >= 2.13) wants calls to be named; empty if nothing.
_given_name: Final[Callable[[], str]] = getattr(
    torch._C._distributed_c10d, "_get_comm_profiling_name", lambda: ""
)


class Calls(NotThereYet):
    """The way into one group.

    Args:
        group: owned: shutdown closes it.
        timeout: of every call that does not bring its own.
    """

    def __init__(self, group: Group, timeout: timedelta) -> None:
        self._group = group
        self._timeout_s = timeout.total_seconds()
        self._n_calls = 0
        self._coalesced: list[PendingWork] | None = None
        self._agrees = debugging(self)

    def _run(
        self,
        start: Callable[..., Any],
        calls: Sequence[tuple[Any, ...]],
        opts: Any,
        tensors: Tensors,
        spans: Spans | None,
        recorded: bool = False,
    ) -> dist.Work:
        """Start one collective per call, and finish them if the caller is going to wait anyway.

        Args:
            start: a method of the group.
            calls: its arguments.
            opts: any of torch's options.
            tensors: what the Work reports as its result.
            recorded: torch's profiler knows of it already.
        """
        if profiling() and not recorded:
            go = functools.partial(self._run, start, calls, opts, tensors, spans, recorded=True)
            return self._recorded(start.__name__, go)
        self._n_calls += len(calls)
        timeout = opts.timeout
        # torch's sign for "not given" is a negative one.
        timeout_s = timeout.total_seconds() if timeout > NO_TIMEOUT else self._timeout_s
        if self._agrees:
            agree(self._group, start.__name__, calls, timeout_s)
        if opts.asyncOp or self._coalesced is not None:
            works = [start(*call, timeout_s=timeout_s, async_op=True) for call in calls]
            return self._pending(PendingWork(works, tensors, landing(spans)))
        if len(calls) == 1:
            start(*calls[0], timeout_s=timeout_s)
        else:
            for work in [start(*call, timeout_s=timeout_s, work=True) for call in calls]:
                work.wait()
        if spans is not None:
            spans.copy_back()
        return FinishedWork(tensors)

    def _recordable(self, name: str, go: Callable[[], dist.Work]) -> dist.Work:
        return self._recorded(name, go) if profiling() else go()

    def _recorded(self, name: str, go: Callable[[], dist.Work]) -> dist.Work:
        """Do it as a range in torch's profiler; what is left to wait for is another, shoal:wait.

        NOT one range that ends with the call, on whichever thread notices: the profiler may be
        stopped and gone by then.
        """
        with torch.profiler.record_function(_given_name() or f"shoal:{name}"):
            return go()

    # ---- coalescing: the works of what is called in between become one ----

    def start_coalescing(self, _device: object = None) -> None:
        """From now on start every call and leave the waiting to the work of `end_coalescing`."""
        self._coalesced = []

    def end_coalescing(self, _device: object = None) -> dist.Work:
        """The work of all that was called since `start_coalescing`."""
        parts, self._coalesced = self._coalesced or [], None

        def land() -> None:
            for part in parts:
                part.land()

        works = [work for part in parts for work in part.works]
        return PendingWork(works, [each for part in parts for each in part.tensors], land)

    _start_coalescing = start_coalescing
    _end_coalescing = end_coalescing

    def _pending(self, work: PendingWork) -> PendingWork:
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work


def landing(spans: Spans | None) -> Callable[[], None] | None:
    """What brings the results from stand-ins, if there are any."""
    return spans.copy_back if spans is not None and spans.has_stand_ins else None


def options_of(kind: Callable[[], Any], timeout: timedelta | None, **fields: object) -> Any:
    """Options out of what torch's own overloads take instead of them."""
    options = kind()
    if timeout is not None:
        options.timeout = timeout
    for name, value in fields.items():
        if value is not None:
            setattr(options, name, value)
    return options


def listed(tensors: Tensors | torch.Tensor) -> Tensors:
    """A list of tensors, where torch's overloads give one without a list."""
    return [tensors] if isinstance(tensors, torch.Tensor) else tensors
