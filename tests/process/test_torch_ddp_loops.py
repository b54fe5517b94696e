"""What training loops may do with a wrapped model: gradients are those of torch's over Gloo."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from process.ranks import run_ranks

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not installed", allow_module_level=True)

import torch
import torch.distributed as dist
from process.ddp_training import start
from process.ddp_training import wrap as wrap_ours
from torch import nn

N_STEPS = 3
Wrap = Callable[..., Any]


class Two(nn.Module):
    """Two branches, of which the second is used if told so."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3, bias=False))
        self.second = nn.Linear(6, 3)
        self.double()

    def forward(self, data: torch.Tensor, both: bool = True) -> torch.Tensor:
        return self.first(data) + (self.second(data) if both else 0)


def data(number: int) -> torch.Tensor:
    """This rank's."""
    source = torch.Generator().manual_seed(100 * number + dist.get_rank())
    return torch.randn(4, 6, dtype=torch.float64, generator=source)


def gradients(net: nn.Module) -> list[torch.Tensor | None]:
    return [p.grad if p.grad is None else p.grad.clone() for p in net.parameters()]


def beside_gloo(loop: Callable[[Wrap], list[list[torch.Tensor | None]]]) -> None:
    """In a rank: what the loop sees is the same with shoal's wrapper as with torch's."""
    import shoal.torch

    dist.init_process_group("shoal", timeout=timedelta(seconds=30))
    gloo = dist.new_group(backend="gloo")
    size = {"bucket_cap_mb": 256 / (1 << 20)}
    ours = loop(lambda net, **o: shoal.torch.DistributedDataParallel(net, **size, **o))
    theirs = loop(
        lambda net, **o: nn.parallel.DistributedDataParallel(net, process_group=gloo, **size, **o)
    )
    for number, (some, others) in enumerate(zip(ours, theirs, strict=True)):
        for index, (a, b) in enumerate(zip(some, others, strict=True)):
            assert (a is None) == (b is None), (number, index)
            same = a is None or b is None or torch.allclose(a, b, rtol=1e-9, atol=1e-12)
            assert same, f"step {number}, parameter {index}: {a} and {b}"
    dist.destroy_process_group()


def pause_in_between(wrap: Wrap) -> list[list[torch.Tensor | None]]:
    wrapped, seen = wrap(Two()), []
    for number in range(N_STEPS):
        wrapped.zero_grad()
        output = wrapped(data(number))
        with wrapped.no_sync():
            wrapped(data(number + 50))
        output.pow(2).sum().backward()
        seen.append(gradients(wrapped))
    return seen


def test_a_forward_pass_in_no_sync_leaves_one_before_it_to_be_averaged() -> None:
    run_ranks(beside_gloo, 2, pause_in_between)


def run_out_of_inputs(wrap: Wrap) -> list[list[torch.Tensor | None]]:
    wrapped, seen = wrap(Two(), find_unused_parameters=True), []
    wrapped(data(0)).sum().backward()
    with wrapped.join(divide_by_initial_world_size=False):
        for number in range(2 + 2 * (dist.get_rank() == 0)):
            wrapped(data(number), both=False).pow(2).sum().backward()
            if dist.get_rank() == 0:
                seen.append(gradients(wrapped))
    return seen


def test_gradients_that_no_rank_computes_stay_as_they_are_while_some_have_run_out() -> None:
    run_ranks(beside_gloo, 2, run_out_of_inputs)


def change_gradients(wrap: Wrap) -> list[list[torch.Tensor | None]]:
    wrapped, seen = wrap(Two()), []
    for parameter in wrapped.parameters():
        parameter.register_post_accumulate_grad_hook(_scale)
    for number in range(N_STEPS):
        wrapped.zero_grad()
        wrapped(data(number)).pow(2).sum().backward()
        seen.append(gradients(wrapped))
    return seen


