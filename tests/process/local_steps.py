"""DiLoCo over a group, and in one process and float64, as the papers define it."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

import shoal
from shoal.average import DiLoCo, OuterSGD

SHAPES = {"wide": (40, 7), "one": (), "long": (501,), "none": (0, 3), "last": (9, 2)}
RATE = 0.125  # of the local steps


class Case(NamedTuple):
    every: int
    fragments: int = 1
    delay: int = 0
    alpha: float = 0.0
    lr: float = 0.7
    momentum: float = 0.9
    nesterov: bool = True
    weighted: bool = False

    @property
    def options(self) -> dict[str, Any]:
        names = ("every", "fragments", "delay", "alpha", "weighted")
        return {name: getattr(self, name) for name in names}


def first_values() -> dict[str, Any]:
    source = np.random.default_rng(1)
    return {name: source.standard_normal(shape) for name, shape in SHAPES.items()}


def target(name: str, rank: int) -> Any:
    return np.random.default_rng(100 * rank + len(name)).standard_normal(SHAPES[name])


def local_step(values: dict[str, Any], rank: int) -> None:
    """Step towards this rank's target."""
    for name, value in values.items():
        value[...] -= RATE * (value - target(name, rank))


def weight_of(rank: int, step: int) -> int:
    return (3 * rank + step) % 5


def start(group: shoal.Group, case: Case, **more: Any) -> tuple[dict[str, Any], DiLoCo]:
    weights = {name: value.astype(np.float32) for name, value in first_values().items()}
    if group.rank:  # all ranks begin with the values of rank 0
        weights = {name: np.zeros_like(value) for name, value in weights.items()}
    outer = OuterSGD(case.lr, case.momentum, case.nesterov)
    return weights, DiLoCo(group, weights, outer, **case.options, **more)


def steps(diloco: DiLoCo, weights: dict[str, Any], rank: int, numbers: range, case: Case) -> None:
    for number in numbers:
        local_step(weights, rank)
        diloco.step(weight_of(rank, number) if case.weighted else None)


def fragment_of(name: str, n_fragments: int) -> int:
    """Fragments are runs of parameters of about equal bytes, fixed by hand here."""
    two, three = {"long": 1, "none": 1, "last": 1}, {"one": 1, "long": 1, "none": 2, "last": 2}
    return {1: {}, 2: two, 3: three}[n_fragments].get(name, 0)


class Model:
    """The state of all ranks of a run."""

    def __init__(self, case: Case, size: int) -> None:
        self.case = case
        self.shared = first_values()
        self.locals = [first_values() for _ in range(size)]
        self.momenta = {name: np.zeros(shape) for name, shape in SHAPES.items()}
        self.present = list(range(size))
        self.weights = {name: [0.0] * size for name in SHAPES}
        self.sent: list[tuple[int, int, dict[str, Any]]] = []
        self.n_sent = self.n_steps = 0

    def step(self) -> None:
        case, self.n_steps = self.case, self.n_steps + 1
        for rank in self.present:
            local_step(self.locals[rank], rank)
            for name in SHAPES:
                self.weights[name][rank] += weight_of(rank, self.n_steps) if case.weighted else 1
        self.arrive(case.delay)
        part = self.n_sent % case.fragments
        times = (self.n_steps - 1) % case.every + 1
        if times == (part + 1) * case.every // case.fragments:
            self.send(part)
        self.arrive(case.delay)

    def send(self, part: int) -> None:
        names = [name for name in SHAPES if fragment_of(name, self.case.fragments) == part]
        averages = {}
        for name in names:
            weights = [self.weights[name][rank] for rank in self.present]
            changes = [self.shared[name] - self.locals[rank][name] for rank in self.present]
            averages[name] = np.average(changes, axis=0, weights=weights)
            self.weights[name] = [0.0] * len(self.locals)
        self.sent.append((self.n_steps, part, averages))
        self.n_sent += 1

    def arrive(self, delay: int) -> None:
        while self.sent and self.n_steps >= self.sent[0][0] + delay:
            _, _, averages = self.sent.pop(0)
            for name, average in averages.items():
                self.step_outer(name, average)
                for rank in self.present:
                    local, alpha = self.locals[rank], self.case.alpha
                    local[name][...] = alpha * local[name] + (1 - alpha) * self.shared[name]

    def step_outer(self, name: str, average: Any) -> None:
        case = self.case
        momentum = self.momenta[name] = case.momentum * self.momenta[name] + average
        used = average + case.momentum * momentum if case.nesterov else momentum
        self.shared[name] = self.shared[name] - case.lr * (used if case.momentum else average)


def expected(case: Case, size: int, n_steps: int, lost: Sequence[tuple[int, int]] = ()) -> Model:
    """Return the model after some steps.

    Args:
        lost: for each lost rank, its first missing step.
    """
    model = Model(case, size)
    for step in range(1, n_steps + 1):
        model.present = [one for one in model.present if (one, step) not in lost]
        model.step()
    return model


def check(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        np.testing.assert_allclose(np.asarray(found[name]), value, rtol=2e-5, atol=2e-6)
        assert np.asarray(found[name]).shape == SHAPES[name]
