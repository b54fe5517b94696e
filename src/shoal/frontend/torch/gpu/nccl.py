"""NCCL among the GPUs of a host, by way of torch's ProcessGroupNCCL. Not yet run with it.

Only these lines know NCCL; what gives it work, and when, is in `local_calls.py`.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist

from shoal.errors import TimedOut

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from shoal.frontend.torch.gpu.device import Device, Stream

# torch's watchdog takes the process down when a call has been under way for so many times the
# group's timeout. It is for what no deadline of shoal's can end: a thread that is held inside NCCL.
_WATCHDOG_TIMEOUTS: Final = 4


class NcclCollectives:
    """One communicator of the GPUs of a host: a part of a tensor for each, `part_of`.

    Blocks until all ranks have come and a first call of each kind is through: a communicator is
    made by its first call, which may wait for all that the device does.

    Args:
        store: of these ranks alone.

    Raises:
        RuntimeError: NCCL cannot; nothing is left behind.
        TimedOut: a first call was not through in time.
    """

    def __init__(
        self, device: Device, store: Store, rank: int, size: int, timeout_s: float
    ) -> None:
        self.rank, self.size = rank, size
        self._device = device
        self._backend = _backend(store, rank, size, timeout_s * _WATCHDOG_TIMEOUTS)
        try:
            self._try_out(time.monotonic() + timeout_s)
        except BaseException:
            self._backend.abort()
            raise

    def reduce_scatter(self, stream: Stream, flat: torch.Tensor) -> None:
        """Give a stream the sum over all of each rank's parts, in place. Blocks for nothing."""
        n_each = flat.numel() // self.size
        whole = flat[: n_each * self.size]
        own = whole[self.rank * n_each : (self.rank + 1) * n_each]
        with self._device.on(stream):
            _call(self._backend, "_reduce_scatter_base", "reduce_scatter_single")(
                own, whole, dist.ReduceScatterOptions()
            ).wait()
            if flat.numel() > whole.numel():
                self._backend.reduce([flat[whole.numel() :]], dist.ReduceOptions()).wait()

    def all_gather(self, stream: Stream, flat: torch.Tensor) -> None:
        """Give a stream the copies of all parts from those who have them. Blocks for nothing."""
        n_each = flat.numel() // self.size
        whole = flat[: n_each * self.size]
        own = whole[self.rank * n_each : (self.rank + 1) * n_each]
        options = torch._C._distributed_c10d.AllgatherOptions()
        with self._device.on(stream):
            _call(self._backend, "_allgather_base", "all_gather_single")(whole, own, options).wait()
            if flat.numel() > whole.numel():
                self._backend.broadcast([flat[whole.numel() :]], dist.BroadcastOptions()).wait()

    def abort(self) -> None:
        """End what is under way by ncclCommAbort, on the device too. Idempotent; any thread."""
        self._backend.abort()

    def close(self) -> None:
        """Leave. Nothing is under way."""
        self._backend.shutdown()

    def _try_out(self, deadline: float) -> None:
        device = self._device
        flat = torch.ones(self.size + 1, device=device.place)
        stream = device.side_stream()
        self.reduce_scatter(stream, flat)
        self.all_gather(stream, flat)
        device.keep(flat, stream)
        event = device.record(stream)
        while not device.has_passed(event):
            if time.monotonic() > deadline:
                raise TimedOut("NCCL's first calls among the GPUs of this host were not through")
            time.sleep(1e-3)
        if flat.tolist() != [float(self.size)] * (self.size + 1):
            raise RuntimeError(f"NCCL summed ones of {self.size} GPUs to {flat.tolist()}")


def _backend(store: Store, rank: int, size: int, timeout_s: float) -> Any:
    """A process group that torch does not know of: other ranks need not make one."""
    kind: Any = dist.ProcessGroupNCCL  # not in every build of torch
    options = kind.Options()
    options.is_high_priority_stream = True
    options._timeout = timedelta(seconds=timeout_s)
    return kind(store, rank, size, options)


def _call(backend: Any, name: str, later: str) -> Any:
    """A method under its name in the torch that is here."""
    return getattr(backend, name, None) or getattr(backend, later)
