"""NCCL among the GPUs of a host, through torch's ProcessGroupNCCL. Not yet run on real GPUs."""

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

# torch's watchdog ends the process when a call takes this many times the group's timeout. This only
# happens to a thread stuck inside NCCL, which no deadline of shoal can end.
_WATCHDOG_TIMEOUTS: Final = 4


class NcclCollectives:
    """A communicator of the GPUs of a host, the only users of `store`; see `part_of` for parts.

    Blocks until all ranks have arrived and a first call of each kind is done, because the first
    call creates the communicator and may wait for all work of the device. RuntimeError if NCCL
    fails, with nothing left behind; TimedOut if a first call was not done in time.
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
        """Queue the sum of every rank's part on a stream, in place. Does not block."""
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
        """Queue the copies of all parts from their ranks on a stream. Does not block."""
        n_each = flat.numel() // self.size
        whole = flat[: n_each * self.size]
        own = whole[self.rank * n_each : (self.rank + 1) * n_each]
        options = torch._C._distributed_c10d.AllgatherOptions()
        with self._device.on(stream):
            _call(self._backend, "_allgather_base", "all_gather_single")(whole, own, options).wait()
            if flat.numel() > whole.numel():
                self._backend.broadcast([flat[whole.numel() :]], dist.BroadcastOptions()).wait()

    def abort(self) -> None:
        """End all calls in flight, on the device too (ncclCommAbort). Idempotent; any thread."""
        self._backend.abort()

    def close(self) -> None:
        """Leave the communicator; no call may be in flight."""
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
                raise TimedOut("NCCL's first calls among this host's GPUs did not finish in time")
            time.sleep(1e-3)
        if flat.tolist() != [float(self.size)] * (self.size + 1):
            raise RuntimeError(f"NCCL summed ones of {self.size} GPUs to {flat.tolist()}")


def _backend(store: Store, rank: int, size: int, timeout_s: float) -> Any:
    """Return a process group that torch has not registered, so other ranks need not create it."""
    kind: Any = dist.ProcessGroupNCCL  # not in every build of torch
    options = kind.Options()
    options.is_high_priority_stream = True
    options._timeout = timedelta(seconds=timeout_s)
    return kind(store, rank, size, options)


def _call(backend: Any, name: str, later: str) -> Any:
    """Return a method by its name before or after torch 2.14."""
    return getattr(backend, name, None) or getattr(backend, later)
