"""Training loops with a wrapped model: gradients equal those of torch's wrapper over Gloo."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from process import ddp_training
from process.ddp_training import Gradients, OneOf, Two, Wrap, gradients, inputs, mine, randoms
from process.ddp_training import wrap as wrap_ours
from process.shared_ranks import Case, SharedRanks, cases_in
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

N_STEPS = 3


class Table(nn.Embedding):
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return super().forward(rows + dist.get_rank()).pow(2)


def case_a_model_that_has_sparse_gradients_only_is_averaged(wrap: Wrap) -> list[Gradients]:
    seen = []
    for options in ({}, {"find_unused_parameters": True}, {"static_graph": True}):
        torch.manual_seed(0)
        wrapped = wrap(Table(4, 2, sparse=True), **options)
        for number in range(N_STEPS):
            wrapped.zero_grad()
            with wrapped.no_sync() if number == 1 else contextlib.nullcontext():
                wrapped(torch.tensor([number % 2, 1])).sum().backward()
            wrapped(torch.tensor([2])).sum().backward()
            seen += [[one.to_dense() for one in gradients(wrapped) if one is not None]]
    return seen


def case_a_loss_of_derivatives_is_averaged_though_parameters_may_be_unused(
    wrap: Wrap,
) -> list[Gradients]:
    """Use a loss of derivatives, whose backward pass does not go through the output."""
    net = nn.Sequential(nn.Linear(6, 10, bias=False), nn.Tanh(), nn.Linear(10, 1, bias=False))
    for parameter in net.parameters():
        nn.init.constant_(parameter, 0.1)
    wrapped, seen = wrap(net.double(), find_unused_parameters=True), []
    for number in range(N_STEPS):
        wrapped.zero_grad()
        given = randoms(number).requires_grad_()
        (slope,) = torch.autograd.grad(wrapped(given).sum(), given, create_graph=True)
        slope.pow(2).sum().backward()
        seen.append(gradients(wrapped))
    return seen


def case_a_forward_pass_without_a_backward_pass_does_not_block_later_calls(
    wrap: Wrap,
) -> list[Gradients]:
    wrapped, seen = wrap(Two()), []
    for number in range(N_STEPS):
        wrapped.zero_grad()
        wrapped(randoms(number)).pow(2).sum().backward()
        seen.append(gradients(wrapped))
        if number and dist.get_rank() == 0:  # torch's makes other calls in the first pass
            wrapped(randoms(number + 50))  # to look at the output, and NOT in no_grad
        for _ in range(30 if number == 1 else 1):
            totals = [torch.ones(1) for _ in range(100)]
            for work in [dist.all_reduce(total, async_op=True) for total in totals]:
                work.wait()
            assert torch.cat(totals).eq(2).all()
    return seen


def case_a_pass_that_raised_in_its_middle_on_all_ranks_is_forgotten(wrap: Wrap) -> list[Gradients]:
    """A pass of shoal's wrapper raises with gradients in flight; torch's never raises."""
    wrapped, seen = wrap(Two()), []
    is_ours = not isinstance(wrapped.reducer, dist.Reducer)
    for number in range(2 * N_STEPS):
        wrapped.zero_grad()
        if number % 2 and is_ours:
            failing = wrapped.module.first.weight.register_hook(ddp_training.fail)
            with pytest.raises(ValueError, match="not this time"):
                wrapped(randoms(50)).pow(2).sum().backward()
            failing.remove()
            if number > 1:
                wrapped.reducer._reset_state()
            wrapped.zero_grad(set_to_none=number > 3)
            if number > 3:  # the next pass belongs to a step that averages later
                with wrapped.no_sync():
                    wrapped(randoms(60)).sum().backward()
                wrapped.zero_grad()
        wrapped(randoms(number)).pow(2).sum().backward()
        seen.append(gradients(wrapped))
    return seen


def small(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(6, 50), nn.BatchNorm1d(50), nn.ReLU(), nn.Linear(50, 40), nn.Linear(40, 3)
    )


def train_beside_gloo(ours: Any, theirs: Any, amp: bool = False) -> None:
    """Compare bits after every step: a sum over two ranks has only one order."""
    results = []
    for net in (ours, theirs):
        torch.manual_seed(1)
        optimizer = torch.optim.Adam(net.parameters())
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0, enabled=amp)
        seen = []
        for number in range(4):
            data, target = inputs(number, torch.float32)
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=amp):
                loss = nn.functional.mse_loss(net(mine(data)), mine(target))
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            seen.append([loss.detach()])
        results.append([*seen, [v.clone() for v in net.state_dict().values()]])
    torch.testing.assert_close(*results, rtol=0, atol=0)


def case_losses_and_states_equal_those_of_torchs_wrapper_over_gloo() -> None:
    gloo = dist.new_group(backend="gloo")
    size = {"bucket_cap_mb": 0.001}

    def both() -> Iterator[Any]:
        yield wrap_ours(small(dist.get_rank()), **size)
        net = small(dist.get_rank())
        yield nn.parallel.DistributedDataParallel(net, process_group=gloo, **size)

    train_beside_gloo(*both())
    train_beside_gloo(*both(), amp=True)
    ours, theirs = both()
    for hook in (default_hooks.allreduce_hook, default_hooks.fp16_compress_hook):
        ours, theirs = both()
        ours.register_comm_hook(dist.group.WORLD, hook)
        theirs.register_comm_hook(gloo, hook)
        train_beside_gloo(ours, theirs)
    with pytest.raises(RuntimeError, match="only be called once"):
        ours.register_comm_hook(None, hook)


def case_a_hook_may_wait_for_its_futures_on_one_rank() -> None:
    gloo, started = dist.new_group(backend="gloo"), []

    def waiting(world, bucket):  # type: ignore[no-untyped-def]  # torch compares annotations
        started.append(default_hooks.allreduce_hook(world, bucket))
        if dist.get_rank() == 0:
            started[-1].wait()
            torch.futures.wait_all(started)
        return started[-1]

    ours = wrap_ours(small(dist.get_rank()), bucket_cap_mb=0.001)
    ours.register_comm_hook(dist.group.WORLD, waiting)
    net = small(dist.get_rank())
    train_beside_gloo(ours, nn.parallel.DistributedDataParallel(net, process_group=gloo))
    assert len({id(future) for future in started}) > 3


def case_power_sgd_runs_with_several_buckets() -> None:
    """Over Gloo these would hang, because their callbacks make calls in any order."""
    net = wrap_ours(small(dist.get_rank()), bucket_cap_mb=0.001)
    how = {"matrix_approximation_rank": 2, "start_powerSGD_iter": 2, "min_compression_rate": 1}
    state = powerSGD_hook.PowerSGDState(None, **how)
    net.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    data, target = inputs(0, torch.float32)
    for _ in range(4):
        net.zero_grad()
        nn.functional.mse_loss(net(mine(data)), mine(target)).backward()
    assert state.iter == 4
    for parameter in net.parameters():
        pair = [torch.empty_like(parameter.grad) for _ in range(2)]
        dist.all_gather(pair, parameter.grad)
        assert torch.equal(*pair)


def case_torchs_bf16_hook_runs_without_a_gpu() -> None:
    net = OneOf(torch.ones(3))
    wrapped = wrap_ours(net)
    wrapped.register_comm_hook(None, default_hooks.bf16_compress_hook)
    wrapped(1.0 + 2 * dist.get_rank()).backward()
    assert torch.equal(net.parts[0].grad, torch.full((3,), 2.0))


def case_delayed_gradients_are_averages_when_the_backward_pass_returns() -> None:
    """Rank 1 joins the all-reduce of 8 MB when rank 0's backward pass has nothing else to do.

    Only the bias of the last layer is averaged in fusion buffers.
    """
    net = nn.Sequential(nn.Linear(2, 1000, bias=False), nn.Linear(1000, 2000))
    for parameter in net.parameters():
        nn.init.ones_(parameter)

    def meet(_: torch.Tensor) -> None:
        if dist.get_rank() == 0:
            dist.send(torch.ones(1), 1)
        else:
            dist.recv(torch.empty(1), 0)

    if dist.get_rank() == 1:
        net[0].weight.register_hook(meet)
    torchs = nn.parallel.DistributedDataParallel
    torchs._set_params_and_buffers_to_ignore_for_model(net, ["0.weight"])
    delayed = {"delay_all_reduce_named_params": [("1.weight", net[1].weight)]}
    wrapped = wrap_ours(net, **delayed, param_to_hook_all_reduce=net[0].weight)
    given = torch.ones(1, 2, requires_grad=True) * 1.0
    if dist.get_rank() == 0:
        given.register_hook(meet)  # runs after the hook of the weight, which starts the all-reduce
    (wrapped(given).sum() * 2 * dist.get_rank()).backward()
    assert torch.equal(net[1].weight.grad, torch.full((2000, 1000), 2.0))


def case_gradients_of_a_static_graph_are_laid_out_in_the_order_of_the_backward_pass() -> None:
    import shoal.torch

    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    wrapped = shoal.torch.DistributedDataParallel(net, static_graph=True)
    for _ in range(2):
        wrapped(torch.ones(1, 4)).sum().backward()
    order = wrapped.reducer.averaging.averager.layout.order
    assert [index // 2 for index in order] == [2, 2, 1, 1, 0, 0]


@pytest.mark.parametrize("case", cases_in(globals()))
def test_beside_torchs_wrapper(case: Case, ranks: SharedRanks) -> None:
    ranks.run(ddp_training.run_case, case)
