"""`shoal.torch.DiLoCo` and `LocalSGD`, compared with the papers' algorithm, and in use."""

import copy
import functools
import io
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from process.examples import names_of_page
from process.local_steps import RATE, Case, check, expected, first_values, target, weight_of
from process.ranks import on_ranks, on_survivors
from process.shared_ranks import SharedRanks, cases_in
from process.stage import Stage
from torch import nn

import shoal.torch
from shoal.average import ErrorFeedback
from shoal.errors import UsageError

N_STEPS = 23


class Net(nn.Module):
    """The parameters of the NumPy model, plus one that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        for name, value in first_values().items():
            self.register_parameter(name, nn.Parameter(torch.tensor(value, dtype=torch.float32)))
        self.frozen = nn.Parameter(torch.full((3,), float(dist.get_rank())), requires_grad=False)

    def forward(self) -> torch.Tensor:
        """Return half the squared distance to this rank's targets."""
        rank = dist.get_rank()
        parts = [(n, one) for n, one in self.named_parameters() if one.requires_grad]
        return sum(  # type: ignore[return-value]
            (one - torch.as_tensor(target(name, rank), dtype=torch.float32)).square().sum() / 2
            for name, one in parts
        )

    def values(self) -> dict[str, Any]:
        return {n: one.detach().numpy() for n, one in self.named_parameters() if n != "frozen"}


def start(case: Case, **options: Any) -> tuple[Net, torch.optim.Optimizer, shoal.torch.DiLoCo]:
    net = Net()
    inner = torch.optim.SGD(net.parameters(), lr=RATE)
    how = {"lr": case.lr, "momentum": case.momentum, "nesterov": case.nesterov}
    outer = torch.optim.SGD(net.parameters(), **how)
    return net, inner, shoal.torch.DiLoCo(net, inner, outer, **case.options | options)


def train(
    net: Net, inner: torch.optim.Optimizer, diloco: shoal.torch.DiLoCo, numbers: range, case: Case
) -> None:
    for number in numbers:
        inner.zero_grad()
        net().backward()
        if case.weighted:
            diloco.weigh(weight_of(dist.get_rank(), number))
        inner.step()


CASES = [
    Case(every=4),
    Case(every=6, fragments=3, delay=1, alpha=0.5),
    Case(every=5, fragments=2, delay=4, alpha=0.25, weighted=True),
]


def case_models_are_trained_as_in_the_papers() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for case in CASES:
        net, inner, diloco = start(case)
        train(net, inner, diloco, range(1, N_STEPS + 1), case)
        wanted = expected(case, size, N_STEPS)
        check({name: one.numpy() for name, one in diloco.parameters.items()}, wanted.shared)
        check(net.values(), wanted.locals[rank])
        assert torch.equal(net.frozen, torch.full((3,), float(rank)))
        diloco.sync()
        held = [{n: one.numpy() for n, one in diloco.parameters.items()}, net.values()]
        everyone: list[Any] = [None] * size
        dist.all_gather_object(everyone, [{n: v.tobytes() for n, v in one.items()} for one in held])
        assert all(one == everyone[0][0] for both in everyone for one in both)


def case_a_step_in_which_the_outer_optimizer_raises_can_be_repeated() -> None:
    case, size = CASES[2], dist.get_world_size()
    net, inner, diloco = start(case)
    outer = diloco._replica._outer  # type: ignore[attr-defined]

    def fail(*_: object) -> None:
        handle.remove()
        raise MemoryError

    train(net, inner, diloco, range(1, 6), case)  # the first average is taken up in the 6th step
    handle = outer.register_step_pre_hook(fail)
    with pytest.raises(MemoryError):
        train(net, inner, diloco, range(6, 7), case)
    diloco._go_on()  # type: ignore[attr-defined]  # as the next step would
    train(net, inner, diloco, range(7, N_STEPS + 1), case)
    wanted = expected(case, size, N_STEPS)
    check({name: one.numpy() for name, one in diloco.parameters.items()}, wanted.shared)


