"""The measures of trainings: a step, its parts, and its communication."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from bench.scoreboard.pools import slowest_of
from shoal.bench.job import Failure

if TYPE_CHECKING:
    from bench.scoreboard.benchmark import Measure
    from bench.scoreboard.case import Case
    from bench.scoreboard.pools import WorkerPools


class Trained:
    """The steps of one way to train, measured in every round.

    Args:
        n_steps: the steps of a round; None: the samples of the case.
        n_times: the number of commands in a round; each runs `n_steps` steps.
        how: arguments of a `Variant`; without a model the case's is trained.
    """

    def __init__(
        self, n_steps: int | None = None, *, n_warmup: int = 1, n_times: int = 1, **how: Any
    ) -> None:
        self._n_steps, self._n_warmup, self._n_times, self._how = n_steps, n_warmup, n_times, how
        self._ranks: Sequence[dict[str, Any]] = ()
        self.losses: list[float] = []

    def step(self, pools: WorkerPools, case: Case) -> float:
        """Measure the slowest rank's mean seconds of a step.

        NOT of the slowest rank of each: where nothing holds them together until the next forward
        pass, another one is behind in every step, and none is in the end.
        """
        return max(statistics.fmean(rank["times_s"]) for rank in self._take(pools, case))

    def part(self, name: str) -> Measure:
        """Measure the mean over ranks of a number of the last steps."""

        def measure(_pools: WorkerPools, _case: Case) -> float:
            if not self._ranks:
                raise Failure("no step was taken")
            each = [rank[name] for rank in self._ranks]
            numbers = [statistics.median(one) if isinstance(one, list) else one for one in each]
            return statistics.fmean(numbers)

        return measure

    def _take(self, pools: WorkerPools, case: Case) -> Sequence[dict[str, Any]]:
        self.losses, self._ranks = [], ()
        what = {"model": case.model, "n_warmup": self._n_warmup, **self._how}
        what["n_steps"] = self._n_steps or case.n_samples
        library = library_of(case)
        asked = [pools.ask(library, case, "train", **what) for _ in range(self._n_times)]
        ranks = [
            {name: _joined([ask[rank][name] for ask in asked]) for name in asked[0][rank]}
            for rank in range(len(asked[0]))
        ]
        each = zip(*(rank["losses"] for rank in ranks), strict=True)
        self.losses, self._ranks = [statistics.fmean(losses) for losses in each], ranks
        return ranks


def _joined(values: Sequence[Any]) -> Any:
    """Join lists; of other values, keep the last."""
    if not isinstance(values[0], list):
        return values[-1]
    return [one for value in values for one in value]


def loss_difference(one: Trained, other: Trained) -> Measure:
    """Return the largest relative difference between the losses of two trainings."""

    def measure(_pools: WorkerPools, _case: Case) -> float:
        if not one.losses or not other.losses:
            raise Failure("one of the two was not trained")
        pairs = zip(one.losses, other.losses, strict=True)
        return max(abs(a - b) / abs(b) for a, b in pairs)

    return measure


def end_difference(one: Trained, other: Trained, n_last: int) -> Measure:
    """Return the relative difference between the mean last losses of two trainings."""

    def measure(_pools: WorkerPools, _case: Case) -> float:
        if not one.losses or not other.losses:
            raise Failure("one of the two was not trained")
        a, b = (statistics.fmean(each.losses[-n_last:]) for each in (one, other))
        return abs(a - b) / abs(b)

    return measure


class Kept:
    """A measure whose last value is kept for other columns."""

    def __init__(self, measure: Measure) -> None:
        self._measure = measure
        self.last: float | None = None

    def __call__(self, pools: WorkerPools, case: Case) -> float:
        """Measure, and keep the value."""
        self.last = None
        self.last = self._measure(pools, case)
        return self.last


def made_of(compute: Callable[..., float], *kept: Kept) -> Measure:
    """Return a column that is computed from others of the same round."""

    def measure(_pools: WorkerPools, _case: Case) -> float:
        values = [one.last for one in kept]
        if None in values:
            raise Failure("a column that it is made of has no number")
        return compute(*values)

    return measure


def exposed(step_s: float, computing_s: float) -> float:
    """Return the seconds of a step beyond those of one without averaging."""
    return max(0.0, step_s - computing_s)


def hidden_part(alone_s: float, exposed_s: float, window_s: float, n_layers: int) -> float:
    """Return the hidden part of the communication that could be hidden.

    The first layer's gradient is ready when nothing is left to compute, and the next forward pass
    begins with that layer: no order can hide its communication.

    Args:
        alone_s: the time of averaging without computation.
        exposed_s: the time that it adds to a step.
        window_s: the time of computation beside which averaging can go on.
        n_layers: the number of layers, of equal bytes.
    """
    could_s = min(alone_s * (1 - 1 / n_layers), window_s)
    if could_s <= 0:
        raise Failure("nothing could be hidden")
    return max(0.0, min(1.0, (alone_s - exposed_s) / could_s))


class Asked:
    """One command of a round, whose answers are several columns.

    Args:
        arguments: returns the arguments for a case.
        is_fresh: ask new ranks, and stop them.
    """

    def __init__(
        self, task: str, arguments: Callable[[Case], dict[str, Any]], *, is_fresh: bool = False
    ) -> None:
        self._task, self._arguments, self._is_fresh = task, arguments, is_fresh
        self._ranks: Sequence[dict[str, Any]] = ()

    def first(self, field: str) -> Measure:
        """Give the command, and measure like `then`."""

        def measure(pools: WorkerPools, case: Case) -> float:
            self._ranks = ()
            self._ranks = self._ask(pools, case)
            return self.then(field)(pools, case)

        return measure

    def then(self, field: str) -> Measure:
        """Measure the largest answer of a rank; of lists, the median of the slowest rank's."""

        def measure(_pools: WorkerPools, _case: Case) -> float:
            if not self._ranks:
                raise Failure("the command before had no answer")
            if field == "times_s":
                return statistics.median(slowest_of(self._ranks))
            return max(float(rank[field]) for rank in self._ranks)

        return measure

    def slowest(self, _pools: WorkerPools, _case: Case) -> float:
        """Measure the ratio of the slowest step to the median."""
        if not self._ranks:
            raise Failure("the command before had no answer")
        times_s = slowest_of(self._ranks)
        return max(times_s) / statistics.median(times_s)

    def _ask(self, pools: WorkerPools, case: Case) -> Sequence[dict[str, Any]]:
        library, arguments = library_of(case), self._arguments(case)
        if not self._is_fresh:
            return pools.ask(library, case, self._task, **arguments)
        with pools.fresh(library, case) as pool:
            return pool.ask(self._task, **arguments)


def library_of(case: Case) -> str:
    """Return the library that trains a case; its ranks have Gloo as a second group."""
    return "served torch" if case.n_servers else "shoal"
