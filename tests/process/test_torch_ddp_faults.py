"""Errors of a step of shoal's DistributedDataParallel, on every rank."""

import contextlib
from collections.abc import Callable
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed as dist
from process.ddp_training import Two, assert_averaged, fail, gradients, inputs, mine, randoms, wrap
from process.shared_ranks import Case, SharedRanks, cases_in, in_torch
from process.stage import error_of
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

import shoal.torch
from shoal.average import NotFinite
from shoal.errors import UsageError


@pytest.mark.parametrize(
    "options", [{}, {"static_graph": True}, {"hook": allreduce_hook, "wire": "identity"}]
)
@in_torch("three_ranks")
def test_a_gradient_missing_on_one_rank_is_named_on_every_rank(options: dict[str, Any]) -> None:
    wrapped = wrap(Two(), **options)
    data, _ = inputs(0)
    wrapped(mine(data), True).sum().backward()
    if dist.get_rank() == 1:
        wrapped(mine(data), False).sum().backward()
    with pytest.raises(RuntimeError) as raised:
        wrapped(mine(data), True).sum().backward()
    text = str(raised.value)
    if dist.get_rank() == 1:
        assert "did not receive grad for rank 1: second.weight, second.bias" in text
    else:
        assert "no gradient of parameter second.weight, second.bias arrived on rank 1" in text
        assert "find_unused_parameters=True; the group has ended" in text


@pytest.mark.parametrize("thaws", [False, True])
@in_torch("ranks")
def test_ranks_go_on_as_an_error_about_a_frozen_parameter_advises(thaws: bool) -> None:
    """`thaws` trains a frozen parameter."""
    net = Two()
    net.second.requires_grad_(not thaws)
    wrapped = wrap(net)
    data, _ = inputs(0)
    wrapped(mine(data), True).sum().backward()
    net.second.requires_grad_(thaws == (dist.get_rank() == 1))
    if dist.get_rank() == 1 and not thaws:
        wrapped(mine(data), True).sum().backward()
    with pytest.raises(RuntimeError) as raised:
        wrapped(mine(data), True).sum().backward()
    net.second.requires_grad_(False)
    shoal.torch.shrink_group()
    again = wrap(net)
    net.zero_grad()
    again(mine(data), True).sum().backward()
    assert_averaged(net, data)
    message = str(raised.value)
    assert ("requires a gradient now on rank 1, but did not" in message) == thaws
    assert "wrap `model.module` again, on every rank" in message
    assert "the group has ended: call shrink() of it on every rank" in message
    assert "shoal.torch.shrink_group()" in message


def case_a_gradient_missing_on_all_ranks_does_not_end_the_group() -> None:
    wrapped = wrap(Two())
    data, _ = inputs(0)
    wrapped(mine(data), False).sum().backward()
    with pytest.raises(RuntimeError, match=r"did not receive grad .*: second.weight, second.bias"):
        wrapped(mine(data), True)
    dist.barrier()
    again = wrap(Two())
    again(mine(data), True).sum().backward()


@pytest.mark.parametrize("hook", [None, allreduce_hook])
@in_torch("ranks")
def test_a_gradient_computed_twice_is_named_with_advice(hook: Any) -> None:
    wrapped = wrap(Two(), hook=hook)
    data, _ = inputs(0)
    for _ in range(2):
        wrapped.zero_grad()
        weight = wrapped.module.first.weight
        loss = wrapped(mine(data), True)
        (loss[:, 0].sum() + weight.sum()).backward(retain_graph=True, inputs=[weight])
        kind = RuntimeError if hook else UsageError
        with pytest.raises(kind, match=r"first\.weight came twice .* add them up"):
            loss.sum().backward()


def raise_in_mid_backward(options: dict[str, Any], raising: tuple[int, ...]) -> str:
    """Return the error after a pass that raised on some ranks; empty if training goes on."""
    net = Two()
    net.register_buffer("seen", torch.zeros(3))  # broadcast before each forward pass
    wrapped = wrap(net, **options)
    data, _ = inputs(0)

    def step() -> None:
        if options.get("weighted"):
            wrapped.weigh(2)
        wrapped(mine(data), True).sum().backward()

    step()
    alone = gradients(net)
    net.zero_grad()
    raises = dist.get_rank() in raising
    failing = net.first.weight.register_hook(fail) if raises else contextlib.nullcontext()
    with failing:
        error = error_of(step)
    if raises:
        assert str(error) == "not this time"
        net.zero_grad()
        error = error_of(step)
    text = str(error or "")
    if not text:
        torch.testing.assert_close(gradients(net), alone, rtol=0, atol=0)
    return text


