"""A group that ends while a step is put off: what has been stepped is whole, or is refused."""

from __future__ import annotations

import copy
import importlib.util
import pickle
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from process.ranks import run_ranks

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not installed", allow_module_level=True)

import torch
import torch.distributed as dist
from torch import nn

States = tuple[dict[str, Any], dict[str, Any]]


def wrap(module: nn.Module, **options: Any) -> Any:
    import shoal.torch

    return shoal.torch.DistributedDataParallel(module, **options)


def batch() -> torch.Tensor:
    return torch.full((2, 4), float(1 + dist.get_rank()))


def states_of(net: nn.Module, optimizer: torch.optim.Optimizer) -> States:
    return copy.deepcopy((net.state_dict(), optimizer.state_dict()))


def are_equal(one: States, other: States) -> bool:
    return len(values_of(one)) == 12 and all(map(torch.equal, values_of(one), values_of(other)))


def values_of(states: States) -> list[torch.Tensor]:
    """The parameters and their momenta."""
    return [*states[0].values(), *(of["momentum_buffer"] for of in states[1]["state"].values())]


def put_off() -> tuple[nn.Sequential, Any, torch.optim.Optimizer, States]:
    """Three layers with a step that is put off, and the states before it."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    wrapped = wrap(net, overlap_forward=True)
    optimizer = wrapped.overlap(torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))
    wrapped(batch()).sum().backward()
    optimizer.step()  # the first step is taken at once
    before = states_of(net, optimizer)
    wrapped(batch()).sum().backward()
    optimizer.step()
    return net, wrapped, optimizer, before


def lose(wrapped: Any, layers: str, error: Exception) -> None:
    """From now on the averages of these layers, and no others, will never be in."""
    averager, names = wrapped.reducer.averaging.averager, wrapped.reducer.names
    wait_for = averager.wait_for

    def lost(index: int) -> None:
        if names[index][0] in layers:
            raise error
        wait_for(index)

    averager.wait_for = lost
    averager.is_in = lambda _: False  # NOT stepped while others are waited for


def in_a_group(check: str) -> None:
    dist.init_process_group("shoal", timeout=timedelta(seconds=30))
    globals()[check]()
    dist.destroy_process_group()


def step_some() -> None:
    import shoal

    net, wrapped, optimizer, before = put_off()
    lose(wrapped, "12", shoal.Closed("the group has ended"))
    told = (
        "the group has ended; 2 of 6 parameters have been stepped on this rank, and 1.weight, "
        "1.bias, 2.weight, 2.bias will not be: load a state of the model and of the optimizer"
    )
    with pytest.raises(shoal.Closed, match=told):
        wrapped(batch())
    uses: list[Callable[[], Any]] = [
        lambda: wrapped(batch()),
        lambda: net[1](batch()),
        wrapped.synchronize,
        optimizer.step,
        net.state_dict,
        optimizer.state_dict,
        lambda: wrap(net),
    ]
    for use in uses:
        with pytest.raises(shoal.ShoalError, match="2 of 6 parameters have been stepped"):
            use()
    net[0].load_state_dict({n[2:]: v for n, v in before[0].items() if n[0] == "0"})
    with pytest.raises(shoal.Closed, match="2 of 6"):  # all that was to be stepped may be a mixture
        net.state_dict()
    net.load_state_dict(before[0])
    optimizer.load_state_dict(before[1])
    assert are_equal(states_of(net, optimizer), before)
    wrap(net)(batch()).sum().backward()


def step_none() -> None:
    import shoal

    net, wrapped, optimizer, before = put_off()
    lose(wrapped, "012", shoal.PeerLost(1, reason="closed the link", doing="recv 4 B"))
    with pytest.raises(shoal.PeerLost, match="recv 4 B; no parameter has been stepped") as raised:
        wrapped(batch())
    assert (raised.value.rank, raised.value.reason) == (1, "closed the link")
    assert are_equal(states_of(net, optimizer), before)
    wrap(net)(batch()).sum().backward()


def average_none() -> None:
    import shoal

    net, wrapped, _, _ = put_off()
    wrapped(batch()).sum().backward()
    lose(wrapped, "2", shoal.Closed("the group has ended"))
    for _ in range(2):
        with pytest.raises(shoal.Closed, match=r"^the group has ended$"):
            wrapped.synchronize()
        with pytest.raises(shoal.UsageError, match="no average yet"):
            torch.stack([p.grad.norm() for p in net.parameters() if p.grad is not None])


def step_all_that_is_stepped() -> None:
    """What the optimizer does not have is lost; there is no mixture."""
    import shoal

    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    wrapped = wrap(net, overlap_forward=True)
    optimizer = wrapped.overlap(torch.optim.SGD(net[0].parameters(), lr=0.1))
    for _ in range(2):
        wrapped(batch()).sum().backward()
        optimizer.step()
    lose(wrapped, "1", shoal.Closed("the group has ended"))
    with pytest.raises(shoal.Closed, match=r"; all parameters have been stepped on this rank$"):
        wrapped(batch())
    assert len(net.state_dict()) == 4
    wrap(net)(batch()).sum().backward()


def keep_a_mixture() -> None:
    """What does not bring other values for all that was to be stepped ends no refusal."""
    import shoal

    net, wrapped, _, before = put_off()
    wrapped.synchronize()
    copied = copy.deepcopy(net)
    wrapped(batch()).sum().backward()
    wrapped.reducer.overlap.put_off()
    lose(wrapped, "12", shoal.Closed("the group has ended"))
    with pytest.raises(shoal.Closed, match="2 of 6"):
        wrapped(batch())
    head = {name: value for name, value in before[0].items() if name[0] == "2"}
    copied.load_state_dict(before[0])
    assert all(map(torch.equal, copied.state_dict().values(), before[0].values()))
    net.load_state_dict({}, strict=False)
    net.load_state_dict(head, strict=False)
    with pytest.raises(RuntimeError, match="size mismatch"):
        net.load_state_dict({name: value[:2] for name, value in before[0].items()})
    for use in (net.state_dict, lambda: copy.deepcopy(net), lambda: pickle.dumps(net)):
        with pytest.raises(shoal.Closed, match="2 of 6"):
            use()
    rest = {name: value for name, value in before[0].items() if name not in head}
    net.load_state_dict(rest, strict=False)
    assert all(map(torch.equal, net.state_dict().values(), before[0].values()))


def lose_before_step() -> None:
    """Between backward and step parameters are whole, and no gradient is an average."""
    import shoal

    net, wrapped, optimizer, _ = put_off()
    wrapped.synchronize()
    before = states_of(net, optimizer)
    wrapped(batch()).sum().backward()
    lose(wrapped, "2", shoal.PeerLost(1, reason="closed the link", doing="recv 4 B"))
    with pytest.raises(shoal.PeerLost, match=r"\(recv 4 B\)"):
        wrapped.synchronize()
    assert are_equal(states_of(net, optimizer), before)
    assert not copy.deepcopy(net)(batch()).isnan().any()
    for model in (net, wrapped):
        with torch.no_grad():
            model.eval()(batch())
    net.train()(batch())
    with pytest.raises(shoal.UsageError, match="no average yet"):
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    with pytest.raises(shoal.PeerLost):
        wrapped.train()(batch())
    assert are_equal(states_of(net, optimizer), before)
    wrap(net)(batch()).sum().backward()


def fail_behind_the_step() -> None:
    import shoal

    _, wrapped, _, _ = put_off()

    def fail() -> None:
        raise shoal.Closed("the group has ended")

    wrapped.reducer.averaging.averager.wait = fail
    with pytest.raises(shoal.Closed, match="; all parameters have been stepped on this rank"):
        wrapped.synchronize()


@pytest.mark.parametrize(
    "check",
    [
        *("step_some", "step_none", "step_all_that_is_stepped", "average_none"),
        *("keep_a_mixture", "lose_before_step", "fail_behind_the_step"),
    ],
)
def test_a_group_that_ends_leaves_no_mixture_that_nobody_is_told_of(check: str) -> None:
    run_ranks(in_a_group, 2, check)


def weigh_nothing() -> None:
    """The same error from `backward` as without overlap; nothing is stepped, and steps go on."""
    import shoal

    ends = []
    for options in ({}, {"overlap_forward": True}):
        torch.manual_seed(0)
        net = wrap(nn.Linear(4, 4), weighted=True, **options)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, weight_decay=1.0)
        optimizer = net.overlap(optimizer) if options else optimizer
        for weight in (1, 0, 1 + dist.get_rank()):
            net.weigh(weight)
            loss = net(batch()).square().mean()
            optimizer.zero_grad()
            if weight:
                loss.backward()
                optimizer.step()
                continue
            net.synchronize()
            before = net.module.weight.detach().clone()
            with pytest.raises(shoal.UsageError, match="weights of all ranks are 0"):
                loss.backward()
            assert torch.equal(net.module.weight, before)
        net.synchronize()
        ends.append(net.module.weight.detach())
    assert torch.equal(*ends)


def test_where_all_weights_are_0_nothing_is_stepped() -> None:
    run_ranks(in_a_group, 2, "weigh_nothing")
