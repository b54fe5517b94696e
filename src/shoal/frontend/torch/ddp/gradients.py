"""The gradients of a model's parameters, and the places where they are averaged."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Final, NoReturn

import torch
from torch.autograd.graph import increment_version

from shoal.frontend.torch.tensor_buffers import is_expanded, kind_of
from shoal.group.memory import stream_copy

# torch copies smaller tensors: it handles every kind of tensor.
_STREAMED_BYTES: Final = 1 << 16


def place_in(memory: torch.Tensor, first: int, like: torch.Tensor) -> torch.Tensor:
    """View the elements of a flat tensor from `first` on in the shape of `like`.

    The view has the strides of `like` too if those are dense: torch then accumulates in place, and
    an optimizer reads both in the same order.
    """
    if torch.ops.aten.is_non_overlapping_and_dense(like):
        place = memory.as_strided(like.size(), like.stride(), memory.storage_offset() + first)
    else:
        place = memory[first : first + like.numel()].view(like.size())
    return place.data  # NOT a view to autograd: `detach_` would refuse it


def dtype_of_gradient(parameter: torch.Tensor) -> torch.dtype:
    """Return the dtype of a parameter's gradient, which torch 2.10 and later let programs set."""
    return getattr(parameter, "grad_dtype", None) or parameter.dtype


def like_gradient(parameter: torch.Tensor) -> torch.Tensor:
    """Return a meta tensor with the shape, strides and dtype of a parameter's gradient."""
    shape, strides = parameter.size(), parameter.stride()
    return torch.empty_strided(shape, strides, dtype=dtype_of_gradient(parameter), device="meta")


