"""What torch's communication hooks take for a GradBucket, which Python cannot make."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    import torch


class Bucket:
    """Some gradients in one flat tensor, with the methods of `torch.distributed.GradBucket`.

    Args:
        buffer: the gradients, one after the other; or one sparse gradient.
        gradients: views into it.
    """

    def __init__(
        self,
        index: int,
        is_last: bool,
        buffer: torch.Tensor,
        gradients: Sequence[torch.Tensor],
        parameters: Sequence[torch.nn.Parameter],
    ) -> None:
        self._index = index
        self._is_last = is_last
        self._buffer = buffer
        self._gradients = list(gradients)
        self._parameters = list(parameters)

    def index(self) -> int:
        """Its place among the buckets, which hooks get in this order."""
        return self._index

    def is_last(self) -> bool:
        """True if no other bucket of this backward pass comes after it."""
        return self._is_last

    def buffer(self) -> torch.Tensor:
        """All gradients in one dimension."""
        return self._buffer

    def set_buffer(self, buffer: torch.Tensor) -> None:
        """Take another tensor for the buffer."""
        self._buffer = buffer

    def gradients(self) -> list[torch.Tensor]:
        """The gradients, in the shapes of the parameters."""
        return list(self._gradients)

    def parameters(self) -> list[torch.nn.Parameter]:
        """The parameters, in the order of the gradients."""
        return list(self._parameters)


def call_hook(
    hook: Callable[[Any, Any], Any],
    state: object,
    bucket: Bucket,
    refuse: Callable[[str], NoReturn],
) -> Any:
    """Call a communication hook, and return its future.

    Args:
        refuse: raises UsageError with this reason, here and on the ranks that wait for this one.
    """
    future = hook(state, bucket)
    if not hasattr(future, "wait"):
        refuse(
            f"communication hook {getattr(hook, '__qualname__', hook)} returned {future!r} for "
            f"bucket {bucket.index()}: return a torch.futures.Future of the bucket's average"
        )
    return future


def result_of(future: Any) -> torch.Tensor:
    """Wait for the average that a hook's future is of; some have it in a list."""
    result = future.wait()
    found: torch.Tensor = result[0] if isinstance(result, (list, tuple)) else result
    return found