@pytest.mark.parametrize(
    "options",
    [
        {"find_unused_parameters": True},
        {"weighted": True, "check_finite": True},
        {"gradient_as_bucket_view": False},
        {"hook": allreduce_hook},
    ],
)
def test_a_pass_that_raised_on_all_ranks_is_forgotten(
    options: dict[str, Any], ranks: SharedRanks
) -> None:
    assert ranks.run(raise_in_mid_backward, options, (0, 1)) == ["", ""]


def case_data_sent_before_a_pass_raised_is_in_no_gradient() -> None:
    """Rank 0 zeroes its gradients in place before the averages of the failed pass arrive."""
    rank, gloo = dist.get_rank(), dist.new_group(backend="gloo")
    net = Two()
    wrapped = wrap(net, gradient_as_bucket_view=True)
    data, _ = inputs(0)
    wrapped(mine(data), True).sum().backward()
    if rank == 1:
        dist.barrier(gloo)
    with net.first.weight.register_hook(fail):
        error = error_of(wrapped(mine(data), True).sum().backward)
    assert str(error) == "not this time"
    net.zero_grad(set_to_none=False)
    if rank == 0:
        dist.barrier(gloo)
    wrapped(mine(data), True).sum().backward()
    assert_averaged(net, data)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_pass_that_raised_on_one_rank_is_an_error_on_all(
    rank: int, three_ranks: SharedRanks
) -> None:
    for text in three_ranks.run(raise_in_mid_backward, {}, (rank,)):
        assert f"a backward pass raised on rank {rank} before its end" in text
        assert "shoal.torch.shrink_group()" in text


@pytest.mark.parametrize("hook", [None, default_hooks.bf16_compress_hook])
@in_torch("ranks")
def test_backward_passes_of_two_models_in_a_different_order_are_named_on_every_rank(
    hook: Any,
) -> None:
    wrapped = {name: wrap(nn.Linear(40, 30), hook=hook) for name in "GD"}
    order = "DG" if dist.get_rank() == ODD else "GD"

    def train() -> None:
        for name in order:
            wrapped[name](torch.ones(4, 40)).sum().backward()

    left = error_of(dist.barrier)  # others may be past it, in mismatched calls
    text = str(left or error_of(train) or error_of(dist.barrier))
    for averager in (2, 4) if hook else (1, 2):
        assert f"for averager {averager}, step 1, buffer 0" in text
        assert f"averager {averager} averages 'weight' to 'bias', and is in" in text


@pytest.mark.parametrize("as_views", [False, True])
@in_torch("ranks")
def test_no_value_of_a_non_finite_step_is_in_the_next(as_views: bool) -> None:
    net = Two()
    wrapped = wrap(
        net, find_unused_parameters=True, check_finite=True, gradient_as_bucket_view=as_views
    )
    data, _ = inputs(0)
    for drops in (True, False):
        with pytest.raises(NotFinite):
            (wrapped(mine(data), True).sum() * float("inf")).backward()
        net.zero_grad(set_to_none=drops)
        wrapped(mine(data), False).sum().backward()
        assert_averaged(net, data, False, may_have_zeros=not drops)
        for unused in net.second.parameters():
            assert (unused.grad is None) == drops
            assert drops or not unused.grad.any()


ODD = 1


