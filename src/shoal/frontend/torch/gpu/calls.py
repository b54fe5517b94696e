"""The calls of one group on tensors of devices, which do not block the caller."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from shoal.dtypes import Op
from shoal.frontend.torch.gpu import local_gpus
from shoal.frontend.torch.gpu.local_calls import LocalCall
from shoal.frontend.torch.gpu.pieces import cut, owners
from shoal.frontend.torch.gpu.staging import StagedCall, Staging
from shoal.frontend.torch.tensor_buffers import describe
from shoal.group.buffers import blocks_of

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from shoal.frontend.torch.collectives import Access, TorchCollective
    from shoal.frontend.torch.gpu.device import Device
    from shoal.frontend.torch.gpu.local_calls import LocalCalls
    from shoal.frontend.torch.layouts import Arguments
    from shoal.frontend.torch.tensor_buffers import TensorBuffers
    from shoal.group.group import Group


class DeviceCalls:
    """Starts calls through host memory, or first among the GPUs of a host if all ranks can.

    Args:
        store: torch's store, through which the GPUs of a host find each other; None: they do not.
    """

    def __init__(self, group: Group, store: Store | None) -> None:
        self._group = group
        self._store = store
        self._staging = Staging(group.abort)
        self._agreeing = threading.Lock()
        self._has_agreed = False
        self._local: LocalCalls | None = None

    def start(
        self,
        collective: TorchCollective,
        start: Callable[..., Any],
        calls: Sequence[Arguments],
        rest: Arguments,
        buffers: TensorBuffers,
        timeout_s: float,
    ) -> StagedCall | LocalCall:
        """Start one operation: `start`, the group's method, with each of `calls`, and `rest`.

        Raises UsageError, as on the CPU, if a call would write memory that it reads, other than in
        place.
        """
        for call in calls:
            self._check_apart(call, collective.alike)
        if local_gpus.takes(collective, calls, rest):
            local = self._agreed(_device_of(buffers))
            if local is not None:
                return self._post_locally(local, calls[0], rest[0], buffers, timeout_s)
        parts = [part for call in calls for part in cut(call, collective.alike, self._group.size)]
        accesses = collective.accesses(self._group.rank == buffers.root)
        return self.stage(start, parts, rest, accesses, buffers, timeout_s)

    def _check_apart(self, call: Arguments, alike: int | None) -> None:
        # NOT left to the group: it gets copies in host memory, and a piece may be copied back
        # before a later one is copied out.
        if len(call) == 1 or None in call:
            return
        sizes = [1 if at == alike else self._group.size for at in range(len(call))]
        written, read = map(functools.partial(blocks_of, writable=False), call, sizes)
        self._group._check_apart("output", written, "input", read)

    def stage(
        self,
        start: Callable[..., Any],
        calls: Sequence[Arguments],
        rest: Sequence[Any],
        accesses: Sequence[Access],
        buffers: TensorBuffers,
        timeout_s: float,
    ) -> StagedCall:
        """Start calls through host memory; arguments as for `StagedCall`.

        Raises UsageError unless all tensors are on one device.
        """
        device, doing = _device_of(buffers), describe(self._group, buffers.operation)
        places = sorted({str(tensor.device) for tensor in owners(calls)})
        if len(places) > 1:
            raise buffers.error(f"takes tensors of one device, not of {', '.join(places)}")
        device.check(doing)

        def start_in_background(*views: Any) -> Any:
            return start(*views, *rest, timeout_s=timeout_s, async_op=True)

        call = StagedCall(device, start_in_background, calls, accesses, buffers.copies, doing)
        self._staging.post(call, timeout_s)
        return call

    def flush(self) -> None:
        """Start staged calls first, so that ranks start all calls in the same order."""
        self._staging.flush()

    def close(self) -> None:
        """Fail all calls in flight and end the threads, after the group was closed. Idempotent."""
        self._staging.close()
        if self._local is not None:
            self._local.close()

    def _agreed(self, device: Device) -> LocalCalls | None:
        """Return the object for calls among a host's GPUs; None, on all ranks, if not possible.

        In the first call all ranks wait for each other.
        """
        with self._agreeing:
            rail = None if self._has_agreed else local_gpus.rail_in(self._group)
            if rail is not None and self._store is not None:
                self._local = local_gpus.agreed_calls(
                    self._group, rail, device, self._store, self._group.timeout_s
                )
            self._has_agreed = True
            return self._local

    def _post_locally(
        self, local: LocalCalls, call: Arguments, op: Op, buffers: TensorBuffers, timeout_s: float
    ) -> LocalCall:
        """Start an all-reduce that begins among the GPUs of this host."""
        device, doing = _device_of(buffers), describe(self._group, buffers.operation)
        device.check(doing)
        if device.place != local.device.place:
            raise buffers.error(
                f"got a tensor on {device.place}, but sums of this group run on "
                f"{local.device.place}, the GPU of its first tensor; use one GPU in each process"
            )
        (view,) = call
        divisor = self._group.size if op is Op.AVG else 1
        posted = LocalCall(device, view, divisor, buffers.copies, doing, timeout_s)
        local.post(posted)
        return posted


def _device_of(buffers: TensorBuffers) -> Device:
    assert buffers.device is not None
    return buffers.device
