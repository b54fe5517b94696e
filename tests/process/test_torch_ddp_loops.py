"""Training loops with wrapped models: gradients equal those of torch's wrapper over Gloo."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from process import ddp_training
from process.ddp_training import Gradients, Two, Wrap, gradients, inputs, mine, randoms
from process.ddp_training import wrap as wrap_ours
from process.shared_ranks import Case, SharedRanks, cases_in
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

import shoal.torch

N_STEPS = 3


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


def case_a_pass_for_other_gradients_on_one_rank_is_no_step(wrap: Wrap) -> list[Gradients]:
    wrapped, seen = wrap(Two(), find_unused_parameters=True), []
    for number in range(2 * N_STEPS):
        wrapped.zero_grad()
        given = randoms(number).requires_grad_()
        loss = wrapped(given).pow(2).sum()
        if dist.get_rank() == 0 and number % 2:
            torch.autograd.grad(loss, given, retain_graph=True)
        elif dist.get_rank() == 0:
            edge = torch.autograd.graph.get_gradient_edge(given)
            loss.backward(inputs=[given if number % 4 else edge], retain_graph=True)
        loss.backward()
        seen.append(gradients(wrapped))
    return seen


def case_a_pass_for_other_gradients_after_one_in_no_sync_is_no_step(wrap: Wrap) -> list[Gradients]:
    wrapped, seen = wrap(Two(), find_unused_parameters=True), []
    for number in range(2 * N_STEPS):
        wrapped.zero_grad()
        with wrapped.no_sync():
            wrapped(randoms(number)).sum().backward()
        given = randoms(number + 50).requires_grad_()
        loss = wrapped(given).pow(2).sum()
        if dist.get_rank() == 0:
            torch.autograd.grad(loss, given, retain_graph=True)
        loss.backward()
        seen.append(gradients(wrapped))
    return seen


def case_a_pass_for_other_gradients_on_one_rank_reserves_no_call(wrap: Wrap) -> list[Gradients]:
    wrapped, seen = wrap(Two()), []
    for number in range(N_STEPS):
        wrapped.zero_grad()
        given = randoms(number).requires_grad_()
        loss = wrapped(given).pow(2).sum()
        if dist.get_rank() == 0:
            torch.autograd.grad(loss, given, retain_graph=True)
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total.item() == 2
        loss.backward()
        seen.append(gradients(wrapped))
    return seen


def case_a_pass_for_all_parameters_by_name_is_a_step(wrap: Wrap) -> list[Gradients]:
    """The ranks use different parameters of one buffer, as the first pass finds out."""
    wrapped, seen = wrap(Two(), static_graph=True, bucket_cap_mb=1), []
    for number in range(N_STEPS):
        wrapped.zero_grad()
        loss = wrapped(randoms(number), both=dist.get_rank() == 0).pow(2).sum()
        weights = list(wrapped.parameters())
        loss.backward(inputs=[torch.autograd.graph.get_gradient_edge(weights[0]), *weights[1:]])
        seen.append(gradients(wrapped))
    return seen


def case_a_pass_for_other_gradients_leaves_the_weight_of_the_next_step_open() -> None:
    net = nn.Linear(1, 1, bias=False)
    wrapped = wrap_ours(net, weighted=True)
    for weight in (4, 1 + 2 * dist.get_rank()):
        wrapped.weigh(weight)
        given = torch.full((1, 1), 4.0 + 4 * dist.get_rank(), requires_grad=True)
        output = wrapped(given)
        torch.autograd.grad(output, given, retain_graph=True)
    output.backward()
    assert net.weight.grad.item() == 7.0  # (1 x 4 + 3 x 8) / 4


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
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    wrapped = shoal.torch.DistributedDataParallel(net, static_graph=True)
    for _ in range(2):
        wrapped(torch.ones(1, 4)).sum().backward()
    order = wrapped.reducer.averaging.averager.layout.order
    assert [index // 2 for index in order] == [2, 2, 1, 1, 0, 0]


# Wrappers that share parameters: each averages the gradients of its own backward passes.


def two_heads() -> tuple[nn.Module, nn.Module, nn.Module]:
    """Return a model with an encoder and two heads, and each head's model with that encoder."""
    torch.manual_seed(0)
    encoder, first, second = nn.Linear(6, 10), nn.Linear(10, 3), nn.Linear(10, 2)
    whole = nn.ModuleList([encoder, first, second]).double()
    return whole, nn.Sequential(encoder, first), nn.Sequential(encoder, second)


def case_models_that_share_an_encoder_train_in_turn(wrap: Wrap) -> list[Gradients]:
    whole, one, other = two_heads()
    a, b, seen = wrap(one), wrap(other), []
    is_ours = not isinstance(a.reducer, dist.Reducer)
    for number in range(6):
        if number % 2 == 0:
            whole.zero_grad(set_to_none=number % 4 == 0)
        if number == 3 and is_ours:  # torch's own wrapper then counts b's gradients as a's
            a(randoms(50))
        (a if number in (0, 1, 4) else b)(randoms(number)).pow(2).sum().backward()
        seen.append(gradients(whole))
        with a.no_sync():
            a(randoms(number + 20)).pow(2).sum().backward()
        b(randoms(number + 30)).pow(2).sum().backward()
        seen.append(gradients(one[0]))
    return seen


def case_an_old_wrapper_of_a_model_goes_on_beside_the_new_one(wrap: Wrap) -> list[Gradients]:
    net = two_heads()[1]
    old, seen = wrap(net), []
    new = wrap(net, find_unused_parameters=True)
    for number, wrapped in enumerate((old, new, new, old, old, new)):
        net.zero_grad()
        wrapped(randoms(number)).pow(2).sum().backward()
        seen.append(gradients(net))
    return seen


