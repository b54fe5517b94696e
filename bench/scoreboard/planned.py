"""The table that compares `shoal plan --model-bytes` with measured steps in a lab."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Final

from bench.scoreboard.benchmark import Benchmark, Section
from bench.scoreboard.case import Case
from bench.scoreboard.goals import Near
from bench.scoreboard.table import show_time
from bench.scoreboard.training_measures import Trained
from shoal.codec import CODECS, Codec, top_k
from shoal.plan.cluster import Nic, Nics
from shoal.plan.defaults import default_cluster
from shoal.plan.training import FORWARD, Training, Way, cost_of_step
from shoal.plan.wire import link_of

if TYPE_CHECKING:
    from bench.scoreboard.benchmark import Measure
    from bench.scoreboard.pools import WorkerPools

_BYTES: Final = 16 << 20  # the size of the model "paced"
_COMPUTE_S: Final = 0.3
_SHARE, _BITS = 0.01, 8  # the defaults of ChunkTopK
_NEAR: Final = 1.15


def _planned(way: Way, computing: Trained) -> Measure:
    """Estimate a step's seconds in the lab from the time of computing measured in this round."""

    def measure(pools: WorkerPools, case: Case) -> float:
        wire = link_of(pools.cluster(case).environment_of(0, range(case.n_hosts))["SHOAL_LINK"])
        cluster = default_cluster(
            range(case.n_hosts), n_cores=len(os.sched_getaffinity(0)), wire=wire
        )
        pool = Nics((Nic.of(wire),) * case.n_servers)
        training = Training(_BYTES, 1e6 * computing.last_step(pools, case), cluster, pool)
        return cost_of_step(way, training).step_us / 1e6

    return measure


def _ways() -> dict[Way, dict[str, Any]]:
    """Return the ways to average, with the arguments of a Variant for each."""
    found: dict[Way, dict[str, Any]] = {Way("float32", Codec.IDENTITY): {}}
    found[Way("bf16", Codec.BF16)] = {"wire": "bf16"}
    for name in ("mxfp8", "mxfp4"):
        if name in CODECS:
            found[Way(f"{name} + EF", CODECS[name], feeds_back=True)] = {"compress": name}
    found[Way("top-k", top_k(_SHARE, _BITS), feeds_back=True)] = {"compress": "top-k"}
    return found


def _benchmarks() -> tuple[Benchmark, ...]:
    paces: dict[str, Any] = {
        "forward_s": FORWARD * _COMPUTE_S,
        "backward_s": (1 - FORWARD) * _COMPUTE_S,
    }
    computing = Trained(**paces, sync_every=0)
    found = [Benchmark("computing", computing.step)]
    for way, how in _ways().items():
        found.append(Benchmark(way.name, Trained(**paces, **how).step))
        found.append(Benchmark(f"{way.name} planned", _planned(way, computing)))
    return tuple(found)


def _hosts(n: int, mbit: float, n_servers: int = 0) -> Case:
    goals = tuple(Near(way.name, f"{way.name} planned", _NEAR) for way in _ways())
    nics: dict[str, Any] = {"n_hosts": n, "rate_mbit": mbit, "n_servers": n_servers}
    return Case(n, 0, goals, n_samples=3, **nics, model="paced")


PLANNED: Final = Section(
    "training-planned",
    "steps as `shoal plan --model-bytes 16MiB --step 300ms` estimates them, and as measured",
    (
        "layers that sleep in place of arithmetic, forward a third of the time; so hosts do not",
        "take each other's cores; planned: from the computing that the same round measured",
    ),
    _benchmarks(),
    (_hosts(4, 1000), _hosts(4, 200), _hosts(8, 200, 8)),
    show_time,
    in_quick=lambda case: not case.n_servers,
)
