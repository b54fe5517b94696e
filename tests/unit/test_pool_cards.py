"""Link rates announced by ranks of a view: calls are shared by any valid rates."""

from __future__ import annotations

import itertools
import struct

import pytest

from shoal.errors import ShoalError
from shoal.group.pool.view import nics_of
from shoal.group.pool.view_mesh import card_of
from shoal.plan import default_cluster
from shoal.plan.served import choose_with_servers

N_WORKERS = 4
SAID = [5e-324, 1.0, 1e9, 1e308]


def encoded(rate: float) -> bytes:
    return struct.pack("<4sd3H16x", b"pool", rate, 0, 1, 2)


@pytest.mark.parametrize("rates", list(itertools.combinations_with_replacement(SAID, 3)))
def test_calls_are_shared_by_any_announced_rates(rates: tuple[float, ...]) -> None:
    cluster = default_cluster(range(N_WORKERS))
    known = [card_of(encoded(rate)).rate for rate in (*[50.0] * N_WORKERS, *rates)]
    pool = nics_of(known, N_WORKERS, cluster)
    served = choose_with_servers(8 << 20, cluster, pool)
    assert 0 < served.cost_us <= served.alone_us


@pytest.mark.parametrize("rate", [float("nan"), float("inf"), -1.0])
def test_an_invalid_rate_is_refused(rate: float) -> None:
    with pytest.raises(ShoalError, match="sent no server-pool record"):
        card_of(encoded(rate))
