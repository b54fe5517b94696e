"""The gradients of a model's parameters, and the places where they are averaged."""

from __future__ import annotations

import contextlib
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence

import torch


def place_in(memory: torch.Tensor, first: int, like: torch.Tensor) -> torch.Tensor:
    """The elements of a flat tensor from `first` on, in the shape of another one.

    The strides are the other's as well, where it has its memory to itself: torch then keeps what it
    adds up here, and an optimizer runs through both in the same order.
    """
    if torch.ops.aten.is_non_overlapping_and_dense(like):
        place = memory.as_strided(like.size(), like.stride(), memory.storage_offset() + first)
    else:
        place = memory[first : first + like.numel()].view(like.size())
    return place.data  # to autograd no view, which `detach_` would refuse


def _share_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether both are of one piece of memory: also of views, as `detach` makes them."""
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


class Gradients:
    """The parameters, and for each the place for its gradient.

    torch may leave a gradient in memory of its own: after `zero_grad(set_to_none=True)` it takes
    over what the last operation has written, which costs no pass over memory. `bring` then copies
    it to its place: one read and one write, and of those gradients alone that are not there yet.

    Args:
        parameters: with dense gradients.
        keeps_own: gradients are in their places in a backward pass only. Costs another copy.
    """

    def __init__(
        self, parameters: Sequence[torch.nn.Parameter], *, keeps_own: bool = False
    ) -> None:
        self.parameters = list(parameters)
        self.places: list[torch.Tensor] = []
        self._own: dict[int, torch.Tensor | None] | None = {} if keeps_own else None

    def settle(self, places: Sequence[torch.Tensor]) -> None:
        """Take new places; gradients do not move there."""
        self.places = list(places)

    def bring(self, indices: Iterable[int]) -> None:
        """Have these gradients lie in their places. Where there is none, it is zero from now on.

        What lies there already is not touched: a part of it may be on its way.
        """
        to: list[torch.Tensor] = []
        given: list[torch.Tensor] = []
        parameters, places = self.parameters, self.places
        moved: list[int] = []
        for index in indices:
            gradient = parameters[index].grad
            place = places[index]
            if gradient is place:
                continue
            if self._own is not None:
                self._own[index] = gradient
            if gradient is None:
                place.zero_()
                parameters[index].grad = place
                continue
            to.append(place)
            given.append(gradient)
            moved.append(index)
        if not to:
            return
        with torch.no_grad():
            torch._foreach_copy_(to, given)
        for index in moved:
            parameters[index].grad = places[index]

    def show(self, indices: Iterable[int]) -> None:
        """Have these parameters' gradients be what is in their places."""
        for index in indices:
            if self.parameters[index].grad is not self.places[index]:
                self.parameters[index].grad = self.places[index]

    def hand_back(self) -> None:
        """A step is over: where gradients keep memory of their own, the averages go there."""
        if not self._own:
            return
        own, self._own = self._own, {}
        to: list[torch.Tensor] = []
        averages: list[torch.Tensor] = []
        for index, gradient in own.items():
            parameter, place = self.parameters[index], self.places[index]
            if parameter.grad is not place:  # of a step that failed, and the program dropped it
                continue
            parameter.grad = gradient if gradient is not None else torch.empty_like(place)
            to.append(parameter.grad)
            averages.append(place)
        if to:
            with torch.no_grad():
                torch._foreach_copy_(to, averages)

    def set_aside(self, indices: Sequence[int]) -> list[torch.Tensor | None]:
        """What these gradients are, in memory of their own. For gradients that did not come."""
        kept: list[torch.Tensor | None] = []
        for index in indices:
            gradient = self.parameters[index].grad
            if gradient is not None and _share_memory(gradient, self.places[index]):
                gradient = gradient.clone()
            kept.append(gradient)
        return kept

    def give_back(self, index: int, kept: torch.Tensor | None) -> None:
        """Have a gradient be what it was before it was set aside."""
        if self._own:
            self._own.pop(index, None)
        self.parameters[index].grad = kept

    def drop(self, indices: Iterable[int]) -> None:
        """Of these parameters, those whose gradients lie in their places have none any more."""
        for index in indices:
            gradient = self.parameters[index].grad
            if gradient is not None and _share_memory(gradient, self.places[index]):
                self.parameters[index].grad = None

    @contextlib.contextmanager
    def hidden(self) -> Iterator[None]:
        """Meanwhile there are no gradients."""
        every = range(len(self.parameters))
        kept = self.set_aside(every)
        for index in every:
            self.give_back(index, None)
        try:
            yield
        finally:
            for index, gradient in enumerate(kept):
                self.give_back(index, gradient)

    def leave(self, moving: Container[int]) -> dict[int, torch.Tensor | None]:
        """The gradients that lie in their places, before these get others: what is to come back.

        Args:
            moving: of these what lies in the old places is lost. No others are copied, unless the
                program has put another tensor of that memory there.
        """
        left: dict[int, torch.Tensor | None] = {}
        for index, place in enumerate(self.places):
            gradient = self.parameters[index].grad
            if gradient is not None and _share_memory(gradient, place):
                stays = gradient is place and index not in moving
                left[index] = None if stays else gradient.clone()
        return left

    def come_back(self, left: Mapping[int, torch.Tensor | None]) -> None:
        """Have gradients that left lie in their places now."""
        for index, values in left.items():
            if values is not None:
                self.places[index].copy_(values)
            self.parameters[index].grad = self.places[index]