class Gradients:
    """The parameters, and for each the place in which its gradient is averaged.

    Gradients belong to the program, which may replace, move, share, keep, resize or save them
    between any two steps. So each step reads `parameter.grad` again, and remembers no tensor of an
    earlier step. By default gradients keep their own memory: `bring` copies them to their places,
    and `deliver` copies the averages back.

    Args:
        parameters: with dense gradients.
        names: the names of the parameters.
        refuse: raises UsageError with this reason on this rank and the ranks that wait for it.
        as_views: make gradients views of their places after a step, which saves the copy back and
            its memory. The next step overwrites views that the program has kept.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        names: Sequence[str],
        refuse: Callable[[str], NoReturn],
        *,
        as_views: bool,
    ) -> None:
        self.parameters = list(parameters)
        self.names = list(names)
        self.refuse = refuse
        self.as_views = as_views
        self._is_hidden = False
        self._brought: set[int] = set()

    def settle(self, view: Callable[[int], torch.Tensor]) -> None:
        """Use new places; does not move gradients there.

        `view` makes a tensor over a parameter's place, with a storage that the program may move.
        """
        self.places = [view(index) for index in range(len(self.parameters))]
        self._kinds = [(place.dtype, place.shape) for place in self.places]
        self._view = view

    def begin(self) -> None:
        """Begin a step."""
        self._brought.clear()

    def bring(self, indices: Iterable[int]) -> None:
        """Copy these gradients to their places, once in a step; a None is copied as zeros.

        Raises UsageError if a gradient's dtype or shape has changed since the model was wrapped, or
        if its elements share memory and cannot hold an average.
        """
        new = [index for index in indices if index not in self._brought]
        self._brought.update(new)
        moved: list[int] = []
        given: list[torch.Tensor] = []
        for index in new:
            gradient = None if self._is_hidden else self.parameters[index].grad
            if gradient is None:
                self.places[index].zero_()
                continue
            if (gradient.dtype, gradient.shape) != self._kinds[index]:
                self._refuse_kind(index, gradient)
            is_dense = gradient.stride() == self.places[index].stride()  # as in most steps
            if not self.as_views and not is_dense and is_expanded(gradient):
                self.refuse(
                    f"the gradient of parameter {self.names[index]} is an expanded tensor, whose "
                    "elements share memory and cannot hold an average: give it a clone()"
                )
            if not (self.as_views and self._lies_in_place(index, gradient)):
                moved.append(index)
                given.append(gradient)
        copy_tensors([self.places[index] for index in moved], given)
        if self.as_views:  # now, to free the memory that autograd has allocated
            for index in moved:
                self.parameters[index].grad = self._view(index)

    def deliver(self, indices: Iterable[int]) -> None:
        """Copy the averages from their places to these gradients."""
        if self._is_hidden:
            return
        to: list[torch.Tensor] = []
        averages: list[torch.Tensor] = []
        for index in indices:
            parameter, place = self.parameters[index], self.places[index]
            gradient = parameter.grad
            if self.as_views:
                if gradient is None or not self._lies_in_place(index, gradient):
                    parameter.grad = self._view(index)
                continue
            if gradient is None:
                parameter.grad = gradient = torch.empty_like(place, device=parameter.device)
            elif (gradient.dtype, gradient.shape) != self._kinds[index]:
                self._refuse_kind(index, gradient)
            if gradient.is_conj():  # `_foreach_copy_` does not support it
                gradient, place = gradient.conj(), place.conj()
            to.append(gradient)
            averages.append(place)
        if len({one.data_ptr() for one in to}) < len(to):
            self._refuse_shared()
        copy_tensors(to, averages)

    def leave(self, indices: Iterable[int]) -> None:
        """Give these gradients their own memory if they are views of their places."""
        if not self.as_views:
            return
        for index in indices:
            gradient = self.parameters[index].grad
            if gradient is not None and self._lies_in_place(index, gradient):
                self.parameters[index].grad = gradient.clone()

    def release(self, lost: Collection[int]) -> None:
        """Give all gradients their own memory.

        Args:
            lost: parameters whose places were sent; gradients that are views of these become None.
        """
        for index in lost if self.as_views else ():
            gradient = self.parameters[index].grad
            if gradient is not None and self._lies_in_place(index, gradient):
                self.parameters[index].grad = None
        self.leave(range(len(self.parameters)))

    @contextlib.contextmanager
    def hidden(self, lost: Collection[int] = ()) -> Iterator[None]:
        """Release the gradients, then contribute zeros and leave them alone within the context."""
        self.release(lost)
        self._is_hidden = True
        try:
            yield
        finally:
            self._is_hidden = False

    def _lies_in_place(self, index: int, gradient: torch.Tensor) -> bool:
        place = self.places[index]
        return (
            gradient.data_ptr() == place.data_ptr()
            and (gradient.dtype, gradient.shape, gradient.stride())
            == (place.dtype, place.shape, place.stride())
            and not (gradient.is_conj() or gradient.is_neg())
        )

    def _refuse_shared(self) -> None:
        """Refuse two parameters with one gradient tensor: one average would replace the other."""
        first: dict[int, str] = {}
        for name, parameter in zip(self.names, self.parameters, strict=True):
            if parameter.grad is None or not parameter.numel():
                continue
            other = first.setdefault(parameter.grad.data_ptr(), name)
            if other != name:
                self.refuse(
                    f"the gradients of parameters {other} and {name} are one tensor, which cannot "
                    "hold two averages: give each parameter its own gradient"
                )

    def _refuse_kind(self, index: int, gradient: torch.Tensor) -> NoReturn:
        self.refuse(
            f"the gradient of parameter {self.names[index]} is {kind_of(gradient)}, but was "
            f"{kind_of(self.places[index])} when the model was wrapped: after a change of dtypes "
            "wrap `model.module` again, on every rank"
        )


def copy_tensors(to: Sequence[torch.Tensor], given: Sequence[torch.Tensor]) -> None:
    """Copy tensors, bypassing the caches for long ones: all gradients together exceed them."""
    others_to: list[torch.Tensor] = []
    others: list[torch.Tensor] = []
    for target, source in zip(to, given, strict=True):
        n_bytes = target.nbytes
        if n_bytes >= _STREAMED_BYTES and _is_plain(target, source):
            stream_copy(target.data_ptr(), source.data_ptr(), n_bytes)
            increment_version(target)
        else:
            others_to.append(target)
            others.append(source)
    if others:
        with torch.no_grad():
            torch._foreach_copy_(others_to, others)


def _is_plain(target: torch.Tensor, source: torch.Tensor) -> bool:
    """True if the bytes can be copied as they are. One of the two is a place and has no gaps."""
    return target.stride() == source.stride() and all(
        type(one) is torch.Tensor
        and one.is_cpu
        and not (one.is_neg() or one.is_conj() or one._is_zerotensor())
        and one.untyped_storage().nbytes() >= one.storage_offset() * one.itemsize + one.nbytes
        for one in (target, source)
    )
