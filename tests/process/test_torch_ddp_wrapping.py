"""Wrappers that are dropped, copied and pickled, and models that change under them."""

from __future__ import annotations

import copy
import gc
import importlib.util
import pickle
import weakref
from typing import Any

import pytest
from process.ranks import run_ranks

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not installed", allow_module_level=True)

import torch
import torch.distributed as dist
from process.ddp_training import inputs, mine, start, whole, wrap
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook


def small() -> nn.Sequential:
    net = nn.Sequential(nn.Linear(6, 5, dtype=torch.float64), nn.Linear(5, 3, dtype=torch.float64))
    for seed, parameter in enumerate(net.parameters()):
        parameter.data = whole(tuple(parameter.shape), seed)
    return net


def step(wrapped: nn.Module, net: nn.Module) -> None:
    """One backward pass, whose gradients are those of all inputs."""
    data, _ = inputs(0)
    net.zero_grad()
    wrapped(mine(data)).sum().backward()
    alone = copy.deepcopy(net)
    alone.zero_grad()
    (alone(data).sum() / dist.get_world_size()).backward()
    for ours, wanted in zip(net.parameters(), alone.parameters(), strict=True):
        assert (ours.grad is None) == (wanted.grad is None)
        assert ours.grad is None or torch.equal(ours.grad, wanted.grad)


def n_hooks(net: nn.Module) -> int:
    return sum(len(p._post_accumulate_grad_hooks or ()) for p in net.parameters())


def drop_static_wrappers() -> None:
    start()
    for n_steps in (0, 1, 3):
        net = small()
        wrapped = wrap(net, static_graph=True)
        for _ in range(n_steps):
            step(wrapped, net)
        gone = weakref.ref(wrapped.reducer)
        del wrapped
        gc.collect()
        assert gone() is None
        assert n_hooks(net) == 0
    dist.destroy_process_group()


def test_a_dropped_wrapper_of_a_static_graph_leaves_no_hook_on_parameters() -> None:
    run_ranks(drop_static_wrappers, 2)


def first_element(_state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer()[:1])
    return done


# As torch wants it, which compares the annotation itself.
first_element.__annotations__ = {"bucket": dist.GradBucket}


def drop_without_collecting() -> None:
    start()
    views, unused = {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}
    gc.collect()
    gc.disable()
    for options in ({}, views, unused, {"static_graph": True}, {"check_same": 1}, None):
        net = small()
        wrapped = wrap(net, **(options or {}))
        if options is None:
            wrapped.register_comm_hook(None, allreduce_hook)
        for _ in range(2):
            step(wrapped, net)
        reducer = wrapped.reducer
        held = [weakref.ref(one) for one in (wrapped, reducer, reducer.averaging)]
        if options is not None:
            held.append(weakref.ref(reducer.averaging.averager))
        del wrapped, reducer
        assert [one() for one in held] == [None] * len(held), options
    dist.destroy_process_group()


def test_a_dropped_wrapper_is_gone_without_the_collector_of_cycles() -> None:
    run_ranks(drop_without_collecting, 2)


def hook_with_one_element() -> None:
    from shoal.errors import UsageError

    start()
    net = small()
    wrapped = wrap(net)
    wrapped.register_comm_hook(None, first_element)
    with pytest.raises(UsageError, match=r"hook made 1 elements of bucket 0, which has \d+"):
        wrapped(inputs(0)[0]).sum().backward()
    dist.destroy_process_group()


def test_a_hook_that_returns_another_length_is_refused() -> None:
    run_ranks(hook_with_one_element, 2)


def copy_and_wrap_again() -> None:
    start()
    for made in (copy.deepcopy, lambda wrapped: pickle.loads(pickle.dumps(wrapped))):
        copied = made(wrap(small()))
        net = copied.module
        step(copied, net)
        again = wrap(net)
        step(again, net)
        step(copied, net)
        del copied
        gc.collect()
        assert n_hooks(net) == len(list(net.parameters()))
        step(again, net)
    dist.destroy_process_group()


