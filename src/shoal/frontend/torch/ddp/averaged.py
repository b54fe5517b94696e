"""Gradients averaged by shoal's Averager, in its memory."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from shoal.average import Averager, NotFinite
from shoal.average.lacking import tell_or_raise
from shoal.errors import UsageError
from shoal.frontend.torch.ddp.buckets import twice
from shoal.frontend.torch.ddp.gradients import Gradients, place_in

if TYPE_CHECKING:
    from shoal.average import AveragingReport, Layout
    from shoal.average.step_times import StepTimes
    from shoal.group.group import Group


class FusedGradients:
    """Averages gradients in balanced fusion buffers, each as soon as it is full.

    Args:
        gradients: on the CPU; gets its places here, and others when the order of gradients changes.
        names: of the parameters.
        options: of an `Averager`.

    Raises:
        UsageError: ranks differ in any of this.
    """

    def __init__(
        self,
        gradients: Gradients,
        group: Group,
        names: Sequence[str],
        **options: Any,
    ) -> None:
        arrays = {
            name: (tuple(parameter.shape), parameter.dtype)
            for name, parameter in zip(names, gradients.parameters, strict=True)
        }
        self.gradients = gradients
        self.averager = Averager(group, arrays, **options)
        self.weight: float | None = None  # of the next forward pass
        self.is_weighted = bool(options.get("weighted"))
        self.begun_with: float | None = None  # the weight of the step under way
        self._names = list(names)
        self.averager.on_missing = gradients.bring
        self.averager.on_rebuilding = self._leave_places
        self.averager.on_rebuilt = self._settle
        self.averager.call_when_full(_calling(self))
        self.on_full: Callable[[], None] = lambda: None
        self._n_full = 0
        self._is_stopped = False
        self._left: dict[int, torch.Tensor | None] = {}  # gradients, while there is no layout
        self._settle()

    @property
    def sizes(self) -> list[int]:
        """The bytes of each buffer."""
        return [buffer.extent.n_bytes for buffer in self.averager.layout.buffers]

    @property
    def is_armed(self) -> bool:
        """Whether gradients are counted."""
        return not self.averager.countdown.paused

    def hooks(self) -> list[Callable[..., None]]:
        """What each parameter calls when its gradient is there: C functions."""
        return [self.averager.hook(index) for index in range(len(self.averager.entries))]

    def begin(self, *, again: bool = False) -> None:
        """From now on gradients are counted.

        Args:
            again: those of another backward pass over the forward pass before, with its weight.

        Raises:
            UsageError: the forward pass has no weight, or the pass before has not ended.
        """
        if not again:
            self.begun_with, self.weight = self.weight, None
        if self.is_weighted and self.begun_with is None:
            raise UsageError(
                "DistributedDataParallel: with weighted=True every forward pass has a weight; call "
                "model.weigh(n) before it, where n is the number of its samples or tokens"
            )
        if self.averager.is_under_way:
            raise UsageError(
                "DistributedDataParallel: the backward pass before has not ended, and some of its "
                "gradients are on their way: wrap `model.module` anew, on every rank"
            )
        self.averager.begin(self.begun_with, reserve=False)
        self.averager.countdown.paused = self._is_stopped = False
        self._n_full = 0

    @property
    def has_begun(self) -> bool:
        """Whether gradients of the pass under way have come, or other ranks know of it."""
        return self.averager.is_under_way

    def take_weight(self) -> float | None:
        """That of a forward pass whose gradients will not be averaged, if it was given one."""
        weight, self.weight = self.weight, None
        return weight

    def note_forward(self) -> None:
        """A forward pass begins whose gradients will be averaged."""
        self.averager.log.note_forward()

    def reserve(self) -> None:
        """Every rank is at this place among its calls: a backward pass has begun."""
        self.averager.log.note_backward()
        self.averager.reserve()

    @property
    def times(self) -> Sequence[StepTimes]:
        """When what happened in the last steps that have ended."""
        return self.averager.times

    def report(self, *, alone: bool) -> AveragingReport:
        """As `Averager.report`."""
        return self.averager.report(alone=alone)

    def stop(self) -> None:
        """Gradients that come are of no interest."""
        self.averager.countdown.paused = self._is_stopped = True

    def resume(self) -> None:
        """They are again, in the step in which they were not."""
        if self._is_stopped:
            self.averager.countdown.paused = self._is_stopped = False

    def missing(self) -> list[int]:
        """The parameters whose gradients have not come since `begin`."""
        countdown = self.averager.countdown
        n_entries = len(self.averager.entries)
        if countdown.n_counted == n_entries:
            return []
        return [index for index in range(n_entries) if not countdown.is_counted(index)]

    def wait_for_rest(self, why: str) -> None:
        """A backward pass has ended before all gradients came; another may bring the rest."""
        self.averager.watch.start(why)

    def lack(self, why: str) -> None:
        """What has not come will not: tell the ranks that wait for it."""
        self.averager.lack(why)

    def forget(self, why: str) -> None:
        """End a pass that raised on every rank; its averages are of no use.

        What has left on some ranks has to leave on all. What has left here is no gradient any more,
        others stay as they are. Where a rank waits for this pass the group ends, and it hears why.
        """
        self.averager.watch.stop()
        tell_or_raise(self.averager.group, f"{self.averager.name}, raised", why)
        self.averager.countdown.paused = self._is_stopped = False
        counted = self.averager.countdown.is_counted
        for buffer in self.averager.layout.buffers:
            if all(map(counted, buffer.entries)):
                self.gradients.drop(buffer.entries)
        hooks = self.hooks()
        with self.gradients.hidden(), contextlib.suppress(NotFinite, UsageError):
            for index in self.missing():
                hooks[index]()
            self.averager.wait()

    def end(self, unused: bool) -> None:
        """Wait for all averages; then every gradient is there, in its place.

        Args:
            unused: some gradients may not have come, here or on other ranks. Those that came on no
                rank stay as they are.

        Raises:
            UsageError: a gradient came twice. The step is over.
            ShoalError: as `Averager.wait`.
        """
        missing = self.missing() if unused else []
        repeated = self.averager.countdown.repeated
        try:
            self.averager.wait()
        except UsageError as error:
            if repeated < 0 or self.averager.group.ended() is not None:
                raise
            raise UsageError(twice(self._names[repeated])) from error
        if missing:
            nowhere = set(self.averager.unused)
            self.gradients.show(index for index in missing if index not in nowhere)

    def scale(self, factor: float) -> None:
        """Multiply all averages."""
        for index, place in enumerate(self.gradients.places):
            if index not in self.averager.unused:
                place.mul_(factor)

    def match(self, unused: bool) -> None:
        """Take part in a step of the others with zeros. This rank's gradients stay as they are."""
        with self.gradients.hidden():
            self.weight = 0 if self.is_weighted else None
            self.begin()
            if not unused:
                for hook in self.hooks():
                    hook()
            self.averager.wait()

    def full(self, buffer: int) -> None:
        """All gradients of a buffer have come: it is about to leave."""
        buffers = self.averager.layout.buffers
        entries: Sequence[int] = buffers[buffer].entries
        if self.averager.unused:  # at the end of the pass: the averager keeps what these hold
            entries = [index for index in entries if index not in self.averager.unused]
        self.gradients.bring(entries)
        self._n_full += 1
        if self._n_full == len(buffers):
            self.on_full()

    def _leave_places(self, layout: Layout) -> None:
        """There is about to be another layout."""
        pairs = zip(self.averager.layout.places, layout.places, strict=True)
        moving = {index for index, (old, new) in enumerate(pairs) if old != new}
        self._left = self.gradients.leave(moving)

    def _settle(self) -> None:
        """Gradients lie where the averager has them."""
        memory = torch.frombuffer(self.averager.memory, dtype=torch.uint8)
        places = []
        parameters = self.gradients.parameters
        for parameter, extent in zip(parameters, self.averager.layout.places, strict=True):
            part = memory[extent.offset : extent.end].view(parameter.dtype)
            places.append(place_in(part, 0, parameter.detach()))
        self.gradients.settle(places)
        left, self._left = self._left, {}
        self.gradients.come_back(left)


def _calling(fused: FusedGradients) -> Callable[[int], None]:
    # NOT a bound method: parameters hold hooks, which hold the native countdown, which holds this,
    # and the collector of cycles does not see through the native part.
    held = weakref.ref(fused)

    def full(buffer: int) -> None:
        found = held()
        if found is not None:
            found.full(buffer)

    return full
