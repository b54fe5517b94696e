"""A wrapper goes on in another group, and averages as one process with all inputs would."""

import copy
import functools
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from process.ddp_training import Two as WithoutBuffer
from process.ddp_training import inputs, mine, randoms, whole, wrap
from process.ranks import on_survivors
from process.shared_ranks import Case, SharedRanks, cases_in, in_torch
from process.stage import Stage, error_of
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

import shoal.torch
from shoal.average import ErrorFeedback
from shoal.errors import Unsupported, UsageError


class Two(WithoutBuffer):
    def __init__(self, seed: int = 0, dtype: torch.dtype = torch.float64) -> None:
        super().__init__(seed, dtype)
        self.register_buffer("seen", torch.full((2,), float(seed)))


def step(wrapped: Any, number: int, both: bool = True) -> None:
    """Make a step of plain SGD on this rank's share of the inputs."""
    wrapped.zero_grad()
    if wrapped._options["weighted"]:
        wrapped.weigh(2)
    data = inputs(number)[0].to(wrapped.module.first.weight.dtype)
    wrapped(mine(data), both).sum().backward()
    descend(wrapped.module)


def descend(net: nn.Module) -> None:
    with torch.no_grad():
        for parameter in net.parameters():
            if parameter.grad is not None:
                parameter.sub_(parameter.grad / 64)


def train_beside(alone: Two, wrapped: Any, numbers: range, both: bool = True) -> None:
    """Make steps with the wrapper, and in plain torch on the inputs of all ranks; compare them."""
    for number in numbers:
        step(wrapped, number, both)
        alone.zero_grad()
        (alone(inputs(number)[0], both).sum() / dist.get_world_size()).backward()
        descend(alone)
    for (name, ours), wanted in zip(
        wrapped.module.named_parameters(), alone.parameters(), strict=True
    ):
        torch.testing.assert_close(ours, wanted, rtol=1e-12, atol=1e-12, msg=name)


def leave_in_mid_backward(wrapped: Any, number: int, cues: list[str]) -> None:
    """Close the links once the others have gradients of the second layer."""

    def fail(_gradient: torch.Tensor) -> None:
        dist.distributed_c10d._get_default_store().wait(cues)
        raise ValueError("not this time")

    wrapped.module.first.weight.register_hook(fail)
    with pytest.raises(ValueError, match="not this time"):
        step(wrapped, number)
    dist.destroy_process_group()


EVERY_WAY: list[dict[str, Any]] = [
    {},
    {"gradient_as_bucket_view": True},
    {"static_graph": True},
    {"find_unused_parameters": True},
    {"weighted": True, "check_finite": True, "check_same": 2},
    {"hook": allreduce_hook},
]


@pytest.mark.parametrize("options", EVERY_WAY)
@in_torch("three_ranks")
def test_a_step_that_lost_a_rank_is_repeated_in_the_next_group(options: dict[str, Any]) -> None:
    cues = [f"rank {rank} has a gradient, {sorted(options)}" for rank in range(2)]
    net, alone = Two(), Two()
    wrapped = wrap(net, **options)
    train_beside(alone, wrapped, range(2))
    if dist.get_rank() == 2:
        leave_in_mid_backward(wrapped, 2, cues)
        return
    store, cue = dist.distributed_c10d._get_default_store(), cues[dist.get_rank()]
    cueing = net.second.bias.register_hook(lambda _: store.set(cue, ""))
    error = error_of(step, wrapped, 2)
    cueing.remove()
    assert isinstance(error, RuntimeError), error
    assert shoal.torch.peer_lost() is not None
    shoal.torch.shrink_group()
    wrapped.regroup()
    assert wrapped.process_group is dist.group.WORLD
    is_view = bool(options.get("gradient_as_bucket_view"))
    check_interrupted(net, alone, dist.get_rank(), 3, is_view=is_view)
    train_beside(alone, wrapped, range(2, 5))
    if "hook" not in options:
        numbers = [one.number for one in wrapped.reducer.averaging.averager.times]
        assert numbers == [0, 1, 2, 3, 4]


def check_interrupted(net: Two, alone: Two, rank: int, size: int, *, is_view: bool) -> None:
    """Check that gradients of the interrupted pass are those of its rank, or None."""
    own = copy.deepcopy(alone)
    own.zero_grad()
    own(whole((4 * size, 6), 102)[4 * rank :][:4]).sum().backward()
    for (name, ours), wanted in zip(net.named_parameters(), own.parameters(), strict=True):
        assert ours.grad is None or torch.equal(ours.grad, wanted.grad), name
    assert (net.second.bias.grad is None) == is_view


@pytest.mark.parametrize(
    "options", [{}, {"gradient_as_bucket_view": True}, {"hook": allreduce_hook}]
)
@on_survivors(4, (0, 1), has_stage=True)
def test_renumbered_survivors_of_ranks_killed_in_mid_backward_go_on_with_their_wrapper(
    options: dict[str, Any],
) -> None:
    """Lose rank 1 of four, then rank 0 of three."""
    dist.init_process_group("shoal")
    stage = Stage.from_environment()
    net, alone = Two(), Two()
    wrapped = wrap(net, **options)
    train_beside(alone, wrapped, range(2))
    for victim in (1, 0):
        rank, size = dist.get_rank(), dist.get_world_size()
        with net.second.bias.register_hook(functools.partial(meet, stage, victim)):
            error = error_of(step, wrapped, 2)
        assert isinstance(error, RuntimeError), error
        assert shoal.torch.peer_lost().rank == victim
        shoal.torch.shrink_group()
        assert dist.get_rank() == rank - (rank > victim)
        wrapped.regroup()
        check_interrupted(net, alone, rank, size, is_view="gradient_as_bucket_view" in options)
        train_beside(alone, wrapped, range(2, 5))
    assert dist.get_rank() == int(os.environ["RANK"]) - 2


