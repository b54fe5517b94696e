"""Shares that keep NICs busy: the formula for equal links, and no better shares exist."""

import random

import pytest

from shoal.errors import UsageError
from shoal.plan.cluster import Nic
from shoal.plan.shares import best_shares, kept_beside, loads, shares_beside
from shoal.schedule.weights import Weights


def nics(*rates: float) -> list[Nic]:
    return [Nic(rate, rate) for rate in rates]


def time_of(shares: list[float], workers: list[Nic], servers: list[Nic]) -> float:
    """Return the time of the busiest NIC by the bytes each sends and receives, independently."""
    n = len(workers)
    times = []
    for nic, share in zip(workers, shares, strict=False):
        out = (1 - share) + (n - 1) * share  # its part of others' shares, and its results to others
        into = (n - 1) * share + (1 - share)  # others' parts of its share, and results of its parts
        times += [out / nic.out, into / nic.into]
    for nic, share in zip(servers, shares[n:], strict=True):
        times += [n * share / nic.out, n * share / nic.into]
    return max(times)


@pytest.mark.parametrize("n", [3, 4, 8, 16, 100, 2048])
def test_equal_links_take_the_time_of_the_formula(n: int) -> None:
    for k in {0, 1, 2, n // 2, n - 1, n, n + 1, 5 * n}:
        found = best_shares(nics(*[10.0] * n), nics(*[10.0] * k))
        used = min(k, n)  # more servers than workers gain no more
        formula = 2 * n * (n - 1) / (n * n + used * n - 2 * used)
        assert 10 * found.us_per_byte == pytest.approx(formula)
        assert sum(found.workers) + sum(found.servers) == pytest.approx(1)
        if k >= n:
            assert found.workers == pytest.approx([0] * n)


def test_no_shares_drawn_at_random_are_better() -> None:
    chance = random.Random(0)
    for _ in range(150):
        n, k = chance.randint(2, 6), chance.randint(0, 5)
        workers, servers = (
            [Nic(chance.choice((1, 2, 5, 10)), chance.choice((1, 2, 5, 10))) for _ in range(m)]
            for m in (n, k)
        )
        found = best_shares(workers, servers)
        best = [*found.workers, *found.servers]
        assert min(best) >= 0
        assert sum(best) == pytest.approx(1)
        assert time_of(best, workers, servers) == pytest.approx(found.us_per_byte)
        for _ in range(60):  # anywhere, and near the optimum
            anywhere = [chance.expovariate(1) for _ in best]
            near = [max(0.0, one + chance.gauss(0, 0.02)) for one in best]
            for drawn in (anywhere, near):
                others = [one / sum(drawn) for one in drawn]
                assert time_of(others, workers, servers) >= found.us_per_byte * (1 - 1e-9)


def test_the_slower_direction_of_a_nic_counts_and_useless_servers_get_no_share() -> None:
    slow_out = best_shares(nics(*[10.0] * 4), [Nic(5, 10), *nics(10)])
    assert slow_out == best_shares(nics(*[10.0] * 4), [Nic(10, 5), *nics(10)])
    assert slow_out.servers[0] == pytest.approx(slow_out.servers[1] / 2)
    assert best_shares(nics(1, 1), nics(1, 1)).servers == (0, 0)
    assert best_shares(nics(1), nics(1)).workers == (1,)
    one_slow = best_shares(nics(10, 10, 10, 1), nics(10))
    assert (one_slow.servers, one_slow.workers[3]) == ((0,), 0)
    with pytest.raises(UsageError, match="at least one worker"):
        best_shares([], nics(1))


def test_weights_are_small_numbers_and_their_loads_go_over_each_nic() -> None:
    for workers, servers, name in (
        ([1.0] * 8, [1.0] * 4, "sharded[8*2|4*7]"),
        ([1.0] * 8, [1.0], "sharded[8*1|2]"),
        ([1.0] * 8, [1.0] * 12, "sharded[8*0|12*1]"),
        ([1.0] * 8, [1.0, 1.0, 0.5, 0.5], "sharded[8*5|2*14,2*7]"),
        ([7.0] * 8, [7.0] * 4, "sharded[8*2|4*7]"),
    ):
        assert best_shares(nics(*workers), nics(*servers)).weights().name() == name
    weights = Weights((2,) * 8, (7,) * 4)
    assert loads(weights) == pytest.approx([1 + 6 * 2 / 44] * 8 + [8 * 7 / 44] * 4)


def test_weights_are_as_good_as_the_shares() -> None:
    chance = random.Random(1)
    for _ in range(100):
        n, k = chance.randint(3, 16), chance.randint(1, 20)
        workers = nics(*(chance.uniform(8, 10) for _ in range(n)))
        servers = nics(*(chance.uniform(1, 10) for _ in range(k)))
        found = best_shares(workers, servers)
        weights = found.weights()
        shares = [w / weights.total for w in (*weights.workers, *weights.servers)]
        assert time_of(shares, workers, servers) <= 1.005 * found.us_per_byte


def test_beside_workers_a_server_gets_a_share_by_its_effective_rate() -> None:
    workers = nics(*[10.0] * 8)
    for k in (1, 2, 4, 6, 7):
        found = shares_beside(workers, nics(*[10.0] * k))
        part = sum(found.servers)
        assert part < sum(best_shares(workers, nics(*[10.0] * k)).servers)
        busy = 8 * found.servers[0] / (10 * kept_beside(part))
        assert busy == pytest.approx((1 + 6 * found.workers[0]) / 10, rel=1e-6)
    for k in (0, 8, 12):  # one side does all the work, without competition
        servers = nics(*[10.0] * k)
        assert shares_beside(workers, servers) == best_shares(workers, servers)
        assert sum(shares_beside(workers, servers).workers) == pytest.approx(float(k == 0))