def case_a_saved_run_goes_on_with_the_same_bits() -> None:
    for case, compress in ((CASES[0], None), (CASES[2], None), (CASES[1], ErrorFeedback("bf16"))):
        net, inner, diloco = start(case, compress=compress)
        train(net, inner, diloco, range(1, 9), case)
        saved = io.BytesIO()
        torch.save([net.state_dict(), inner.state_dict(), diloco.state_dict()], saved)
        train(net, inner, diloco, range(9, 20), case)
        others, second, loaded = start(case, compress=compress)
        train(others, second, loaded, range(1, 4), case)
        saved.seek(0)
        states = torch.load(saved, weights_only=True)
        flying = [{**one, "size": 7} for one in states[2]["flying"]]
        if flying:  # their averages are of so many ranks
            of_others = functools.partial(loaded.load_state_dict, states[2] | {"flying": flying})
            refused(of_others, "averages in flight of 7 ranks")
        less = {key: value for key, value in states[2].items() if key != "rounding"}
        refused(functools.partial(loaded.load_state_dict, less), "pass a result of state_dict")
        for one, state in zip((others, second, loaded), states, strict=True):
            one.load_state_dict(state)
        train(others, second, loaded, range(9, 20), case)
        for name, value in diloco.parameters.items():
            assert torch.equal(loaded.parameters[name], value), (name, case, compress)
        for name, value in net.state_dict().items():
            assert torch.equal(others.state_dict()[name], value), name


def case_local_sgd_averages_parameters_and_leaves_gradients_alone() -> None:
    net = Net()
    inner = torch.optim.AdamW(net.parameters(), lr=0.01)
    fragments = [["wide", "last"], ["one", "long", "none"]]
    with shoal.torch.LocalSGD(net, inner, every=3, fragments=fragments):
        for number in range(1, 7):
            inner.zero_grad()
            net().backward()
            gradients = copy.deepcopy([one.grad for one in net.parameters()])
            alone = copy.deepcopy(net)
            for mine, its in zip(alone.parameters(), net.parameters(), strict=True):
                mine.grad = its.grad
            optimizer = torch.optim.AdamW(alone.parameters(), lr=0.01)
            optimizer.load_state_dict(copy.deepcopy(inner.state_dict()))
            optimizer.step()
            inner.step()
            averaged = [fragments[1], fragments[0], []][number % 3]
            for name, value in alone.named_parameters():
                if name in averaged:
                    dist.all_reduce(value.data, dist.ReduceOp.AVG)
                torch.testing.assert_close(net.get_parameter(name), value)
            for before, one in zip(gradients, net.parameters(), strict=True):
                assert (before is None) == (one.grad is None)
                assert before is None or torch.equal(before, one.grad)
    rounds = net.state_dict()["wide"].clone()
    for _ in range(3):
        inner.step()  # no step is counted after the context
    assert not torch.equal(rounds, net.state_dict()["wide"])
    net, inner, diloco = start(CASES[0])
    diloco.close()
    train(net, inner, diloco, range(1, 5), CASES[0])  # nor after `close`
    assert diloco.rounds == 0


def case_modules_are_fragments_with_a_stateful_outer_optimizer() -> None:
    torch.manual_seed(dist.get_rank())
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    inner = torch.optim.SGD(net.parameters(), lr=0.1)
    outer = torch.optim.Adam(net.parameters(), lr=0.1)
    with shoal.torch.DiLoCo(
        net, inner, outer, every=4, fragments=[net[0], net[2]], compress="bf16"
    ) as diloco:
        for number in range(1, 9):
            inner.zero_grad()
            net(torch.ones(3, 4) * (number + dist.get_rank())).square().sum().backward()
            inner.step()
            assert diloco.rounds == number // 2
        assert [int(state["step"]) for state in outer.state.values()] == [2, 2, 2, 2]
        diloco.sync()
        assert diloco.rounds == 6
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, [one.detach().numpy().tobytes() for one in net.parameters()])
    assert all(one == everyone[0] for one in everyone)


