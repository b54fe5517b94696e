"""The tables of trainings, modelled on the papers' own measurements.

Li et al., "PyTorch Distributed" (VLDB 2020), section 5; Thangakrishnan et al., "Herring" (SC 2020).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from bench.scoreboard.benchmark import Benchmark, Section
from bench.scoreboard.case import MIB, Case
from bench.scoreboard.goals import AtLeast, Below, Faster, Within
from bench.scoreboard.planned import PLANNED
from bench.scoreboard.table import show_count, show_memory, show_percent, show_time
from bench.scoreboard.training_measures import (
    Trained,
    asked,
    end_difference,
    exposed,
    hidden_part,
    largest,
    loss_difference,
    made_of,
    median_time,
    slowest_ratio,
)

if TYPE_CHECKING:
    from bench.scoreboard.benchmark import Measure, Taken
    from bench.scoreboard.goals import Goal
    from bench.scoreboard.training_measures import Ranks

_ANSWER_S: Final = 180.0  # 8 ranks import torch, on cores that other processes use too
_MODELS: Final = ("resnet", "bert")
_GLOO: Final[dict[str, Any]] = {"wrapper": "torch", "over": "gloo"}
_TORCH: Final[dict[str, Any]] = {"wrapper": "torch", "over": "shoal"}
_SHOAL: Final[dict[str, Any]] = {"wrapper": "shoal"}
_WHOLE_MB: Final = 1024.0  # a bucket of this size holds all gradients of every model
_LOSS_STEPS: Final = 300
_LOSS_LAST: Final = 50


def show_times(ratio: float) -> str:
    """Return a ratio with an x."""
    return f"{ratio:.2f}x"


def _hosts(n: int, model: str, *goals: Goal, mbit: float | None = 400, k: int = 0) -> Case:
    """Return the case of a model with a worker on each of n hosts, and k servers."""
    return Case(n, 0, goals, n_samples=3, n_hosts=n, rate_mbit=mbit, n_servers=k, model=model)


def _breakdown() -> Section:
    gloo, torch, shoal = (Trained(**how) for how in (_GLOO, _TORCH, _SHOAL))
    gloo_alone, alone = (Trained(**how, sync_every=0) for how in (_GLOO, _SHOAL))
    gloo_late, late_shoal = (Trained(**how, bucket_mb=_WHOLE_MB) for how in (_GLOO, _SHOAL))
    return Section(
        "training-breakdown",
        "a step, and how much of it is communication that nothing hides (DDP, Fig. 6)",
        (
            "gloo, torch: torch's DistributedDataParallel over Gloo and over shoal; shoal: shoal's",
            "late: all gradients in one bucket, which leaves when backward is over",
            "computing: the same step with nothing averaged (no_sync), of torch's and of shoal's;",
            "exposed: a step less its computing, of the same round",
        ),
        (
            Benchmark("gloo", gloo.step),
            Benchmark("torch", torch.step),
            Benchmark("shoal", shoal.step),
            Benchmark("gloo late", gloo_late.step),
            Benchmark("shoal late", late_shoal.step),
            Benchmark("computing torch", gloo_alone.step),
            Benchmark("computing", alone.step),
            Benchmark("forward", alone.part("forward_s")),
            Benchmark("backward", alone.part("backward_s")),
            Benchmark("gloo exposed", made_of(exposed, gloo.last_step, gloo_alone.last_step)),
            Benchmark("torch exposed", made_of(exposed, torch.last_step, gloo_alone.last_step)),
            Benchmark("exposed", made_of(exposed, shoal.last_step, alone.last_step)),
        ),
        tuple(
            _hosts(4, model, Within("shoal", "torch", 1.0), Within("exposed", "torch exposed", 1.0))
            for model in (*_MODELS, "demo")
        ),
        show_time,
        in_quick=lambda case: case.model == "bert",
    )


def _hidden() -> Section:
    # No rank computes here, so cores are free: only the order decides the hidden part.
    n_bytes, n_layers, n_hosts, mbit = 16 * MIB, 32, 4, 400
    wire_s = 2 * (n_hosts - 1) / n_hosts * n_bytes / (mbit * 1e6 / 8)
    paces: dict[str, Any] = {"forward_s": wire_s / 3, "backward_s": wire_s}
    at_once, nothing = Trained(**_SHOAL), Trained(**_SHOAL, sync_every=0)
    step, computing = Trained(**_SHOAL, **paces), Trained(**_SHOAL, **paces, sync_every=0)
    gloo, window = Trained(**_GLOO, **paces), step.part("window_s")
    alone = made_of(exposed, at_once.last_step, nothing.last_step)
    shown = made_of(exposed, step.last_step, computing.last_step)
    hidden = made_of(partial(hidden_part, n_layers=n_layers), alone, shown, window)
    return Section(
        "training-hidden",
        "how much of the communication that could be hidden is hidden",
        (
            "layers that sleep in place of arithmetic: backward for as long as 16 MiB take on the",
            "wire, forward for a third of that; so hosts do not take each other's cores",
            "alone: averaging where nothing is computed; window: from the first full buffer to the",
            "last; exposed: step less computing; hidden: (alone - exposed) / min(alone less a",
            "layer's share, window), since the last layer's way cannot be hidden",
        ),
        (
            Benchmark("at once", at_once.step),
            Benchmark("nothing", nothing.step),
            Benchmark("alone", alone),
            Benchmark("computing", computing.step),
            Benchmark("gloo", gloo.step),
            Benchmark("shoal", step.step),
            Benchmark("window", window),
            Benchmark("exposed", shown),
            Benchmark("hidden", hidden, show=show_percent),
        ),
        (_hosts(n_hosts, "paced", AtLeast("hidden", 0.9)),),
        show_time,
    )


def _buckets() -> Section:
    sizes = {"1/8": 0.125, "1": 1.0, "4": 4.0, "32": 32.0}
    benchmarks = [
        Benchmark(f"{name} {label}", Trained(**how, bucket_mb=size).step)
        for label, size in sizes.items()
        for name, how in (("gloo", _GLOO), ("shoal", _SHOAL))
    ]
    chosen = Benchmark("shoal's own", Trained(**_SHOAL).step)
    return Section(
        "training-buckets",
        "a step by the size of buckets, in MiB (DDP, Fig. 7 and 8)",
        ("shoal's own: the size that shoal chooses; torch's first bucket is of 1 MiB at most",),
        (*benchmarks, chosen),
        tuple(_hosts(4, model) for model in _MODELS),
        show_time,
        in_quick=lambda case: case.model == "bert",
    )


def _skipped() -> Section:
    benchmarks = [
        Benchmark(f"{name} {every}", Trained(8, n_warmup=0, **how, sync_every=every).step)
        for every in (1, 2, 4, 8)
        for name, how in (("gloo", _GLOO), ("shoal", _SHOAL))
    ]
    return Section(
        "training-skipped",
        "a step where only every second, fourth or eighth is averaged (DDP, Fig. 10)",
        ("no_sync in the others; the mean of 8 steps in a row, slowest rank",),
        tuple(benchmarks),
        tuple(_hosts(4, model) for model in _MODELS),
        show_time,
        in_rounds=False,
        in_quick=lambda case: case.model == "bert",
    )


def _flight() -> Section:
    def time_of(over: str, n_groups: int, depth: int) -> Measure:
        how = {"over": over, "n_groups": n_groups, "depth": depth, "n_buffers": 8}
        taken = asked("in_flight", lambda case: {**how, "n_bytes": case.n_bytes})
        return taken.first(median_time)

    case = Case(
        4,
        MIB,
        (Within("1 group", "2 groups", 1.05), Within("1 group", "3 groups", 1.05)),
        n_hosts=4,
        rate_mbit=400,
    )
    return Section(
        "training-flight",
        "8 buffers, one after another, all at once, and over several groups in turn (DDP, Fig. 12)",
        (
            "torch.distributed.all_reduce, async_op=True; seconds for all 8",
            "torch has no round robin of groups any more; here calls go to groups in turn",
        ),
        (
            Benchmark("gloo", time_of("gloo", 1, 8)),
            Benchmark("gloo 3 groups", time_of("gloo", 3, 8)),
            Benchmark("one by one", time_of("shoal", 1, 1)),
            Benchmark("two at once", time_of("shoal", 1, 2)),
            Benchmark("1 group", time_of("shoal", 1, 8)),
            Benchmark("2 groups", time_of("shoal", 2, 8)),
            Benchmark("3 groups", time_of("shoal", 3, 8)),
        ),
        (case, replace(case, n_bytes=4 * MIB)),
        show_time,
        in_quick=lambda case: case.n_bytes == MIB,
    )


def _scaling() -> Section:
    alone = [
        _hosts(n, model) if n > 1 else Case(1, 0, n_samples=3, model=model)
        for n in (1, 2, 4, 8)
        for model in _MODELS
    ]
    served = [_hosts(n, model, k=n) for n in (2, 4, 8) for model in _MODELS]
    return Section(
        "training-scaling",
        "a step on 1 to 8 hosts, without and with servers (DDP, Fig. 9; Herring, Fig. 11)",
        (
            "as many rows of a batch on every host: with perfect scaling a step takes as long;",
            "computing: nothing is averaged; it grows, since all hosts share this machine's cores",
        ),
        (
            Benchmark("gloo", Trained(**_GLOO).step),
            Benchmark("shoal", Trained(**_SHOAL).step),
            Benchmark("computing", Trained(**_SHOAL, sync_every=0).step),
        ),
        (*alone, *served),
        show_time,
        in_rounds=False,
        in_quick=lambda case: case.model == "bert" and case.n_ranks in (1, 4),
    )


def _served() -> Section:
    gloo, torch, shoal = (Trained(**how) for how in (_GLOO, _TORCH, _SHOAL))
    bf16 = Trained(**_SHOAL, wire="bf16")
    goals = (
        Faster("shoal", "gloo", 1.7),
        Faster("bf16", "gloo", 3.3),
        Within("shoal", "torch", 1.0),
        Below("losses", 1e-4),
    )
    return Section(
        "training-served",
        "little to compute, 10.6 million parameters, 42 MB: a server for each worker",
        (
            "bf16: wire='bf16'",
            "losses: the largest difference between shoal's and Gloo's in the steps of a round",
        ),
        (
            Benchmark("gloo", gloo.step),
            Benchmark("torch", torch.step, enters=lambda case: case.n_ranks == 8),
            Benchmark("shoal", shoal.step),
            Benchmark("bf16", bf16.step, enters=lambda case: case.n_ranks == 8),
            Benchmark("losses", loss_difference(shoal, gloo), show=show_percent),
        ),
        (
            _hosts(8, "linear", *goals, k=8),
            _hosts(8, "linear", *goals, mbit=200, k=8),
            _hosts(4, "linear", Faster("shoal", "gloo", 1.5), mbit=200, k=4),
        ),
        show_time,
        in_quick=lambda case: case.n_ranks == 8,
    )


def _losses() -> Section:
    how: dict[str, Any] = {**_SHOAL, "n_batches": _LOSS_STEPS, "n_warmup": 0, "n_times": 6}
    full, half = (Trained(_LOSS_STEPS // 6, wire=wire, **how) for wire in (None, "bf16"))
    return Section(
        "training-losses",
        f"{_LOSS_STEPS} steps of a small model of the demo's kind on real text, NICs not shaped",
        (
            f"float32, bf16: a step; differ: the mean losses of the last {_LOSS_LAST} steps",
            "anywhere: the most that the losses of one step differ",
        ),
        (
            Benchmark("float32", full.step),
            Benchmark("bf16", half.step),
            Benchmark("differ", end_difference(half, full, _LOSS_LAST), show=show_percent),
            Benchmark("anywhere", loss_difference(half, full), show=show_percent),
        ),
        (
            _hosts(
                4,
                "demo small",
                Below("differ", 0.01),
                AtLeast("anywhere", 1e-6),  # otherwise nothing was sent as bf16
                mbit=None,
            ),
        ),
        show_time,
        in_rounds=False,
        in_quick=lambda _case: False,
    )


def _host() -> tuple[Section, ...]:
    def copied(wrapper: str, keeps: bool) -> Taken[Ranks]:
        return asked(
            "copied_bytes",
            lambda case: {"model": case.model, "wrapper": wrapper, "keeps": keeps, "n_steps": 3},
            is_fresh=True,
        )

    dropped, kept, torch = copied("shoal", False), copied("shoal", True), copied("torch", True)
    case = Case(4, 0, n_samples=5, model="demo")
    return (
        Section(
            "training-host",
            "one host, the demo's model on real text",
            ("a step: forward, backward, optimizer; the mean, slowest rank",),
            (
                Benchmark("gloo", Trained(**_GLOO).step),
                Benchmark("torch", Trained(**_TORCH).step),
                Benchmark("shoal", Trained(**_SHOAL).step),
                Benchmark("kept", Trained(**_SHOAL, keeps=True).step),
            ),
            (replace(case, goals=(Faster("shoal", "gloo", 1.3), Within("shoal", "torch", 1.0))),),
            show_time,
        ),
        Section(
            "training-copies",
            "one host, the demo's model: bytes of gradients that a rank copies",
            (
                "with gradient_as_bucket_view=True, without which each is copied back, too",
                "copied: in a step, from where torch left them after zero_grad(); kept: after",
                "zero_grad(set_to_none=False); slots: bytes that the engine copies in 3 steps for",
                "host-mates that cannot read them in place; torch's slots: with torch's wrapper",
            ),
            (
                Benchmark("gradients", dropped.first(largest("gradients"))),
                Benchmark("copied", dropped.then(largest("copied"))),
                Benchmark("slots", dropped.then(largest("slots"))),
                Benchmark("kept", kept.first(largest("copied"))),
                Benchmark("kept slots", kept.then(largest("slots"))),
                Benchmark("torch's slots", torch.first(largest("slots"))),
            ),
            (
                replace(
                    case,
                    goals=(
                        *(Below("kept", 0.0), Below("kept slots", 0.1 * MIB)),
                        AtLeast("copied", 1),  # otherwise no copy is counted
                    ),
                ),
            ),
            show_memory,
            in_rounds=False,
        ),
    )


def _memory() -> Section:
    def memory(as_views: bool) -> Taken[Ranks]:
        how = {"n_steps": 4, "as_views": as_views}
        return asked("memory_beyond", lambda case: {"model": case.model, **how}, is_fresh=True)

    views = memory(True)
    return Section(
        "training-memory",
        "peak resident memory that a rank needs beyond the bare model's steps, gradients once",
        (
            "a host for each rank; bound: one fusion buffer and the ceiling of staging (50 MiB)",
            "pages of shared memory that this rank touched count whole, freed tensors do not;",
            "gradients are so large that a second copy of them would be beyond the bound",
            "grown: with gradient_as_bucket_view=True; default: with separate gradients",
        ),
        (
            Benchmark("grown", views.first(largest("grown_bytes"))),
            Benchmark("default", memory(False).first(largest("grown_bytes"))),
            Benchmark("buffer", views.then(largest("buffer_bytes"))),
            Benchmark("gradients", views.then(largest("gradient_bytes"))),
            Benchmark("bound", views.then(largest("bound_bytes"))),
        ),
        (_hosts(4, "wide", Within("grown", "bound", 1.0), mbit=None),),
        show_memory,
        in_rounds=False,
        in_quick=lambda _case: False,
    )


def _order() -> Section:
    n_arrays, n_elems, n_steps = 64, 16 * 1024, 24
    what = {"n_arrays": n_arrays, "n_elems": n_elems, "n_steps": n_steps}
    costs = asked("order_costs", lambda _case: what)
    return Section(
        "training-order",
        f"agreeing on an order: {n_arrays} arrays, 4 MiB, {n_steps} steps in an unexpected order",
        (
            "agree: the time of begin() beyond its median in the second step, which adopts the",
            "order of the first; slowest: the slowest step from the second on, over the median",
        ),
        (
            Benchmark("step", costs.first(median_time)),
            Benchmark("agree", costs.then(largest("agree_s"))),
            Benchmark("layouts", costs.then(largest("n_layouts")), show=show_count),
            Benchmark("slowest", costs.then(slowest_ratio), show=show_times),
        ),
        (
            Case(
                8,
                0,
                (
                    *(Below("agree", 5e-3), Below("slowest", 1.2)),
                    AtLeast("layouts", 1),  # otherwise no order was adopted: `agree` means nothing
                ),
                n_hosts=8,
                rate_mbit=400,
            ),
        ),
        show_time,
        in_quick=lambda _case: False,
    )


def _python() -> Section:
    def columns(n: int) -> tuple[Benchmark, ...]:
        added = asked("added_cpu", lambda _case: {"n_parameters": n, "n_steps": 40})
        return (
            Benchmark(f"torch {n}", added.first(largest("torch"))),
            Benchmark(f"shoal {n}", added.then(largest("shoal"))),
        )

    counts = (100, 1000)
    goals = tuple(Within(f"shoal {n}", f"torch {n}", 1.1) for n in counts)
    return Section(
        "training-python",
        "one rank, small parameters: CPU time that a wrapper adds to a step of the bare model",
        (
            "torch: torch's wrapper over Gloo; 100 and 1,000 parameters of 16 elements; forward",
            "and backward of each in turn, medians of 40 steps",
        ),
        tuple(column for n in counts for column in columns(n)),
        (Case(1, 0, goals),),
        show_time,
    )


def _of_training(section: Section) -> Section:
    is_large = any(case.n_ranks > 4 for case in section.cases)
    return replace(section, part_of="training", answer_s=_ANSWER_S, is_large=is_large)


TRAINING_SECTIONS: Final = tuple(
    _of_training(one)
    for one in (
        _python(),
        *_host(),
        _breakdown(),
        _hidden(),
        PLANNED,
        _buckets(),
        _skipped(),
        _flight(),
        _losses(),
        _memory(),
        _order(),
        _scaling(),
        _served(),
    )
)
