"""From one rank to another."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from shoal.frontend.torch.operations.calls import Tensors, landing
from shoal.frontend.torch.operations.checks import Checks
from shoal.frontend.torch.spans import Spans
from shoal.frontend.torch.work import PendingWork

if TYPE_CHECKING:
    import torch.distributed as dist


class Pairwise(Checks):
    """send and recv. torch does not say whether its caller waits at once or at leisure."""

    def send(self, tensors: Tensors, dstRank: int, tag: int = 0) -> dist.Work:  # noqa: N803
        """Send one tensor to a rank of this group; that rank receives it under the same tag."""
        spans = Spans(self.describe, "send", folds=False)
        call = spans.read(self._only(tensors, "send")), dstRank, tag
        return self._post(self._group.send, call, tensors, spans, -1)

    def recv(self, tensors: Tensors, srcRank: int, tag: int = 0) -> dist.Work:  # noqa: N803
        """Receive one tensor from a rank of this group."""
        spans = Spans(self.describe, "recv", folds=False)
        call = spans.written(self._only(tensors, "recv")), srcRank, tag
        return self._post(self._group.recv, call, tensors, spans, srcRank)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> dist.Work:
        """Receive one tensor from whichever rank sends one of this tag; the Work says which."""
        spans = Spans(self.describe, "recv", folds=False)
        call = spans.written(self._only(tensors, "recv")), None, tag
        return self._post(self._group.recv, call, tensors, spans, None)

    def _post(
        self,
        start: Callable[..., Any],
        call: tuple[Any, ...],
        tensors: Tensors,
        spans: Spans,
        source: int | None,
    ) -> dist.Work:
        def go() -> dist.Work:
            work = start(*call, timeout_s=self._timeout_s, async_op=True)
            return self._pending(PendingWork([work], tensors, landing(spans), source))

        return self._recordable(start.__name__, go)
