"""What ranks of a view say of their links: whatever it is, calls are shared by it."""

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


def said(rate: float) -> bytes:
    return struct.pack("<4sd3H16x", b"pool", rate, 0, 1, 2)


@pytest.mark.parametrize("rates", list(itertools.combinations_with_replacement(SAID, 3)))
def test_calls_are_shared_whatever_servers_say_of_their_links(rates: tuple[float, ...]) -> None:
    cluster = default_cluster(range(N_WORKERS))
    known = [card_of(said(rate)).rate for rate in (*[50.0] * N_WORKERS, *rates)]
    pool = nics_of(known, N_WORKERS, cluster)
    served = choose_with_servers(8 << 20, cluster, pool)
    assert 0 < served.cost_us <= served.alone_us


@pytest.mark.parametrize("rate", [float("nan"), float("inf"), -1.0])
def test_what_is_no_rate_is_refused(rate: float) -> None:
    with pytest.raises(ShoalError, match="sent no server-pool record"):
        card_of(said(rate))