def _scale(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(1.0 + dist.get_rank())


def test_hooks_that_are_put_on_parameters_later_change_what_is_averaged() -> None:
    run_ranks(beside_gloo, 2, change_gradients)


def change_gradients_late(wrap: Wrap) -> list[list[torch.Tensor | None]]:
    wrapped, seen = wrap(Two()), []
    for number in range(N_STEPS):
        wrapped.zero_grad()
        loss = wrapped(data(number)).pow(2).sum()
        hooks = [p.register_post_accumulate_grad_hook(_scale) for p in wrapped.parameters()]
        loss.backward()
        for hook in hooks:
            hook.remove()
        seen.append(gradients(wrapped))
    return seen


def test_hooks_that_are_put_on_parameters_after_the_forward_pass_change_it_too() -> None:
    run_ranks(beside_gloo, 2, change_gradients_late)


class Penalized(Two):
    """Has a parameter that fills buffers before a gradient reaches the model's output."""

    def __init__(self) -> None:
        super().__init__()
        self.only = nn.Parameter(torch.ones(64, dtype=torch.float64))


def change_gradients_behind_a_penalty(wrap: Wrap) -> list[list[torch.Tensor | None]]:
    net, seen = Penalized(), []
    wrapped = wrap(net)
    for number in range(N_STEPS):
        wrapped.zero_grad()
        loss = wrapped(data(number)).pow(2).sum() + net.only.pow(2).sum()
        hooks = [p.register_post_accumulate_grad_hook(_scale) for p in net.first.parameters()]
        loss.backward()
        for hook in hooks:
            hook.remove()
        seen.append(gradients(wrapped))
    return seen


def test_such_hooks_change_it_where_a_loss_fills_a_buffer_before_the_output() -> None:
    run_ranks(beside_gloo, 2, change_gradients_behind_a_penalty)


class Table(nn.Embedding):
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return super().forward(rows + dist.get_rank()).pow(2)


def train_a_table(wrap: Wrap) -> list[list[torch.Tensor | None]]:
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


def test_a_model_that_has_sparse_gradients_only_is_averaged() -> None:
    run_ranks(beside_gloo, 2, train_a_table)


def look_at_slopes(wrap: Wrap) -> list[list[torch.Tensor | None]]:
    """Before the backward pass, which is averaged, the derivative by the input is asked for."""
    # torch's own learns from that pass, and leaves gradients local.
    is_ours = not isinstance(wrap(Two()).reducer, dist.Reducer)
    wrapped, seen = wrap(Two(), static_graph=is_ours), []
    for number in range(N_STEPS):
        wrapped.zero_grad()
        given = data(number).requires_grad_()
        loss = wrapped(given).pow(2).sum()
        torch.autograd.grad(loss, given, retain_graph=True)
        loss.backward()
        seen.append(gradients(wrapped))
    return seen


def test_a_static_graph_is_not_learnt_from_a_pass_in_which_no_gradient_came() -> None:
    run_ranks(beside_gloo, 2, look_at_slopes)


def penalize(wrap: Wrap) -> list[list[torch.Tensor | None]]:
    """A loss that is made of derivatives: its backward pass does not come by the output."""
    net = nn.Sequential(nn.Linear(6, 10, bias=False), nn.Tanh(), nn.Linear(10, 1, bias=False))
    for parameter in net.parameters():
        nn.init.constant_(parameter, 0.1)
    wrapped, seen = wrap(net.double(), find_unused_parameters=True), []
    for number in range(N_STEPS):
        wrapped.zero_grad()
        given = data(number).requires_grad_()
        (slope,) = torch.autograd.grad(wrapped(given).sum(), given, create_graph=True)
        slope.pow(2).sum().backward()
        seen.append(gradients(wrapped))
    return seen


def test_a_loss_of_derivatives_is_averaged_though_parameters_may_be_unused() -> None:
    run_ranks(beside_gloo, 2, penalize)


def fail_and_go_on(wrap: Wrap) -> list[list[torch.Tensor | None]]:
    wrapped, seen = wrap(Two()), []
    for number in range(N_STEPS):
        wrapped.zero_grad()
        output = wrapped(data(number))
        failing = output.register_hook(_fail)
        with pytest.raises(ValueError, match="not this time"):
            output.pow(2).sum().backward(retain_graph=True)
        failing.remove()
        output.pow(2).sum().backward()
        seen.append(gradients(wrapped))
    return seen


def _fail(_gradient: torch.Tensor) -> None:
    raise ValueError("not this time")


def test_a_backward_pass_after_one_that_raised_is_averaged() -> None:
    run_ranks(beside_gloo, 2, fail_and_go_on)


def wrap_once_more(wrap: Wrap) -> list[list[torch.Tensor | None]]:
    net, seen = Two(), []
    for number in range(N_STEPS):
        wrapped = wrap(net)
        wrapped(data(number))  # to see that it runs
        del wrapped
        gc.collect()
        assert not any(len(p._post_accumulate_grad_hooks or ()) for p in net.parameters())
        wrapped = wrap(net)
        wrapped.zero_grad()
        wrapped(data(number)).pow(2).sum().backward()
        seen.append(gradients(wrapped))
    return seen


def test_a_dropped_wrapper_leaves_no_hook_on_parameters() -> None:
    run_ranks(beside_gloo, 2, wrap_once_more)


def look_on_one_rank(wrap: Wrap) -> list[list[torch.Tensor | None]]:
    wrapped, seen = wrap(Two()), []
    for number in range(N_STEPS):
        wrapped.zero_grad()
        wrapped(data(number)).pow(2).sum().backward()
        seen.append(gradients(wrapped))
        if number and dist.get_rank() == 0:  # torch's own calls others in the first of them
            wrapped(data(number + 50))  # to look at the output, and NOT in no_grad
        for _ in range(30 if number == 1 else 1):
            totals = [torch.ones(1) for _ in range(100)]
            for work in [dist.all_reduce(total, async_op=True) for total in totals]:
                work.wait()
            assert torch.cat(totals).eq(2).all()
    return seen


def test_a_forward_pass_that_nothing_comes_back_from_holds_no_place_among_calls() -> None:
    run_ranks(beside_gloo, 2, look_on_one_rank)


def skip_one_that_spans_buffers(wrap: Wrap) -> list[list[torch.Tensor | None]]:
    """One branch is so long that it lies in many buffers; rank 1 alone uses it."""
    net = Two()
    net.second = nn.Sequential(nn.Linear(6, 2048), nn.Linear(2048, 3)).double()
    wrapped, seen = wrap(net, find_unused_parameters=True), []
    for number in range(N_STEPS):
        wrapped.zero_grad()
        wrapped(data(number), both=dist.get_rank() == 1).pow(2).sum().backward()
        seen.append(gradients(wrapped))
    return seen


def test_a_parameter_in_many_buffers_that_one_rank_lacks_is_averaged() -> None:
    run_ranks(beside_gloo, 2, skip_one_that_spans_buffers)


def own_gradients(wrap: Wrap, **options: Any) -> list[list[torch.Tensor | None]]:
    """What programs do with gradients between steps."""
    keeps = bool(options)
    wrapped, seen = wrap(Two(), find_unused_parameters=True, **options), []

    def step(number: int) -> None:
        wrapped(data(number), both=number % 2 == 0 or dist.get_rank() == 0).pow(2).sum().backward()
        seen.append(gradients(wrapped))

    step(0)
    kept = [p.grad for p in wrapped.parameters()]
    wrapped.zero_grad(set_to_none=True)
    step(1)
    if keeps:
        seen.append(kept)
    buffers: list[torch.Tensor | None] = [torch.ones_like(p) for p in wrapped.parameters()]
    for parameter, buffer in zip(wrapped.parameters(), buffers, strict=True):
        parameter.grad = buffer
    step(2)
    if keeps:
        seen.append([b if b is None else b.clone() for b in buffers])
        assert all(p.grad is b for p, b in zip(wrapped.parameters(), buffers, strict=True))
    for parameter in wrapped.parameters():
        assert parameter.grad is not None
        parameter.grad.detach_()
        parameter.grad.zero_()
    step(3)
    with wrapped.no_sync():
        step(4)
    step(5)
    return seen


def views_and_own(wrap: Wrap) -> list[list[torch.Tensor | None]]:
    return own_gradients(wrap) + own_gradients(wrap, gradient_as_bucket_view=False)


def test_gradients_may_be_replaced_detached_and_if_asked_kept() -> None:
    run_ranks(beside_gloo, 2, views_and_own)


def raise_in_the_middle(wrap: Wrap) -> list[list[torch.Tensor | None]]:
    """Of shoal's, a pass raises when some gradients are on their way; torch's never raises."""
    wrapped, seen = wrap(Two()), []
    is_ours = not isinstance(wrapped.reducer, dist.Reducer)
    for number in range(2 * N_STEPS):
        wrapped.zero_grad()
        if number % 2 and is_ours:
            failing = wrapped.module.first[0].weight.register_hook(_fail)
            with pytest.raises(ValueError, match="not this time"):
                wrapped(data(50)).pow(2).sum().backward()
            failing.remove()
            if number > 1:
                wrapped.reducer._reset_state()
            wrapped.zero_grad(set_to_none=number > 3)
            if number > 3:  # the next one is of a step that averages later
                with wrapped.no_sync():
                    wrapped(data(60)).sum().backward()
                wrapped.zero_grad()
        wrapped(data(number)).pow(2).sum().backward()
        seen.append(gradients(wrapped))
    return seen


def test_a_pass_that_raised_in_its_middle_on_all_ranks_is_forgotten() -> None:
    run_ranks(beside_gloo, 2, raise_in_the_middle)


def average_now_and_then(wrap: Wrap) -> list[list[torch.Tensor | None]]:
    """torch's own post-local SGD: gradients of all ranks first, then parameters every two steps."""
    from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as local
    from torch.distributed.algorithms.model_averaging import averagers
    from torch.distributed.optim import PostLocalSGDOptimizer

    alone, _ = dist.new_subgroups(group_size=1)
    seen = []
    for has_hook in (True, False):
        wrapped = wrap(Two())
        group = wrapped.process_group
        averager = averagers.PeriodicModelAverager(2, 2 * has_hook, group)
        optimizer: Any = torch.optim.SGD(wrapped.parameters(), lr=0.1, momentum=0.5)
        if has_hook:
            state = local.PostLocalSGDState(group, alone, start_localSGD_iter=2)
            wrapped.register_comm_hook(state, local.post_localSGD_hook)
            optimizer = PostLocalSGDOptimizer(optimizer, averager)
        for number in range(7):
            optimizer.zero_grad()
            with contextlib.nullcontext() if has_hook else wrapped.no_sync():
                wrapped(data(number)).pow(2).sum().backward()
            optimizer.step()
            if not has_hook:
                averager.average_parameters(wrapped.parameters())
            seen.append([p.detach().clone() for p in wrapped.parameters()])
    return seen


def test_torchs_periodic_averaging_of_parameters_runs_unchanged() -> None:
    run_ranks(beside_gloo, 2, average_now_and_then)


def order_of_a_static_graph() -> list[int]:
    start()
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    wrapped = wrap_ours(net, static_graph=True)
    for _ in range(2):
        wrapped(torch.ones(1, 4)).sum().backward()
    dist.destroy_process_group()
    return [index // 2 for index in wrapped.reducer.averaging.averager.layout.order]


def test_gradients_of_a_static_graph_are_laid_out_as_the_backward_pass_meets_the_layers() -> None:
    assert run_ranks(order_of_a_static_graph, 2) == [[2, 2, 1, 1, 0, 0]] * 2