def meet(stage: Stage, victim: int, _gradient: torch.Tensor) -> None:
    """Wait until all ranks are in their backward pass; the victim dies."""
    size = dist.get_world_size()
    stage.meet(dist.get_rank(), size, f"in the backward pass of {size} ranks", victim)


@pytest.mark.parametrize("options", EVERY_WAY)
@in_torch("three_ranks")
def test_a_rank_that_wraps_its_model_joins_ranks_that_regroup(options: dict[str, Any]) -> None:
    pair = dist.new_group([0, 1])
    alone, rank = Two(), dist.get_rank()
    net = Two(7 if rank == 2 else 0)
    if rank < 2:
        wrapped = wrap(net, process_group=pair, **options)
        wrapped.zero_grad()
        for _ in range(2):
            if options.get("weighted"):
                wrapped.weigh(1)
            wrapped(whole((4, 6), 5)).sum().backward()
        assert wrapped.reducer.n_steps == 2
        wrapped.regroup()
    else:
        wrapped = wrap(net, **options)
    assert net.seen.tolist() == [0, 0]  # of rank 0
    train_beside(alone, wrapped, range(3))


@pytest.mark.parametrize("options", [{"find_unused_parameters": True}, {"static_graph": True}])
@in_torch("three_ranks")
def test_a_layer_that_no_rank_uses_stays_unused_with_a_new_rank(options: dict[str, Any]) -> None:
    pair = dist.new_group([0, 1])
    net, alone = Two(), Two()
    if dist.get_rank() < 2:
        wrapped = wrap(net, process_group=pair, **options)
        wrapped(whole((4, 6), 5), False).sum().backward()
        wrapped.zero_grad()
        wrapped.regroup()
    else:
        wrapped = wrap(net, **options)
    train_beside(alone, wrapped, range(3), both=False)
    assert net.second.weight.grad is None


groups_of_hooks: list[object] = []


def note_group(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    groups_of_hooks.append(state)
    return allreduce_hook(state, bucket)


def case_a_new_rank_with_another_model_is_named_and_others_regroup_again() -> None:
    pair = dist.new_group([0, 1])
    net, alone = Two(), Two()
    data = mine(inputs(0)[0])
    named = r"parameter first\.weight is not the same .*float32\[3, 6\] on rank 2"
    if dist.get_rank() < 2:
        wrapped = wrap(net, process_group=pair)
        wrapped.register_comm_hook(pair, note_group)
        loss = wrapped(data).sum()
        with pytest.raises(UsageError, match=named):
            wrapped.regroup()
        for use in (lambda: wrapped(data), loss.backward):
            with pytest.raises(UsageError, match=r"repeat the step from its forward pass"):
                use()
        wrapped.regroup()
        with pytest.raises(UsageError, match=r"repeat the step from its forward pass"):
            loss.backward(retain_graph=True)
    else:
        with pytest.raises(UsageError, match=named):
            wrap(Two(dtype=torch.float32))
        wrapped = wrap(net)
        wrapped.register_comm_hook(dist.group.WORLD, note_group)
    train_beside(alone, wrapped, range(1))
    assert set(groups_of_hooks) == {dist.group.WORLD}
    groups_of_hooks.clear()


def case_wrappers_that_share_parameters_regroup_in_turn() -> None:
    net, alone = Two(), Two()
    wrappers = [wrap(net), wrap(net)]
    for wrapped in wrappers:
        wrapped.regroup()
    for number in range(4):
        train_beside(alone, wrappers[number % 2], range(number, number + 1))


def case_gradients_in_the_averagers_memory_are_moved_out() -> None:
    wrapped = wrap(Two(), gradient_as_bucket_view=True)
    for number in range(2):
        step(wrapped, number)
    named = dict(wrapped.module.named_parameters())
    averages = {name: one.grad.clone() for name, one in named.items()}
    wrapped.regroup()
    places = wrapped.reducer.averaging.gradients.places
    for name, parameter in named.items():
        assert torch.equal(parameter.grad, averages[name])
        assert all(parameter.grad.data_ptr() != place.data_ptr() for place in places)


def case_residuals_are_kept_even_for_a_layer_frozen_since() -> None:
    wrapped = wrap(Two(dtype=torch.float32), compress=ErrorFeedback("mxint8"))
    for number in range(2):
        wrapped(randoms(number).float()).sum().backward()
    held = wrapped.feedback_state_dict()
    assert any(one.any() for one in held["residuals"].values())
    wrapped.regroup()
    again = wrapped.feedback_state_dict()
    assert again["n_steps"] == held["n_steps"] == 2
    for name, residual in held["residuals"].items():
        assert torch.equal(again["residuals"][name], residual)
    wrapped.module.first.requires_grad_(False)
    wrapped.regroup()
    fewer = wrapped.feedback_state_dict()
    assert list(fewer["residuals"]) == ["second.weight", "second.bias"]
    for name, residual in fewer["residuals"].items():
        assert torch.equal(held["residuals"][name], residual)
    step(wrapped, 2)


def case_regrouping_inside_a_join_is_refused() -> None:
    wrapped = wrap(Two())
    with wrapped.join(), pytest.raises(Unsupported, match="within join"):
        wrapped.regroup()


@pytest.mark.parametrize("case", cases_in(globals()))
def test_wrappers_that_regroup(case: Case, three_ranks: SharedRanks) -> None:
    three_ranks.run(case)