def case_parameters_of_bfloat16_are_averaged_and_saved() -> None:
    rank = dist.get_rank()
    net = nn.Linear(3, 5).to(torch.bfloat16)
    nn.init.ones_(net.weight)
    inner = torch.optim.SGD(net.parameters(), lr=1.0)
    diloco = shoal.torch.LocalSGD(net, inner, every=2, delay=1)
    for number in range(1, 4):
        for one in net.parameters():
            one.grad = torch.full_like(one, 0.25 * (rank + 1))
        inner.step()
        if number == 2:
            diloco.load_state_dict(diloco.state_dict())
    assert diloco.rounds == 1
    # Steps of 0.25 and 0.5: twice the mean of both ranks.
    assert torch.equal(net.weight, torch.full_like(net.weight, 1 - 0.75))


def refused(make: Callable[[], object], words: str, kind: type[Exception] = UsageError) -> None:
    with pytest.raises(kind, match=words):
        make()


def case_an_outer_optimizer_that_differs_between_ranks_is_refused_by_sync() -> None:
    net = Net()
    inner = torch.optim.SGD(net.parameters(), lr=0.1)
    outer = torch.optim.SGD(net.parameters(), lr=0.7)
    with shoal.torch.DiLoCo(net, inner, outer, every=4) as diloco:
        net().backward()
        inner.step()
        outer.param_groups[0]["lr"] = 0.5 + dist.get_rank()
        before = net.wide.detach().clone()
        refused(diloco.sync, "the outer optimizer is not the same on all ranks: .*'lr': 0.5,.* on")
        assert torch.equal(net.wide, before)
        outer.param_groups[0]["lr"] = 0.5
        diloco.sync()
        assert diloco.rounds == 1


def case_wrong_arguments_are_refused_with_the_reason_on_every_rank() -> None:
    for wrong, words in (
        ({"every": 0}, "every must be a whole number of steps, 1 or more, got 0"),
        ({"every": 2.5}, "every must be a whole number of steps, 1 or more, got 2.5"),
        ({"every": math.nan}, "every must be a whole number of steps, 1 or more, got nan"),
        ({"fragments": 5}, "fragments must be 1 to every=4, one for a step, got 5"),
        ({"fragments": 0}, "5 parameters cannot be cut into 0 fragments"),
        ({"fragments": [["wide"], ["one"]]}, "must name each parameter once: 'long'"),
        ({"fragments": [["wide", "wide"]]}, "must name each parameter once: 'wide'"),
        ({"delay": 4}, "delay must be 0 to 3 steps"),
        ({"alpha": 1.5}, "alpha must be 0 to 1"),
        ({"quorum": 0}, "quorum must be at least 1"),
        ({"quorum": 2, "delay": 1}, "cannot be used with a quorum"),
        ({"grace": 1.0}, "pass quorum, or leave grace out"),
        ({"compress": "bf17"}, "unknown wire 'bf17'"),
        ({"every": 4 + dist.get_rank()}, "every is not the same on all ranks: 4 on rank 0, 5 on"),
    ):
        refused(functools.partial(start, CASES[0], **wrong), words)
    net = Net()
    inner = torch.optim.SGD(net.parameters(), lr=0.1)
    less = torch.optim.SGD([net.get_parameter("wide")], lr=0.7)
    refused(lambda: shoal.torch.DiLoCo(net, inner, less, every=2), " is not in the outer optimizer")
    other = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0)
    refused(lambda: shoal.torch.LocalSGD(net, other, every=2), "has no parameter of this model")
    refused(lambda: shoal.torch.DiLoCo(net, inner, torch.optim.SGD, every=2), "a torch optimizer")
    rate = 0.7 + dist.get_rank()
    for outer in (
        torch.optim.SGD(net.parameters(), lr=rate),
        torch.optim.SGD([{"params": list(net.parameters()), "lr": rate}], lr=0.7),
    ):
        differing = functools.partial(shoal.torch.DiLoCo, net, inner, outer, every=2)
        refused(differing, "outer is not the same on all ranks")
    for state in ({}, net.state_dict(), None):
        load = functools.partial(start(CASES[0])[2].load_state_dict, state)
        refused(load, "pass a result of state_dict of these local steps")
    whole = nn.Module()
    whole.register_parameter("n", nn.Parameter(torch.ones(2, dtype=torch.complex64)))
    shoal.torch.LocalSGD(whole, torch.optim.SGD(whole.parameters(), lr=0.1), every=2)
    _, inner, diloco = start(CASES[2])
    refused(inner.step, "a step has a weight if, and only if, weighted=True")
    diloco.weigh(-1)
    refused(inner.step, "weight must be a finite number >= 0, got -1")


