"""The measures of trainings: a step, its parts, and its communication."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from bench.scoreboard.benchmark import Taken
from bench.scoreboard.pools import slowest_of
from shoal.bench.job import Failure

if TYPE_CHECKING:
    from bench.scoreboard.benchmark import Measure
    from bench.scoreboard.case import Case
    from bench.scoreboard.pools import WorkerPools

Ranks = Sequence[dict[str, Any]]
"""The answers of all ranks to a command."""


class Trained(Taken[Ranks]):
    """The steps of one way to train, measured in every round.

    Args:
        n_steps: the steps of a round; None: the samples of the case.
        n_times: the number of commands in a round; each runs `n_steps` steps.
        how: arguments of a `Variant`; without a model the case's is trained.

    Attributes:
        step: measures a step's mean seconds on the slowest rank. Do NOT take the slowest rank of
            each step: where nothing synchronizes ranks until the next forward pass, a different
            rank lags in each step, and none lags at the end.
        last_step: the same number of the last steps, without new ones.
    """

    def __init__(
        self, n_steps: int | None = None, *, n_warmup: int = 1, n_times: int = 1, **how: Any
    ) -> None:
        def train(pools: WorkerPools, case: Case) -> Ranks:
            what = {"model": case.model, "n_warmup": n_warmup, **how}
            what["n_steps"] = n_steps or case.n_samples
            library = library_of(case)
            asked = [pools.ask(library, case, "train", **what) for _ in range(n_times)]
            return [
                {field: _joined([one[field] for one in answers]) for field in answers[0]}
                for answers in zip(*asked, strict=True)
            ]

        super().__init__("a training that this column is computed from", train)
        self.step, self.last_step = self.first(_mean_step), self.then(_mean_step)

    def part(self, name: str) -> Measure:
        """Measure the mean over ranks of a field of the last steps; a list counts as its median."""
        return self.then(
            lambda ranks: statistics.fmean(
                statistics.median(rank[name]) if isinstance(rank[name], list) else rank[name]
                for rank in ranks
            )
        )

    @property
    def losses(self) -> list[float]:
        """The mean over ranks of the losses of the last steps."""
        each = zip(*(rank["losses"] for rank in self.last), strict=True)
        return [statistics.fmean(losses) for losses in each]


def _mean_step(ranks: Ranks) -> float:
    return max(statistics.fmean(rank["times_s"]) for rank in ranks)


def _joined(values: Sequence[Any]) -> Any:
    """Join lists; of other values, keep the last."""
    if not isinstance(values[0], list):
        return values[-1]
    return [one for value in values for one in value]


def loss_difference(one: Trained, other: Trained) -> Measure:
    """Return the largest relative difference between the losses of two trainings."""
    return lambda _pools, _case: max(
        abs(a - b) / abs(b) for a, b in zip(one.losses, other.losses, strict=True)
    )


def end_difference(one: Trained, other: Trained, n_last: int) -> Measure:
    """Return the relative difference between the mean last losses of two trainings."""

    def measure(_pools: WorkerPools, _case: Case) -> float:
        a, b = (statistics.fmean(each.losses[-n_last:]) for each in (one, other))
        return abs(a - b) / abs(b)

    return measure


def made_of(compute: Callable[..., float], *parts: Measure) -> Measure:
    """Return a column that is computed from others of the same round."""
    return lambda pools, case: compute(*(part(pools, case) for part in parts))


def exposed(step_s: float, computing_s: float) -> float:
    """Return the seconds that averaging adds to a step."""
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


def asked(
    task: str, arguments: Callable[[Case], dict[str, Any]], *, is_fresh: bool = False
) -> Taken[Ranks]:
    """Return a command that is sent once in a round, and whose answers fill several columns.

    Args:
        arguments: returns the arguments for a case.
        is_fresh: True: start new ranks for the command, and stop them after it.
    """

    def ask(pools: WorkerPools, case: Case) -> Ranks:
        library = library_of(case)
        if not is_fresh:
            return pools.ask(library, case, task, **arguments(case))
        with pools.fresh(library, case) as pool:
            return pool.ask(task, **arguments(case))

    return Taken(task, ask)


def largest(field: str) -> Callable[[Ranks], float]:
    """Return the function that finds the largest answer of a rank."""
    return lambda ranks: max(float(rank[field]) for rank in ranks)


def median_time(ranks: Ranks) -> float:
    """Return the median of the times on the slowest rank."""
    return statistics.median(slowest_of(ranks))


def slowest_ratio(ranks: Ranks) -> float:
    """Return the ratio of the slowest step to the median."""
    times_s = slowest_of(ranks)
    return max(times_s) / statistics.median(times_s)


def library_of(case: Case) -> str:
    """Return the library that trains a case; its ranks have Gloo as a second group."""
    return "served torch" if case.n_servers else "shoal"
