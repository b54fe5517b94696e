"""With `overlap_forward` the losses have the same bits, and each layer waits for its own alone."""

from __future__ import annotations

import copy
import importlib.util
import warnings
from datetime import timedelta
from typing import Any

import pytest
from process.ranks import run_ranks

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not installed", allow_module_level=True)

import torch
import torch.distributed as dist
from torch import nn


def wrap(module: nn.Module, **options: Any) -> Any:
    import shoal.torch

    small = {"bucket_cap_mb": 1024 / (1 << 20)}
    return shoal.torch.DistributedDataParallel(module, **{**small, **options})


class Net(nn.Module):
    """The table is also used where its module is not called, as tied embeddings are."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 16)
        self.layers = nn.Sequential(nn.Linear(16, 40), nn.ReLU(), nn.Linear(40, 16))
        self.norm = nn.LayerNorm(16)
        self.gain = nn.Parameter(torch.ones(16))
        self.idle = nn.Linear(16, 16)

    def forward(self, tokens: torch.Tensor, borrow: bool = False) -> torch.Tensor:
        hidden = self.norm(self.layers(self.table(tokens))) * self.gain
        hidden = hidden + (hidden @ self.idle.weight if borrow else self.idle(hidden))
        return hidden @ self.table.weight.T


def tokens(step: int) -> torch.Tensor:
    source = torch.Generator().manual_seed(10 * step + dist.get_rank())
    return torch.randint(0, 11, (8, 5), generator=source)


def train(net: Any, kind: Any, n_steps: int, **hyper: Any) -> list[torch.Tensor]:
    optimizer = kind(net.parameters(), **hyper)
    if net.reducer.overlap is not None:
        optimizer = net.overlap(optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    seen = []
    for step in range(n_steps):
        data = tokens(step)
        loss = nn.functional.cross_entropy(net(data).flatten(0, 1), data.flatten())
        optimizer.zero_grad()
        loss.backward(retain_graph=True)
        if step == 2:  # a second pass adds to averages
            (loss / 2).backward()
        optimizer.step()
        scheduler.step()
        seen.append(loss.detach())
        if step == 3:
            seen += [value.clone() for value in net.state_dict().values()]
    net.synchronize()
    return [*seen, *(p.detach().clone() for p in net.parameters())]


def train_both_ways() -> None:
    dist.init_process_group("shoal", timeout=timedelta(seconds=30))
    torch.manual_seed(0)
    net = Net()
    kinds: list[tuple[Any, dict[str, Any]]] = [
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        (torch.optim.AdamW, {"lr": 0.01}),
    ]
    for kind, hyper in kinds:
        plain = train(wrap(copy.deepcopy(net)), kind, 6, **hyper)
        overlapped = train(wrap(copy.deepcopy(net), overlap_forward=True), kind, 6, **hyper)
        assert len(plain) == len(overlapped)
        assert all(map(torch.equal, plain, overlapped)), kind
    dist.destroy_process_group()


def test_overlapped_training_has_the_bits_of_training_that_waits() -> None:
    run_ranks(train_both_ways, 2)


def make_schedulers_early_and_late() -> list[list[float]]:
    """The weights after steps of which one scheduler knows; whatever that warns of is raised."""
    dist.init_process_group("shoal", timeout=timedelta(seconds=30))
    ends = []
    for is_early in (True, False):
        torch.manual_seed(0)
        net = wrap(nn.Linear(4, 1), overlap_forward=True)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        if is_early:
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        optimizer = net.overlap(optimizer)
        if not is_early:
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        for _ in range(3):
            net(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                scheduler.step()
        ends.append(net.state_dict()["module.weight"].flatten().tolist())
    dist.destroy_process_group()
    return ends


def test_a_scheduler_that_was_made_before_overlap_is_called_knows_the_steps() -> None:
    for early, late in run_ranks(make_schedulers_early_and_late, 2):
        assert early == late


def overlap_wrongly() -> None:
    import shoal

    dist.init_process_group("shoal", timeout=timedelta(seconds=30))
    net = wrap(Net(), overlap_forward=True)
    with pytest.raises(shoal.UsageError, match=r"model\.overlap"):
        net(tokens(0)).sum().backward()
    with pytest.raises(shoal.Unsupported, match="find_unused_parameters"):
        wrap(Net(), overlap_forward=True, find_unused_parameters=True)
    with pytest.raises(shoal.UsageError, match="overlap_forward=True"):
        wrap(Net()).overlap(torch.optim.SGD(net.parameters()))
    net = wrap(Net(), overlap_forward=True)
    optimizer = net.overlap(torch.optim.SGD(net.parameters()))
    with pytest.raises(shoal.UsageError, match="one optimizer"):
        net.overlap(optimizer)
    net(tokens(0)).sum().backward()
    net.synchronize()
    norm = nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    norms = [torch.empty_like(norm) for _ in range(2)]
    dist.all_gather(norms, norm)
    assert norm > 0
    assert torch.equal(*norms)  # of averages
    optimizer.step()
    optimizer.zero_grad()
    net(tokens(1)).sum().backward()
    optimizer.step()
    net.reducer.averaging.averager.is_in = lambda _: (
        False
    )  # NOT stepped while others are waited for
    output = net(tokens(2), borrow=True)  # uses a weight whose module is not called
    with pytest.raises((shoal.UsageError, RuntimeError), match=r"idle.weight|inplace operation"):
        output.sum().backward()
    dist.destroy_process_group()


def test_what_cannot_be_overlapped_is_refused() -> None:
    run_ranks(overlap_wrongly, 2)


def order_of_waits(are_in: list[str]) -> list[str]:
    """What a forward pass waits for, where these averages are in when it begins, and no others."""
    dist.init_process_group("shoal", timeout=timedelta(seconds=30))
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    wrapped = wrap(net, overlap_forward=True)
    optimizer = wrapped.overlap(torch.optim.SGD(wrapped.parameters()))
    for _ in range(2):  # the first step is taken at once
        wrapped(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    seen: list[str] = []
    averager = wrapped.reducer.averaging.averager
    wait_for = averager.wait_for
    names = wrapped.reducer.names
    averager.is_in = lambda index: names[index] in are_in
    averager.wait_for = lambda index: (seen.append(f"wait for {names[index]}"), wait_for(index))
    for index, layer in enumerate(net):
        layer.register_forward_hook(lambda *_, index=index: seen.append(f"called {index}"))
    wrapped(torch.ones(2, 4))
    dist.destroy_process_group()
    return seen


def waits_of(layer: int) -> list[str]:
    return [f"wait for {layer}.weight", f"wait for {layer}.bias"]


def test_a_layer_waits_for_its_own_averages_and_no_others() -> None:
    one_by_one = [word for n in range(3) for word in (*waits_of(n), f"called {n}")]
    assert run_ranks(order_of_waits, 2, []) == [one_by_one] * 2


def test_while_a_layer_waits_those_are_stepped_whose_averages_are_all_in() -> None:
    are_in = ["1.weight", "2.weight", "2.bias"]
    first = [*waits_of(2), *waits_of(0), "called 0"]
    rest = [*waits_of(1), "called 1", "called 2"]
    assert run_ranks(order_of_waits, 2, are_in) == [[*first, *rest]] * 2


def test_a_layer_whose_averages_are_in_waits_for_no_others_step() -> None:
    are_in = ["0.weight", "0.bias", "2.weight", "2.bias"]
    first = [*waits_of(0), "called 0", *waits_of(2), *waits_of(1), "called 1", "called 2"]
    assert run_ranks(order_of_waits, 2, are_in) == [first] * 2


def priorities_of_a_step(overlap_forward: bool) -> list[int]:
    """Of the calls that average, in the order in which they were made."""
    dist.init_process_group("shoal", timeout=timedelta(seconds=30))
    layers = [nn.Linear(16, 16) for _ in range(4)]
    model = wrap(nn.Sequential(*layers), overlap_forward=overlap_forward)
    if overlap_forward:
        model.overlap(torch.optim.SGD(model.parameters(), lr=0.1))
    group = model.reducer.averaging.averager.group
    seen, all_reduce = [], group.all_reduce

    def watched(*args: Any, **how: Any) -> Any:
        if how.get("number") is not None:
            seen.append(how["priority"])
        return all_reduce(*args, **how)

    group.all_reduce = watched
    model(torch.ones(2, 16)).sum().backward()
    model.synchronize()
    dist.destroy_process_group()
    return seen


@pytest.mark.parametrize("overlap_forward", [True, False])
def test_what_the_next_forward_pass_uses_first_leaves_before_what_waits(
    overlap_forward: bool,
) -> None:
    for seen in run_ranks(priorities_of_a_step, 2, overlap_forward):
        assert len(seen) > 2
        assert (seen[-1] > seen[0]) == overlap_forward, seen
        assert seen == sorted(seen), seen
