"""With `overlap_forward` programs compute what they compute without it, bit for bit."""

from __future__ import annotations

import copy
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
from torch import nn
from torch.nn.utils import prune

Kind = Callable[[Any], torch.optim.Optimizer]
Between = Callable[[Any, torch.optim.Optimizer, int], "torch.Tensor | None"]


def wrap(module: nn.Module, **options: Any) -> Any:
    import shoal.torch

    return shoal.torch.DistributedDataParallel(module, **options)


def batch(step: int) -> torch.Tensor:
    source = torch.Generator().manual_seed(10 * step + dist.get_rank())
    return torch.randn(8, 16, generator=source)


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 24), nn.Linear(24, 16))


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def nothing(_net: Any, _optimizer: Any, _step: int) -> None:
    """Between a step and the next forward pass."""


def train(net: Any, kind: Kind, between: Between = nothing) -> list[torch.Tensor]:
    """The losses, what was seen between steps, and the parameters."""
    optimizer = kind(net.parameters())
    if net.reducer.overlap is not None:
        optimizer = net.overlap(optimizer)
    seen = []
    for step in range(5):
        loss = net(batch(step)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found = between(net, optimizer, step)
        seen += [loss.detach()] if found is None else [loss.detach(), found]
    net.synchronize()
    return [*seen, *(parameter.detach().clone() for parameter in net.parameters())]


def train_both_ways(net: nn.Module, kind: Kind, between: Between = nothing) -> None:
    plain = train(wrap(copy.deepcopy(net)), kind, between)
    overlapped = train(wrap(copy.deepcopy(net), overlap_forward=True), kind, between)
    assert len(plain) == len(overlapped)
    assert all(map(torch.equal, plain, overlapped))


def in_a_group(check: str) -> None:
    dist.init_process_group("shoal", timeout=timedelta(seconds=30))
    torch.manual_seed(0)
    globals()[check]()
    dist.destroy_process_group()


class Codebook(nn.Module):
    """Looks for the nearest codes, without a gradient, before it calls the module that has them."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.codes = nn.Linear(16, 16), nn.Embedding(32, 16)

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.encoder(data)
        nearest = torch.cdist(found, self.codes.weight).argmin(1)
        return found + self.codes(nearest)


class Folded(nn.Module):
    """Calls a module in training only."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(16, 16)

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = (
            self.last(data)
            if self.training
            else nn.functional.linear(data, self.last.weight, self.last.bias)
        )
        return found


def evaluated(net: Any, _optimizer: Any, step: int) -> torch.Tensor:
    net.eval()
    with torch.no_grad():
        found: torch.Tensor = net(batch(100 + step)).clone()
    net.train()
    return found


def evaluated_part(net: Any, _optimizer: Any, step: int) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = net.module[0](batch(100 + step)[None]).clone()
    return found


def use_parameters_in_other_ways() -> None:
    train_both_ways(Codebook(), lambda p: torch.optim.Adam(p, lr=0.3))
    pruned = layers()
    prune.l1_unstructured(pruned[2], "weight", amount=0.3)  # type: ignore[no-untyped-call]
    plain, overlapped = wrap(pruned), layers()
    prune.l1_unstructured(overlapped[2], "weight", amount=0.3)  # type: ignore[no-untyped-call]
    overlapped.load_state_dict(pruned.state_dict())  # a weight made by a hook cannot be copied
    results = train(plain, momentum), train(wrap(overlapped, overlap_forward=True), momentum)
    assert all(map(torch.equal, *results))
    train_both_ways(Folded(), momentum, evaluated)
    attending = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    train_both_ways(nn.Sequential(attending), momentum, evaluated_part)


def test_no_parameter_is_used_before_it_is_stepped() -> None:
    run_ranks(in_a_group, 2, "use_parameters_in_other_ways")


def load(net: Any, optimizer: torch.optim.Optimizer, step: int) -> None:
    """After the fourth step the model, a part of another and the optimizer are what they were."""
    if step == 1:
        net.kept = copy.deepcopy((net.module.state_dict(), optimizer.state_dict()))
    if step == 2:
        part = {n.partition(".")[2]: v for n, v in net.kept[0].items() if n.startswith("2.")}
        net.module[2].load_state_dict(part)
    if step == 3:
        net.module.load_state_dict(net.kept[0])
        optimizer.load_state_dict(net.kept[1])


def state_of_part(net: Any, _optimizer: Any, _step: int) -> torch.Tensor:
    found: torch.Tensor = net.module[2].state_dict()["weight"].clone()
    return found


def save_and_load() -> None:
    train_both_ways(layers(), momentum, load)
    train_both_ways(layers(), momentum, state_of_part)


def test_states_are_saved_and_loaded_with_all_steps_taken() -> None:
    run_ranks(in_a_group, 2, "save_and_load")


def inferred_once(net: Any, _optimizer: Any, step: int) -> torch.Tensor | None:
    if step:
        return None
    with torch.inference_mode():
        found: torch.Tensor = net(batch(100)).clone()
    return found


class Autocast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = layers()

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found: torch.Tensor = self.layers(data)
        return found.float()


def halve(_net: Any, optimizer: torch.optim.Optimizer, _step: int) -> None:
    optimizer.param_groups[0]["lr"].mul_(0.5)  # as schedulers do


def step_as_if_outside() -> None:
    train_both_ways(layers(), lambda p: torch.optim.SGD(p, lr=torch.tensor(0.1)), halve)
    train_both_ways(layers(), torch.optim.Adam, inferred_once)
    train_both_ways(Autocast(), lambda p: torch.optim.Adafactor(p, lr=0.01))
    frozen = layers()
    frozen[0].requires_grad_(False)
    train_both_ways(frozen, momentum)


def test_a_step_computes_what_it_would_have_where_it_was_put_off() -> None:
    run_ranks(in_a_group, 2, "step_as_if_outside")


def step_both_ways(step: Callable[[Any, torch.optim.Optimizer, int], None]) -> None:
    """Six steps of a program, which end in the same bits with and without overlap."""
    results = []
    for options in ({}, {"overlap_forward": True}):
        torch.manual_seed(0)
        net = wrap(layers(), **options)
        optimizer = momentum(net.parameters())
        optimizer = net.overlap(optimizer) if options else optimizer
        for number in range(6):
            step(net, optimizer, number)
        net.synchronize()
        results.append([parameter.detach() for parameter in net.parameters()])
    assert all(map(torch.equal, *results))


def add_local_gradients() -> None:
    """A pass that is not averaged runs while averages are on their way."""

    def step(net: Any, optimizer: torch.optim.Optimizer, number: int) -> None:
        with net.no_sync():
            local = net(batch(100 + number)).square().mean()
        averaged = net(batch(number)).square().mean()
        optimizer.zero_grad()
        averaged.backward()
        local.backward()
        optimizer.step()

    step_both_ways(step)


def test_gradients_that_come_while_averages_are_on_their_way_are_added() -> None:
    run_ranks(in_a_group, 2, "add_local_gradients")


def skip_steps() -> None:
    """Steps that a program leaves out, and whose gradients it drops, count nowhere."""

    def step(net: Any, optimizer: torch.optim.Optimizer, number: int) -> None:
        net(batch(number)).square().mean().backward()
        if number == 4:
            net.module[2].zero_grad()
        if number % 3:
            optimizer.step()
        optimizer.zero_grad()

    step_both_ways(step)


def test_gradients_that_a_program_drops_are_not_in_the_next_step() -> None:
    run_ranks(in_a_group, 2, "skip_steps")


def order_of_state() -> list[int]:
    dist.init_process_group("shoal", timeout=timedelta(seconds=30))
    net = wrap(layers(), overlap_forward=True)
    if dist.get_rank():  # there the averages of the last layer are in first
        net.reducer.averaging.averager.is_in = lambda index: index > 3
    optimizer = net.overlap(momentum(net.parameters()))
    for step in range(3):
        net(batch(step)).sum().backward()
        optimizer.step()
    net.synchronize()
    places = {id(parameter): place for place, parameter in enumerate(net.parameters())}
    dist.destroy_process_group()
    return [places[id(parameter)] for parameter in optimizer.state]


def test_an_optimizers_state_is_in_the_order_of_parameters_on_every_rank() -> None:
    assert run_ranks(order_of_state, 2) == [[0, 1, 2, 3, 4, 5]] * 2


class Counting(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        super().step(closure)
        self.param_groups[0]["n_steps"] = self.param_groups[0].get("n_steps", 0) + 1


def refuse_what_is_for_whole_steps() -> None:
    import shoal

    data = torch.ones(8, 16)
    net = wrap(layers(), overlap_forward=True)
    optimizer = net.overlap(momentum(net.parameters()))
    net(data).sum().backward()
    hook = optimizer.register_step_post_hook(lambda *_: None)
    with pytest.raises(shoal.Unsupported, match=r"step hooks.*model\.synchronize"):
        optimizer.step()
    hook.remove()
    optimizer.step()
    net = wrap(layers(), overlap_forward=True)
    optimizer = net.overlap(Counting(net.parameters(), lr=0.1))
    net(data).sum().backward()
    with pytest.raises(shoal.Unsupported, match=r"Counting changes 'n_steps'"):
        optimizer.step()
    net = wrap(layers(), overlap_forward=True)
    optimizer = net.overlap(torch.optim.SGD(net.parameters(), fused=True))
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(net(data).sum()).backward()
    with pytest.raises(shoal.UsageError, match=r"GradScaler.*model\.synchronize"):
        scaler.step(optimizer)
    net = wrap(layers(), overlap_forward=True)
    with pytest.raises(shoal.Unsupported, match="LBFGS steps all parameters at once"):
        net.overlap(torch.optim.LBFGS(net.parameters()))
    strange = torch.optim.SGD([nn.Parameter(torch.ones(3))])
    with pytest.raises(shoal.UsageError, match=r"shape \[3\] in group 0.*not the model's"):
        wrap(layers(), overlap_forward=True).overlap(strange)
    with pytest.raises(shoal.Unsupported, match="check_finite"):
        wrap(layers(), overlap_forward=True, check_finite=True)


def test_what_needs_whole_steps_is_refused() -> None:
    run_ranks(in_a_group, 2, "refuse_what_is_for_whole_steps")


def ask_too_early() -> None:
    import shoal

    net = wrap(layers(), overlap_forward=True)
    optimizer = net.overlap(momentum(list(net.module[0].parameters())))
    other = momentum(list(net.module[2].parameters()))
    net(batch(0)).sum().backward()
    asked: list[Callable[[], Any]] = [
        lambda: nn.utils.clip_grad_norm_(net.parameters(), 1.0),
        lambda: nn.utils.clip_grad_value_(net.parameters(), 1.0),
        lambda: net.module[0].weight.grad.data + 1,
        lambda: net.module[0].weight.grad.abs().sum().item(),
        lambda: setattr(net.module[0].weight.grad, "data", torch.zeros(24, 16)),
        lambda: dist.all_reduce(net.module[0].weight.grad),
        lambda: dist.broadcast(net.module[0].weight.grad, 0, async_op=True),
        lambda: dist.all_gather([torch.zeros(24, 16)] * 2, net.module[0].weight.grad),
        lambda: dist.isend(net.module[0].weight.grad, 1 - dist.get_rank()),
        lambda: dist.group.WORLD.allreduce([net.module[0].weight.grad]),
        other.step,
    ]
    for ask in asked:
        with pytest.raises(shoal.UsageError, match=r"parameter [0-3]\.\w+ is .*model\.synchronize"):
            ask()
    net.synchronize()
    averages = [parameter.grad.clone() for parameter in net.parameters()]
    assert all(average.any() for average in averages)
    optimizer.step()
    net(batch(1)).sum().backward()
    optimizer.step()
    with pytest.raises(shoal.UsageError, match="put off already"):
        optimizer.step()
    with pytest.raises(shoal.UsageError, match=r"parameter 2\.weight is no average yet"):
        other.step()
    net.synchronize()
    before = net.module[2].weight.detach().clone()
    other.step()
    assert not torch.equal(net.module[2].weight, before)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    net(batch(2)).sum().backward()
    with pytest.raises(shoal.UsageError, match=r"shape \[3\] in group 1.*not the model's"):
        optimizer.step()


def test_what_asks_for_gradients_on_their_way_is_refused() -> None:
    run_ranks(in_a_group, 2, "ask_too_early")


def wrap_anew() -> None:
    from shoal.average import Averager

    net = layers()
    for _ in range(3):
        train(wrap(net, overlap_forward=True), momentum)
    gc.collect()
    assert not any(isinstance(one, Averager) for one in gc.get_objects())
    wrapped = wrap(net, overlap_forward=True)
    optimizer = wrapped.overlap(momentum(wrapped.parameters()))
    wrapped(batch(0)).sum().backward()
    optimizer.step()
    wrapped(batch(1)).sum().backward()
    optimizer.step()  # is put off when the group ends
    wrapped.reducer.averaging.averager.wait_for = ended
    train(wrap(net), momentum)


def ended(_index: int) -> None:
    import shoal

    raise shoal.Closed("the group has ended")


def test_a_model_that_is_wrapped_anew_has_nothing_of_the_wrapper_before() -> None:
    run_ranks(in_a_group, 2, "wrap_anew")