class Net(nn.Module):
    """A model with a constant buffer, and statistics of each rank's batches."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)
        self.register_buffer("mask", torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(x))) * self.mask


def add_to(tensor: torch.Tensor) -> None:
    with torch.no_grad():
        tensor.view(-1)[-1] += 1


Spoil = Callable[[Net, torch.optim.Adam], object]
FIRST = "in step 4 parameter 'last.weight'"
# By the name in the error: the change that one rank makes.
FAULTS: dict[str, Spoil] = {
    FIRST: lambda net, _adam: add_to(net.last.weight),
    "in step 4 buffer 'mask'": lambda net, _adam: add_to(net.mask),
    "'exp_avg_sq' of optimizer 0, parameter group 0, parameter 'first.bias'": lambda net, adam: (
        add_to(adam.state[net.first.bias]["exp_avg_sq"])
    ),
    "'lr' of optimizer 0, parameter group 0": lambda _net, adam: adam.param_groups[0].update(
        lr=0.5
    ),
}


@pytest.mark.parametrize(
    ("spoilt", "hook"),
    [*((fault, None) for fault in ("", *FAULTS)), ("", allreduce_hook), (FIRST, allreduce_hook)],
)
@in_torch("three_ranks")
def test_a_value_changed_on_one_rank_is_named_on_every_rank(spoilt: str, hook: Any) -> None:
    torch.manual_seed(0)
    net = Net()
    wrapped = wrap(net, check_same=2, broadcast_buffers=False, hook=hook)
    adam = torch.optim.Adam(net.parameters(), lr=0.01)
    wrapped.check_same(adam)
    errors = []
    for number in range(1, 7):
        net.zero_grad()
        loss = wrapped(randoms(number).float()).pow(2).sum()
        errors.append(str(error_of(loss.backward)))
        adam.step()
        if number == 3 and spoilt and dist.get_rank() == ODD:
            FAULTS[spoilt](net, adam)
    *equal, fourth, _, _ = errors
    assert equal == ["None"] * 3
    assert spoilt or errors == ["None"] * 6
    for words in (f"{spoilt} is not the same on all ranks", " on ranks 0, 2, ", " on rank 1;"):
        assert words in fourth or not spoilt


def case_ranks_that_compare_in_different_steps_are_refused_when_they_wrap() -> None:
    for init_sync in (False, True):
        every = 3 if dist.get_rank() == ODD else 0
        with pytest.raises(UsageError, match="check_same"):
            wrap(Net(), check_same=every, init_sync=init_sync)


def case_an_optimizer_is_refused_without_comparisons() -> None:
    net = nn.Linear(2, 2)
    with pytest.raises(UsageError, match="wrap the model with check_same=N"):
        wrap(net).check_same(torch.optim.SGD(net.parameters()))


def case_ranks_without_further_inputs_are_not_compared() -> None:
    net = nn.Linear(6, 3)
    wrapped = wrap(net, check_same=1)
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    with wrapped.join():
        for _ in range(2 + dist.get_rank()):
            net.zero_grad()
            wrapped(torch.ones(4, 6)).sum().backward()
            sgd.step()


def case_a_wrapper_is_as_before_once_a_join_has_ended() -> None:
    net = nn.Linear(6, 3)
    wrapped = wrap(net, check_same=2)
    with wrapped.join():
        for _ in range(2 + dist.get_rank()):
            wrapped(torch.ones(4, 6)).sum().backward()
    wrapped(torch.ones(4, 6)).sum().backward()  # the 4th step on every rank
    net.bias.data += dist.get_rank()
    wrapped(torch.ones(4, 6)).sum().backward()
    with pytest.raises(UsageError, match="'bias' is not the same on all ranks"):
        wrapped(torch.ones(4, 6)).sum().backward()
    wrapped.regroup()


def case_a_join_whose_last_passes_had_no_average_leaves_nothing_behind() -> None:
    net = nn.Linear(1, 1, bias=False)
    wrapped = wrap(net, check_same=1)
    with wrapped.join(divide_by_initial_world_size=False):
        for number in range(2 + 2 * dist.get_rank()):
            with wrapped.no_sync() if number % 2 else contextlib.nullcontext():
                wrapped(torch.ones(1, 1)).backward()
    net.zero_grad()
    wrapped(torch.full((1, 1), 1.0 + dist.get_rank())).backward()
    assert net.weight.grad.item() == 1.5


class Backwards(nn.Sequential):
    """Its gradients come in another order than the first layout of fusion buffers has."""

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        for layer in reversed(list(self)):
            data = layer(data)
        return data


def case_an_interrupted_change_of_layout_is_finished_by_the_next_forward_pass() -> None:
    net = Backwards(nn.Linear(6, 6), nn.Linear(6, 6))
    wrapped = wrap(net)

    def passes(value: float) -> None:
        net.zero_grad()
        wrapped(torch.full((1, 6), value + dist.get_rank())).sum().backward()

    passes(1.0)
    if dist.get_rank() == 1:
        interrupt = MagicMock(side_effect=KeyboardInterrupt)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(wrapped.reducer.averaging.gradients, "settle", interrupt)
            with pytest.raises(KeyboardInterrupt):
                wrapped(torch.ones(1, 6))
    for value in (2.0, 3.0):
        passes(value)
        averages = [one.grad.clone() for one in net.parameters()]
        net.zero_grad()
        net(torch.stack([torch.full((6,), value + rank) for rank in range(2)])).sum().backward()
        for average, one in zip(averages, net.parameters(), strict=True):
            torch.testing.assert_close(average * 2, one.grad)


@pytest.mark.parametrize("case", cases_in(globals()))
def test_faults(case: Case, ranks: SharedRanks) -> None:
    ranks.run(case)
