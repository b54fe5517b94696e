"""When what happened in steps whose gradients a communication hook averages.

A bucket is on its way from when the hook is called until the future that it returns is done. Where
shoal holds that future back until the pass is over (`holding_futures`), it counts as done when the
calls that the hook made have ended, if they had by then: what callbacks do later is waited for.
"""

from __future__ import annotations

import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist

from shoal.average.layout import ArraySpec, Extent, FusionBuffer, Layout
from shoal.average.report import report_on
from shoal.average.step_times import StepLog
from shoal.dtypes import DType, parse_dtype
from shoal.errors import UsageError

if TYPE_CHECKING:
    from shoal.average.report import AveragingReport
    from shoal.average.step_times import StepTimes
    from shoal.group.group import Group

_NO_WAIT: Final = (0, 0)


class HookTimes:
    """The times of one rank's buckets, step by step.

    On a device nobody waits for kernels, so it is not known when a bucket was full; nor when it was
    in, where a future is done before the device is, as NCCL's are.

    Args:
        names: of the parameters.
        members: of each bucket, the indices of its parameters.
        missing: the parameters whose gradients have not come in the step under way.
    """

    name = "hook"

    def __init__(
        self,
        group: Group | OtherGroup,
        names: Sequence[str],
        parameters: Sequence[torch.Tensor],
        members: Sequence[Sequence[int]],
        missing: Callable[[], Sequence[int]],
    ) -> None:
        self.group = group
        self.layout = _layout_of(names, parameters, members)
        self.log = StepLog(len(members))
        devices = {parameter.device for parameter in parameters if parameter.device.type != "cpu"}
        self.device = str(devices.pop()) if devices else ""
        self._names, self._missing = list(names), missing
        self._is_open = False
        self._clear()

    def _clear(self) -> None:
        n = len(self.layout.buffers)
        self._first = 0
        self._full, self._posted, self._done = [0] * n, [0] * n, [0] * n
        self._waits = [_NO_WAIT] * n

    def begin(self) -> None:
        """A step begins."""
        self._clear()
        self.log.begin_step()
        self._is_open = True

    def came(self) -> None:
        """A gradient has come."""
        self._first = self._first or time.monotonic_ns()

    def full(self, bucket: int) -> None:
        """All gradients of a bucket have come, to the host's knowledge."""
        if not self.device:
            self._full[bucket] = time.monotonic_ns()

    def call(self, bucket: int) -> None:
        """The hook is called."""
        self._posted[bucket] = time.monotonic_ns()

    def called(self, bucket: int, future: Any) -> None:
        """The hook has returned this."""
        if not hasattr(future, "add_done_callback"):
            return
        if not future.done():
            done = self._done  # NOT of a later step
            future.add_done_callback(lambda _: done.__setitem__(bucket, time.monotonic_ns()))
        elif not self.device:  # the hook itself has waited
            self._done[bucket] = now = time.monotonic_ns()
            self._waits[bucket] = self._posted[bucket], now

    def waited(self, bucket: int, since: int, works: Sequence[Any]) -> None:
        """A bucket was waited for, and with it the calls that its hook made."""
        now = time.monotonic_ns()
        ended = [_finished_ns(work) for work in works]
        if ended and all(0 < moment < since for moment in ended):
            self._done[bucket] = max(ended)
        elif not self.device:
            self._done[bucket] = self._done[bucket] or now
        if self._waits[bucket] == _NO_WAIT:
            self._waits[bucket] = since, now

    def end(self, wait: int) -> None:
        """The step has ended; it was waited for from then on."""
        self.log.keep(self._of_step(wait, time.monotonic_ns()))
        self._is_open = False

    @property
    def times(self) -> deque[StepTimes]:
        """Those of the last steps that have ended, the oldest first."""
        return self.log.kept

    @property
    def times_now(self) -> StepTimes | None:
        """Those of the step under way; None: there is none."""
        return self._of_step() if self._is_open else None

    def missing(self) -> list[str]:
        """The parameters whose gradients have not come in the step under way."""
        return [self._names[index] for index in self._missing()] if self._is_open else []

    def report(self, *, alone: bool) -> AveragingReport:
        """As `Averager.report`."""
        return report_on(self, alone)

    def __str__(self) -> str:
        return f"{self.group}, communication hook"

    def _of_step(self, wait: int = 0, end: int = 0) -> StepTimes:
        sent = self._posted, self._done, self._waits
        return self.log.under_way(self.layout, (self._first, self._full), sent, (wait, end))


class OtherGroup:
    """A process group that is not one of shoal's, as far as a report needs a group.

    Args:
        place: a device whose tensors it takes.
    """

    name = "other"

    def __init__(self, group: dist.ProcessGroup, place: torch.device) -> None:
        self._group, self._place = group, place
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.members = tuple(dist.get_process_group_ranks(group))
        self.timeout_s = dist.distributed_c10d._get_default_timeout(
            dist.get_backend(group)
        ).total_seconds()

    def all_gather(self, outputs: array[float], data: array[float], *, name: str) -> None:
        """Every rank's numbers, by rank."""
        own = torch.tensor(data, dtype=torch.float64, device=self._place)
        each = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(each, own, group=self._group)
        outputs[:] = array("d", torch.cat(each).tolist())

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.size}, group of {dist.get_backend(self._group)}"


def _finished_ns(work: Any) -> int:
    """When all calls of a Work had ended; 0: nobody knows."""
    return min((getattr(one, "finished_ns", 0) for one in work.works), default=0) and max(
        one.finished_ns for one in work.works
    )


def _layout_of(
    names: Sequence[str], parameters: Sequence[torch.Tensor], members: Sequence[Sequence[int]]
) -> Layout:
    """The buckets as if they lay one after the other."""
    entries = tuple(map(_spec_of, names, parameters))
    places: dict[int, Extent] = {}
    buffers: list[FusionBuffer] = []
    bucket_of: dict[int, int] = {}
    at = 0
    for number, indices in enumerate(members):
        begin = at
        for index in indices:
            places[index], bucket_of[index] = Extent(at, entries[index].n_bytes), number
            at += entries[index].n_bytes
        extent = Extent(begin, at - begin)
        buffers.append(FusionBuffer(entries[indices[0]].dtype, extent, tuple(indices)))
    every = range(len(entries))
    return Layout(
        entries,
        order=tuple(index for indices in members for index in indices),
        places=tuple(places[index] for index in every),
        buffers=tuple(buffers),
        buffers_of=tuple((bucket_of[index],) for index in every),
        expected_bytes=tuple(buffer.extent.end for buffer in buffers),
        n_bytes=at,
        spare=None,
    )


def _spec_of(name: str, parameter: torch.Tensor) -> ArraySpec:
    try:
        return ArraySpec(name, tuple(parameter.shape), parse_dtype(parameter.dtype))
    except UsageError:  # a hook may average what shoal does not
        return ArraySpec(name, (parameter.numel() * parameter.element_size(),), DType.UINT8)