def test_the_model_of_a_copied_wrapper_can_be_wrapped_again() -> None:
    run_ranks(copy_and_wrap_again, 2)


def freeze_and_thaw() -> list[str]:
    from shoal.errors import UsageError

    start()
    said = []
    net = small()
    wrapped = wrap(net)
    step(wrapped, net)
    net[0].requires_grad_(False)
    data, _ = inputs(0)
    wrapped(mine(data)).sum().backward()
    with pytest.raises(RuntimeError) as raised:
        wrapped(mine(data))
    said.append(str(raised.value))
    wrapped = wrap(net)  # as it says
    step(wrapped, net)
    net[0].requires_grad_(True)
    with torch.no_grad():
        wrapped(mine(data))
    with pytest.raises(UsageError) as thawed:
        wrapped(mine(data))
    said.append(str(thawed.value))
    step(wrap(net), net)
    unused = wrap(net, find_unused_parameters=True)
    net[1].weight.requires_grad_(False)
    step(unused, net)
    dist.destroy_process_group()
    return said


def test_parameters_that_change_requires_grad_are_named_and_can_be_wrapped_anew() -> None:
    for frozen, thawed in run_ranks(freeze_and_thaw, 2):
        assert "Of these 0.weight, 0.bias required a gradient when" in frozen
        assert "parameter 0.weight, 0.bias requires a gradient now" in thawed


def train_scripted() -> None:
    start()
    net = small()
    wrapped = wrap(torch.jit.script(net))  # type: ignore[no-untyped-call]
    for _ in range(2):
        step(wrapped, net)
    dist.destroy_process_group()


def test_scripted_models_are_trained() -> None:
    run_ranks(train_scripted, 2)


def call_with_others() -> None:
    from shoal.errors import UsageError

    start()
    net = small()
    wrapped = wrap(net)
    given = mine(inputs(0)[0])
    values = {name: one.detach() * 2 for name, one in wrapped.named_parameters()}
    torch.func.functional_call(wrapped, values, (given,))  # they are not trained
    step(wrapped, net)
    trained = {name: one.requires_grad_() for name, one in values.items()}
    with pytest.raises(UsageError, match=r"parameter 0.weight.* was registered on rank"):
        torch.func.functional_call(wrapped, trained, (given,))
    dist.destroy_process_group()


def test_a_call_with_other_parameters_that_are_trained_is_refused() -> None:
    run_ranks(call_with_others, 2)


class Boxed(nn.Module):
    """Gives something in which nobody looks for tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.net = small()

    def forward(self, given: torch.Tensor) -> Any:
        return lambda: self.net(given)


def lose_hooks(options: dict[str, Any]) -> None:
    from shoal.errors import UsageError

    start()
    given = mine(inputs(0)[0])
    for model in (small(), Boxed()):
        wrapped = wrap(model, **options)
        if type(model) is Boxed:  # nothing tells of this pass, but the next forward pass finds out
            wrapped(given)
        for parameter in model.parameters():
            torch.utils.swap_tensors(parameter, nn.Parameter(parameter.detach().clone()))
        with pytest.raises(UsageError, match=r"0.weight has lost its hook on rank"):
            wrapped(given).sum().backward()
    dist.destroy_process_group()


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}])
def test_parameters_that_have_lost_their_hooks_are_named(options: dict[str, Any]) -> None:
    run_ranks(lose_hooks, 2, options)


def wrap_on_two_devices() -> str:
    start()
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    with pytest.raises(ValueError, match=r"device") as raised:
        wrap(net)
    dist.destroy_process_group()
    return str(raised.value)


def test_parameters_on_several_kinds_of_devices_are_refused_with_their_names() -> None:
    (said,) = run_ranks(wrap_on_two_devices, 1)
    assert "cpu" in said
    assert "meta" in said
