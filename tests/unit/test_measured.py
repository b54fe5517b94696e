"""Shares that are corrected by what calls took: with simulated NICs, in few plans, for good."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from shoal.plan.cluster import Nic, Pool
from shoal.plan.measured import Seen, correct, imbalance, late_servers
from shoal.plan.shares import best_shares, loads, servers_alone, shares_beside

if TYPE_CHECKING:
    from shoal.schedule.weights import Weights

RATE = 50.0  # bytes per microsecond
LINE = 0.95  # of it, what goes over a NIC that all wait for
BESIDE = 0.8  # of that, what a server's gets while workers send each other something
MIB = 1 << 20


def nics(*rates: float) -> tuple[Nic, ...]:
    return tuple(Nic(RATE * rate, RATE * rate) for rate in rates)


def planned(pool: Pool) -> Weights:
    """As the planner would: by servers alone where there are as many."""
    if len(pool.servers) >= len(pool.workers):
        return servers_alone(pool.workers, pool.servers).weights()
    return shares_beside(pool.workers, pool.servers).weights()


def seen(
    truth: Pool, weights: Weights, noise: float = 0.0, draw: random.Random | None = None
) -> Seen:
    """What calls by these weights take.

    While workers send each other something, servers' NICs pass a part of what they could. Bytes
    wait for them: a NIC whose use is u has a queue of 1 / (1 - u), as far as windows let it.
    """
    draw = draw or random.Random(0)
    about = lambda: draw.uniform(1 - noise, 1 + noise)  # noqa: E731
    n, n_bytes = len(truth.workers), 100.0 * MIB
    part = sum(weights.servers) / weights.total
    load = [each * n_bytes / LINE for each in loads(weights)]
    busy = [each / nic.slower for each, nic in zip(load[n:], truth.servers, strict=True)]
    workers_us = 0.0
    if any(weights.workers):
        # What a worker's NIC has left for the other workers, until they are done.
        to_servers = BESIDE * sum(nic.slower for nic in truth.servers) / n
        alone_us = (load[0] - part * n_bytes / LINE) / (truth.workers[0].slower - to_servers)
        workers_us = min(load[0] / truth.workers[0].slower, alone_us)
    servers_us = max(max(busy) + (1 - BESIDE) * workers_us, workers_us)
    if not workers_us:
        servers_us = max(*busy, load[0] / truth.workers[0].slower)
    busiest = max(busy) if workers_us else servers_us
    waits = [1000 / (1.05 - each / busiest) for each in busy]
    return Seen(
        weights,
        n_bytes,
        workers_us * about(),
        servers_us * about(),
        tuple(each * about() for each in waits),
    )


def time_of(truth: Pool, weights: Weights) -> float:
    """Of a call by these weights."""
    last = seen(truth, weights)
    return max(last.workers_us, last.servers_us)


def loss(truth: Pool, weights: Weights) -> float:
    """How many times as long calls take as by the best shares, found by trying."""
    if not any(weights.workers):
        return imbalance(weights, truth)
    tried = []
    for times in range(20, 200):
        servers = [Nic(nic.out * times / 100, nic.into * times / 100) for nic in truth.servers]
        tried.append(best_shares(truth.workers, servers).weights())
    return time_of(truth, weights) / min(time_of(truth, each) for each in tried)


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
    assert loss(truth, used[0]) > 1.1, "this tests nothing"
    assert loss(truth, used[-1]) < 1.12
    again = plans(reported, truth, 20)
    assert loss(truth, again[-1]) < 1.12


@pytest.mark.parametrize("lost", [-0.1, 0.1, 0.2])
@pytest.mark.parametrize("k", [4, 8])
def test_what_a_busy_machine_loses_makes_no_shares_swing(k: int, lost: float) -> None:
    """What NICs carry is measured wrong then, and slow ones are given too little or too much."""
    reported, truth = Pool(nics(*[1.0] * k), ALIKE), Pool(nics(*[0.5, 1.0] * (k // 2)), ALIKE)
    used = plans(reported, truth, 30, 0.05, 0, lost)
    assert max(loss(truth, weights) for weights in used[3:]) < 1.25


@pytest.mark.parametrize("seed", range(20))
def test_shares_that_are_right_stay_so_at_5_percent_of_noise(seed: int) -> None:
    for k in (1, 2, 4, 8, 12):
        truth = Pool(nics(*[1.0] * k), ALIKE)
        used = plans(truth, truth, 50, 0.05, seed)
        assert len(set(used)) <= 2
        assert max(loss(truth, weights) for weights in set(used)) < 1.05


@pytest.mark.parametrize("seed", range(20))
def test_corrected_shares_stay_near_to_the_best_at_5_percent_of_noise(seed: int) -> None:
    """Each window counts here; rank 0 waits for two that agree, and rests after four in vain."""
    reported, truth = Pool(nics(1, 1, 1, 1), ALIKE), Pool(nics(1, 0.5, 1, 0.5), ALIKE)
    used = plans(reported, truth, 50, 0.05, seed)
    assert max(loss(truth, weights) for weights in set(used[4:])) < 1.15


@pytest.mark.parametrize("k", [1, 2, 4])
def test_servers_as_fast_as_reported_are_not_taken_for_faster(k: int) -> None:
    """What 8 workers took at 400 Mbit/s, one part beside the other, and by whom bytes waited."""
    took_ms = {1: (945, 1045), 2: (880, 936), 4: (775, 746)}[k]
    pool = Pool(nics(*[0.956] * k), nics(*[0.956] * 8))
    calls = 9
    weights = planned(pool)
    workers_us, servers_us = (calls * 1e3 * each for each in took_ms)
    last = Seen(weights, calls * 25.0 * MIB, workers_us, servers_us, (9000.0,) * k)
    assert correct(pool, last) is None