def case_a_loaded_state_with_other_arguments_on_a_rank_is_refused_and_nothing_is_loaded() -> None:
    net, inner, diloco = start(CASES[0])
    state = diloco.state_dict()
    train(net, inner, diloco, range(1, 5), CASES[0])
    held = {name: one.clone() for name, one in diloco.parameters.items()}
    state["replica"]["outer"]["param_groups"][0]["lr"] = 0.5 + dist.get_rank()
    load = functools.partial(diloco.load_state_dict, state)
    refused(load, "outer is not the same on all ranks: SGD with .*'lr': 0.5.* on rank 0, .*1.5")
    assert all(torch.equal(one, held[name]) for name, one in diloco.parameters.items())
    state["replica"]["outer"]["param_groups"][0]["lr"] = 0.5  # as after a change on every rank
    diloco.load_state_dict(state)


def case_a_parameter_trained_later_is_refused_in_the_next_round() -> None:
    for change in (
        lambda net: net.frozen.requires_grad_(),
        lambda net: net.load_state_dict(net.state_dict(), assign=True),
        lambda net: net.register_parameter("frozen", nn.Parameter(torch.ones(3))),
    ):
        net, inner, diloco = start(CASES[0])
        train(net, inner, diloco, range(1, 5), CASES[0])
        assert diloco.rounds == 1
        change(net)
        for _ in range(3):
            inner.step()
        refused(inner.step, "requires a gradient now.*close this DiLoCo and make another")
        refused(diloco.sync, "requires a gradient now")
        assert diloco.rounds == 1
        diloco.close()


@pytest.mark.parametrize("case", cases_in(globals()))
def test_local_steps(case: Callable[[], None], ranks: SharedRanks) -> None:
    ranks.run(case)


@on_ranks(2)
def test_the_page_about_local_steps_runs_unchanged() -> bytes:
    parameters = names_of_page("local_steps.md")["model"].parameters()
    return b"".join(one.detach().numpy().tobytes() for one in parameters)


LOST = Case(every=4, fragments=2)


@on_survivors(3, 0, has_stage=True)
def test_survivors_of_a_lost_rank_train_on() -> list[bytes]:
    dist.init_process_group("shoal")
    first_rank, n_lost = dist.get_rank(), 0
    net, inner, diloco = start(LOST)
    for number in range(1, 12):
        if number == 5:
            Stage.from_environment().meet(first_rank, 3, "all have the rounds before", victim=0)
        inner.zero_grad()
        for name, one in net.named_parameters():
            wanted = torch.as_tensor(target(name, first_rank)) if one.requires_grad else one
            one.grad = (one - wanted).detach().float() if one.requires_grad else None
        try:
            inner.step()
        except shoal.PeerLost:
            n_lost += 1
            shoal.torch.shrink_group()
            diloco.regroup()
    assert n_lost == 1
    wanted = expected(LOST, 3, 11, [(0, 5)])
    check(net.values(), wanted.locals[first_rank])
    check({name: one.numpy() for name, one in diloco.parameters.items()}, wanted.shared)
    return [one.numpy().tobytes() for one in diloco.parameters.values()]
