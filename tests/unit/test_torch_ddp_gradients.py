"""Gradients whose places change: what is kept of them, and what is copied for that."""

from __future__ import annotations

import importlib.util

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not installed", allow_module_level=True)

import torch

from shoal.frontend.torch.ddp.gradients import Gradients


def gradients_in(memory: torch.Tensor, firsts: list[int]) -> Gradients:
    """Of two elements each, at these places of the memory, all shown but the last one."""
    gradients = Gradients([torch.nn.Parameter(torch.zeros(2)) for _ in firsts])
    gradients.settle([memory[first : first + 2] for first in firsts])
    gradients.show(range(len(firsts) - 1))
    return gradients


def test_gradients_that_change_places_with_each_other_keep_their_values() -> None:
    memory = torch.arange(8.0)
    gradients = gradients_in(memory, [0, 2, 4, 6])
    left = gradients.leave({0, 1})
    gradients.settle([memory[first : first + 2] for first in (2, 0, 4, 6)])
    gradients.come_back(left)
    shown = [parameter.grad for parameter in gradients.parameters]
    assert [None if one is None else one.tolist() for one in shown] == [
        [0, 1],
        [2, 3],
        [4, 5],
        None,
    ]
    assert all(one is place for one, place in zip(shown[:3], gradients.places, strict=False))
    assert memory.tolist() == [2, 3, 0, 1, 4, 5, 6, 7]


def test_only_gradients_that_move_are_copied() -> None:
    gradients = gradients_in(torch.arange(8.0), [0, 2, 4, 6])
    left = gradients.leave({1, 3})
    assert {index for index, values in left.items() if values is not None} == {1}
    assert set(left) == {0, 1, 2}  # the last one does not lie in its place


def test_a_gradient_that_is_another_view_of_its_place_comes_back_as_the_place() -> None:
    memory = torch.arange(6.0)
    gradients = gradients_in(memory, [0, 2, 4])
    for parameter in gradients.parameters[:2]:
        assert parameter.grad is not None
        parameter.grad = parameter.grad.detach()  # programs do
    left = gradients.leave({0, 2})
    gradients.settle([memory[first : first + 2] for first in (4, 2, 0)])
    memory[:2] = -1.0
    gradients.come_back(left)
    assert gradients.parameters[0].grad is gradients.places[0]
    assert gradients.parameters[1].grad is gradients.places[1]
    assert memory.tolist() == [-1, -1, 2, 3, 0, 1]


def test_what_is_hidden_comes_back_though_it_is_another_view_of_its_place() -> None:
    memory = torch.arange(4.0)
    gradients = gradients_in(memory, [0, 2])
    assert gradients.parameters[0].grad is not None
    gradients.parameters[0].grad = gradients.parameters[0].grad.detach()
    with gradients.hidden():
        memory.zero_()
    assert gradients.parameters[0].grad.tolist() == [0, 1]
