"""Which backward pass is under way, as seen from the threads in which its hooks run."""

import _thread
import threading

import torch

from shoal.frontend.torch.ddp import passes


def test_a_pass_is_seen_from_a_thread_that_python_did_not_start() -> None:
    """Autograd runs the hooks of tensors on a device in such a thread."""
    seen = []

    def look_from_another_thread(_gradient: torch.Tensor) -> None:
        is_done = _thread.allocate_lock()
        is_done.acquire()

        def look() -> None:
            threading.current_thread()  # as a log record does: Python lists the thread from then on
            seen.append((passes._is_other(list), passes.is_nested()))
            is_done.release()

        _thread.start_new_thread(look, ())
        is_done.acquire()

    output = torch.ones(1, requires_grad=True) * 2
    output.register_hook(look_from_another_thread)
    torch.autograd.grad(output.sum(), output, retain_graph=True)
    output.sum().backward()
    assert seen == [(True, False), (False, False)]