def case_wrappers_of_static_graphs_learn_only_from_their_own_passes(wrap: Wrap) -> list[Gradients]:
    net = two_heads()[1]
    first, seen = wrap(net), []
    is_ours = not isinstance(first.reducer, dist.Reducer)  # torch's leaves gradients local
    one, other = (wrap(net, static_graph=is_ours) for _ in range(2))
    for number, wrapped in enumerate((one, other, other, one)):
        net.zero_grad()
        wrapped(randoms(number)).pow(2).sum().backward()
        seen.append(gradients(net))
    return seen


def averaged(net: nn.Module, loss: torch.Tensor) -> list[torch.Tensor]:
    """Return the loss's derivatives, averaged over all ranks."""
    found = torch.autograd.grad(loss, list(net.parameters()))
    for one in found:
        dist.all_reduce(one)
    return [one / dist.get_world_size() for one in found]


def case_both_forward_passes_may_precede_both_backward_passes() -> None:
    whole, one, other = two_heads()
    wanted = averaged(whole, one(randoms(0)).pow(2).sum() + other(randoms(1)).pow(2).sum())
    a, b = (wrap_ours(net, weighted=True) for net in (one, other))
    for _ in range(2):
        whole.zero_grad()
        for wrapped in (a, b):
            wrapped.weigh(1)
        first, second = a(randoms(0)), b(randoms(1))
        second.pow(2).sum().backward()
        first.pow(2).sum().backward()
        torch.testing.assert_close(gradients(whole), wanted)


def case_a_buffer_filled_before_the_output_is_reached_stops_both_wrappers() -> None:
    """A parameter of one wrapper alone fills buffers before a gradient reaches its output."""
    whole, one, other = two_heads()
    one.only = nn.Parameter(torch.ones(64, dtype=torch.float64))
    a, b = wrap_ours(one), wrap_ours(other)
    loss = one(randoms(0)).pow(2).sum() + other(randoms(1)).pow(2).sum()
    wanted = averaged(whole, loss)
    for _ in range(2):
        whole.zero_grad()
        first = a(randoms(0)).pow(2).sum() + one.only.pow(2).sum()
        second = b(randoms(1)).pow(2).sum()
        first.backward()
        second.backward()
        torch.testing.assert_close(gradients(whole), wanted)


def case_no_sync_passes_do_not_average_gradients_of_the_other_wrapper() -> None:
    """Run no_sync passes before, between and after the other's passes, or in one pass."""
    for options in ({}, {"find_unused_parameters": True}, {"static_graph": True}):
        whole, one, other = two_heads()
        a, b = wrap_ours(one), wrap_ours(other, **options)
        wanted = averaged(whole[0], one(randoms(0)).pow(2).sum() + other(randoms(1)).pow(2).sum())
        for is_later, at_once in ((False, False), (True, False), (False, True), (True, True)):
            whole.zero_grad()
            second = b(randoms(1)).pow(2).sum() if is_later else None
            with a.no_sync():
                first = a(randoms(0)).pow(2).sum()
            if second is None:
                second = b(randoms(1)).pow(2).sum()
            if at_once:
                second = second + first
            else:
                local = torch.autograd.grad(first, list(one.parameters()), retain_graph=True)
                first.backward()
                torch.testing.assert_close(gradients(one), [*local], rtol=0, atol=0)
            second.backward()
            torch.testing.assert_close(gradients(whole[0]), wanted)


def case_a_backward_pass_through_both_wrappers_is_refused_with_a_parameter() -> None:
    whole, one, other = two_heads()
    a, b = wrap_ours(one), wrap_ours(other)
    with pytest.raises(shoal.UsageError, match=r"0\.weight is in two wrapped models, and one"):
        (a(randoms(0)).sum() + b(randoms(0)).sum()).backward()
    whole.zero_grad()
    wanted = averaged(whole[:2], one(randoms(0)).pow(2).sum())
    a(randoms(0)).pow(2).sum().backward()  # the refused pass leaves no trace
    torch.testing.assert_close(gradients(one), wanted)
    boxed = wrap_ours(ddp_training.Boxed(one))
    boxed(randoms(0))().sum().backward()
    b(randoms(0))
    with pytest.raises(shoal.UsageError, match="output of one of the two passes has no tensors"):
        boxed(randoms(0))


def case_a_no_sync_pass_without_output_tensors_is_refused_beside_another_wrapper() -> None:
    _, one, other = two_heads()
    a, _other = wrap_ours(ddp_training.Boxed(one)), wrap_ours(other)
    with a.no_sync(), pytest.raises(shoal.UsageError, match=r"0\.weight.* no_sync\(\) has no "):
        a(randoms(0))
    with a.no_sync(), torch.no_grad():
        a(randoms(0))


def case_a_pass_of_one_wrapper_inside_the_others_step_is_refused() -> None:
    _, one, other = two_heads()
    a, b = wrap_ours(one), wrap_ours(other)
    output = a(randoms(0))
    last = list(one.parameters())[-2:]
    torch.autograd.backward(output.sum(), inputs=last)  # the rest follows in another pass
    with pytest.raises(shoal.UsageError, match="waits for the rest: run its backward passes first"):
        b(randoms(0)).sum().backward()


@pytest.mark.parametrize("case", cases_in(globals()))
def test_beside_torchs_wrapper(case: Case, ranks: SharedRanks) -> None:
    ranks.run(ddp_training.run_case, case)
