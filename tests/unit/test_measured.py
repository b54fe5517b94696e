"""Shares that are corrected by what calls took: with simulated NICs, in few plans, for good."""

from __future__ import annotations

import itertools
import random
from typing import TYPE_CHECKING

import pytest

from shoal.plan.cluster import Nic, Pool
from shoal.plan.measured import Seen, correct, imbalance, late_servers
from shoal.plan.shares import best_shares, loads, servers_alone

if TYPE_CHECKING:
    from shoal.schedule.weights import Weights

RATE = 50.0  # bytes per microsecond
MIB = 1 << 20


def nics(*rates: float) -> tuple[Nic, ...]:
    return tuple(Nic(RATE * rate, RATE * rate) for rate in rates)


def planned(pool: Pool) -> Weights:
    """As the planner would: by servers alone where there are as many."""
    if len(pool.servers) >= len(pool.workers):
        return servers_alone(pool.workers, pool.servers).weights()
    return best_shares(pool.workers, pool.servers).weights()


def seen(
    truth: Pool, weights: Weights, noise: float = 0.0, draw: random.Random | None = None
) -> Seen:
    """What calls by these weights take: the busiest NIC says how long, and bytes wait there.

    A NIC whose use is u has a queue of 1 / (1 - u), as far as windows let it.
    """
    draw = draw or random.Random(0)
    about = lambda: draw.uniform(1 - noise, 1 + noise)  # noqa: E731
    n, line = len(truth.workers), 0.65 if any(weights.workers) else 0.85
    n_bytes = 100.0 * MIB
    load = [each * n_bytes / line for each in loads(weights)]
    by_servers = sum(weights.servers) / weights.total * n_bytes / line
    worker_us = max(each / nic.slower for each, nic in zip(load[:n], truth.workers, strict=True))
    busy = [each / nic.slower for each, nic in zip(load[n:], truth.servers, strict=True)]
    servers_us = max(*busy, worker_us)
    workers_us = 0.0
    if any(weights.workers):
        left_us = (load[0] - by_servers) / (truth.workers[0].slower - by_servers / servers_us)
        workers_us = min(worker_us, left_us)
    busiest = max(busy) if any(weights.workers) else servers_us
    waits = [1000 / (1.05 - each / busiest) for each in busy]
    return Seen(
        weights,
        n_bytes,
        workers_us * about(),
        servers_us * about(),
        tuple(each * about() for each in waits),
    )


def plans(
    reported: Pool,
    truth: Pool,
    n: int,
    noise: float = 0.0,
    seed: int = 0,
    lost: float = 0.0,
) -> list[Weights]:
    """The weights in use, one after the other.

    Args:
        lost: of what NICs carry, besides what is always lost.
    """
    draw = random.Random(seed)
    pool, used, known = reported, [planned(reported)], set[int]()
    for _ in range(n):
        last = seen(truth, used[-1], noise, draw)
        last = last._replace(
            workers_us=last.workers_us / (1 - lost), servers_us=last.servers_us / (1 - lost)
        )
        late = late_servers(pool, last)
        found = correct(pool, last, known)
        if found is None:
            used.append(used[-1])
            continue
        pool = found
        known |= late
        used.append(planned(pool))
    return used


ALIKE = nics(*[1.0] * 8)


@pytest.mark.parametrize(
    ("reported", "truth"),
    [
        (Pool(nics(1, 1, 1, 1), ALIKE), Pool(nics(1, 0.5, 1, 0.5), ALIKE)),
        (Pool(nics(1, 1, 1, 1), ALIKE), Pool(nics(1, 1 / 2.6, 1, 1), ALIKE)),
        (Pool(nics(1, 1, 1, 1), ALIKE), Pool(nics(*[1 / 2.6] * 4), ALIKE)),
        (Pool(nics(1, 1, 1, 1), ALIKE), Pool(nics(1, 2.6, 1, 1), ALIKE)),
        (Pool(nics(2.6, 2.6), ALIKE), Pool(nics(1, 1), ALIKE)),
        (Pool(nics(2.6), ALIKE), Pool(nics(1), ALIKE)),
        (Pool(nics(*[1] * 8), ALIKE), Pool(nics(*[1, 1 / 2.6] * 4), ALIKE)),
        (Pool(nics(*[1] * 10), ALIKE), Pool(nics(*[1] * 6, *[0.3] * 4), ALIKE)),
    ],
)
def test_rates_that_are_reported_wrong_are_corrected_within_three_plans(
    reported: Pool, truth: Pool
) -> None:
    used = plans(reported, truth, 3)
    assert imbalance(used[0], truth) > 1.1, "this tests nothing"
    assert imbalance(used[-1], truth) < 1.1
    again = plans(reported, truth, 20)
    assert imbalance(again[-1], truth) < 1.1


@pytest.mark.parametrize("lost", [-0.1, 0.1, 0.2])
@pytest.mark.parametrize("k", [4, 8])
def test_what_a_busy_machine_loses_makes_no_shares_swing(k: int, lost: float) -> None:
    """What NICs carry is measured wrong then, and slow ones are given too little or too much."""
    reported, truth = Pool(nics(*[1.0] * k), ALIKE), Pool(nics(*[0.5, 1.0] * (k // 2)), ALIKE)
    used = plans(reported, truth, 30, 0.05, 0, lost)
    assert max(imbalance(weights, truth) for weights in used[3:]) < 1.25


@pytest.mark.parametrize("seed", range(20))
def test_shares_that_are_right_stay_at_5_percent_of_noise(seed: int) -> None:
    for k in (1, 2, 4, 8, 12):
        truth = Pool(nics(*[1.0] * k), ALIKE)
        assert len(set(plans(truth, truth, 50, 0.05, seed))) == 1


@pytest.mark.parametrize("seed", range(20))
def test_corrected_shares_do_not_swing_at_5_percent_of_noise(seed: int) -> None:
    reported, truth = Pool(nics(1, 1, 1, 1), ALIKE), Pool(nics(1, 0.5, 1, 0.5), ALIKE)
    used = plans(reported, truth, 50, 0.05, seed)
    late = used[4:]
    assert sum(one != other for one, other in itertools.pairwise(late)) <= 1
    assert max(imbalance(weights, truth) for weights in late) < 1.15
