"""Averages gradients with shoal's `Averager`, in its memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from shoal.average import ArraySpec, Averager
from shoal.average.lacking import StepWatch, announce, check_alive
from shoal.errors import UsageError
from shoal.frontend.torch.ddp.buckets import twice
from shoal.frontend.torch.ddp.gradients import Gradients, like_gradient, place_in
from shoal.frontend.torch.ddp.parameter_hooks import not_held

if TYPE_CHECKING:
    from shoal.group.group import Group


class FusedGradients:
    """Averages gradients in balanced fusion buffers, each as soon as it is full.

    Args:
        gradients: on the CPU; the constructor gives them places, which change after the first step.
        on_full: called when all gradients of a buffer are ready.
        before: the former owner of these parameters, from another group, no longer used. Its
            averager moves to this group if it has the same arrays; otherwise only its residuals do.
        options: passed to `Averager`.

    Attributes:
        weight: the weight of the next forward pass.

    Raises:
        UsageError: ranks differ in parameters or options.
    """

    def __init__(
        self,
        gradients: Gradients,
        group: Group,
        on_full: Callable[[], None],
        before: FusedGradients | None = None,
        **options: Any,
    ) -> None:
        self.gradients = gradients
        self._on_full = on_full
        self._likes = list(map(like_gradient, gradients.parameters))
        arrays = dict(zip(gradients.names, self._likes, strict=True))
        entries = tuple(ArraySpec.of(name, like) for name, like in arrays.items())
        self.weight: float | None = None if before is None else before.weight
        self.averager: Averager
        if before is not None and before.averager.entries == entries:
            self.averager = before.averager
            self.averager.regroup(group, fill=not_held(self._fill))
        else:
            self.averager = Averager(group, arrays, fill=not_held(self._fill), **options)
            if before is not None and (state := before.averager.state_dict()):
                self.averager.load_state_dict(state, strict=False)
        self._watch = StepWatch(group, self.averager.open_calls)
        self.is_weighted = bool(options.get("weighted"))
        self._begun_with: float | None = None  # the weight of the step under way
        self._is_stopped = False
        self._settle()

    @property
    def sizes(self) -> list[int]:
        """The size of each buffer in bytes."""
        return [buffer.extent.n_bytes for buffer in self.averager.layout.buffers]

    @property
    def is_armed(self) -> bool:
        return not self.averager.countdown.paused

    @property
    def has_begun(self) -> bool:
        """True if any gradient of this step is ready, or its weight was sent."""
        return self.averager.is_under_way

    def hooks(self) -> list[Callable[..., None]]:
        """Return a C function for each parameter to call when its gradient is ready."""
        return [self.averager.hook(index) for index in range(len(self.averager.entries))]

    def begin(self, *, again: bool = False) -> None:
        """Count gradients from now on; with `again`, of the same forward pass, keeping its weight.

        Raises UsageError if the pass has no weight, or the last pass has not ended.
        """
        if not again:
            self._begun_with, self.weight = self.weight, None
        if self.is_weighted and self._begun_with is None:
            raise UsageError(
                "DistributedDataParallel: with weighted=True every forward pass needs a weight; "
                "call model.weigh(n) before it, where n is the number of its samples or tokens"
            )
        if self.has_begun:
            raise UsageError(
                "DistributedDataParallel: the last backward pass has not ended, and some of its "
                "gradients were sent: wrap `model.module` again, on every rank"
            )
        layout = self.averager.next_layout()
        if layout is not None:
            pairs = zip(self.averager.layout.places, layout.places, strict=True)
            self.gradients.leave(index for index, (old, new) in enumerate(pairs) if old != new)
        self.averager.begin(self._begun_with, reserve=False)
        if self.averager.layout is not self._settled:  # also one that an error has interrupted
            self._settle()
        self.gradients.begin()
        self.averager.countdown.paused, self._is_stopped = False, False

    def note_forward(self) -> None:
        """Record the start of a forward pass whose gradients will be averaged."""
        self.averager.log.note_forward()

    def reserve(self) -> None:
        """Reserve the numbers of this step's calls, when a backward pass begins on every rank."""
        self._watch.stop()
        self.averager.log.note_backward()
        self.averager.reserve()

    def stop(self) -> None:
        """Count no gradients until `begin` or `resume`."""
        self.averager.countdown.paused, self._is_stopped = True, True

    def resume(self) -> None:
        """Count gradients of this step again, if `stop` was called in it."""
        if self._is_stopped:
            self.averager.countdown.paused, self._is_stopped = False, False

    def give_up(self) -> None:
        """Count no more gradients, and return them to the program; the averager stays usable."""
        self._watch.stop()
        self.stop()
        self.gradients.release(self.sent() if self.has_begun else ())

    def missing(self) -> list[int]:
        """Return the parameters whose gradients are missing since `begin`."""
        return self.averager.not_ready()

    def wait_for_rest(self, why: str) -> None:
        """Wait for another backward pass to produce the missing gradients."""
        self._watch.start(why)

    def lack(self, why: str) -> None:
        """Notify the ranks that wait for missing gradients that they will not arrive."""
        self._watch.stop()
        announce(self.averager.group, self.averager.name, why)

    def agree_to_forget(self, why: str) -> None:
        """Wait until every rank has called this, because its backward pass raised.

        Raises:
            UsageError: another rank waits for this step. The group has ended.
            ShoalError: the group has ended for another reason.
        """
        self._watch.stop()
        group, open_calls = self.averager.group, set(self.averager.open_calls)
        announce(group, f"{self.averager.name}, raised", why, open_calls)
        check_alive(group)

    def sent(self) -> set[int]:
        """Return the parameters with elements sent in this step."""
        counted = self.averager.countdown.is_counted
        full = (one for one in self.averager.layout.buffers if all(map(counted, one.entries)))
        return {index for buffer in full for index in buffer.entries}

    def end(self, unused: bool, factor: float = 1.0) -> None:
        """Wait for all averages, and store them times `factor` in the gradients.

        With `unused`, gradients that no rank has are unchanged. Raises UsageError if a gradient
        came twice, which ends the step, and ShoalError as `Averager.wait` does.
        """
        self._watch.stop()
        repeated = self.averager.countdown.repeated
        try:
            self.averager.wait()
        except UsageError as error:
            if repeated < 0 or self.averager.group.ended() is not None:
                raise
            raise UsageError(twice(self.gradients.names[repeated])) from error
        nowhere = set(self.averager.unused) if unused else set()
        averaged = [i for i in range(len(self.gradients.parameters)) if i not in nowhere]
        if factor != 1.0:
            for index in averaged:
                self.gradients.places[index].mul_(factor)
        self.gradients.deliver(averaged)

    def keep_used(self) -> None:
        """Expect the gradients of the last step in all steps, on every rank."""
        self.averager.keep_used()

    def undo_feedback(self) -> None:
        """Restore the residuals from before the last step, because its averages are not used."""
        self.averager.undo_feedback()

    def _fill(self, indices: Sequence[int]) -> None:
        self.gradients.bring(indices)
        self._on_full()

    def _settle(self) -> None:
        """Give the gradients their places in the averager's layout."""
        whole, likes = self.averager.memory, self._likes
        extents = self.averager.layout.places

        def place(index: int) -> torch.Tensor:
            (offset, n_bytes), like = extents[index], likes[index]
            if not n_bytes:
                return torch.empty(like.size(), dtype=like.dtype)
            # Each gets its own storage, which the program may move without moving others.
            flat = torch.frombuffer(whole, dtype=like.dtype, offset=offset, count=like.numel())
            return place_in(flat, 0, like)

        self.gradients.settle(place)
        self._settled = self.averager.layout
