"""Ranks that are killed in the middle of a call: every survivor names them, no result is wrong.

The victim ends itself when a certain element of its tensor has got its result, or at once when its
call has begun. `SHOAL_SOAK=1` does each a hundred times, as `make test-soak` does.
"""

import itertools
import os
import random
import signal
import time
from typing import NamedTuple

import numpy as np
import pytest
from process.ranks import start_ranks
from process.stage import error_of, pretend_hosts

import shoal
from shoal.errors import PeerLost

SOAK = os.environ.get("SHOAL_SOAK") == "1"
N_KILLS = 100 if SOAK else 1
N_ELEMS = 1_000_003
SOON_S = 2.0
# How many ranks each host has, by the size of the group.
HOSTS = {
    "in one host": lambda size: size,
    "between hosts": lambda _size: 1,
    "on two hosts": lambda size: (size + 1) // 2,
}


class Kill(NamedTuple):
    """Who dies, in which call, and once which element has its result; -1: once it has begun."""

    victim: int
    turn: int
    element: int


def reduce_until_killed(kill: Kill, ranks_per_host: int) -> tuple[float, Exception, bool]:
    """When a survivor heard, what, and whether the next call told the same."""
    pretend_hosts(ranks_per_host)
    with shoal.init() as group:
        n = group.size
        try:
            for turn in itertools.count():
                data = np.full(N_ELEMS, group.rank + turn, np.float32)
                if (group.rank, turn) == (kill.victim, kill.turn):
                    end_in_call(group, data, kill.element)
                group.all_reduce(data)
                assert (data == n * turn + n * (n - 1) // 2).all(), f"wrong sum in call {turn}"
        except PeerLost as error:
            at, lost = time.monotonic(), error
        again = error_of(group.barrier)
        return at, lost, isinstance(again, PeerLost) and again.rank == lost.rank


def end_in_call(group: shoal.Group, data: np.ndarray, element: int) -> None:
    own = data[element]
    work = group.all_reduce(data, async_op=True)
    while element >= 0 and data[element] == own and not work.done():
        pass
    os.kill(os.getpid(), signal.SIGKILL)


def kills(size: int) -> list[Kill]:
    """Their order is the same in every run."""
    dice = random.Random(size)
    elements = [-1, 0, N_ELEMS - 1, *(dice.randrange(N_ELEMS) for _ in range(N_KILLS))]
    return [
        Kill(dice.randrange(size), dice.randrange(3), dice.choice(elements)) for _ in range(N_KILLS)
    ]


# The others are in test_faults_death.py, four ranks at a time.
PLACES = [(3, "between hosts"), (3, "on two hosts"), (8, "in one host"), (8, "between hosts")]
if SOAK:
    PLACES = [(size, hosts) for size in (3, 4, 8) for hosts in HOSTS]


@pytest.mark.timeout(120 * N_KILLS)
@pytest.mark.parametrize(("size", "hosts"), PLACES)
def test_every_survivor_of_a_rank_that_is_killed_in_a_call_names_it_soon(
    size: int, hosts: str
) -> None:
    ranks_per_host = HOSTS[hosts](size)
    for kill in kills(size):
        with start_ranks(reduce_until_killed, size, kill, ranks_per_host) as ranks:
            ranks.await_end(kill.victim)
            died_at = time.monotonic()
            outcomes = ranks.wait(30)
        assert outcomes.pop(kill.victim).died == "was killed by SIGKILL"
        for outcome in outcomes:
            assert outcome.value is not None, (kill, outcome)
            heard_at, lost, is_told_again = outcome.value
            assert lost.rank == kill.victim, (kill, outcome)
            # Who found out was connected to it, or was about to be.
            assert "its process died" in str(lost) or "nobody listens at" in str(lost), kill
            assert heard_at - died_at < SOON_S, (kill, outcome)
            assert is_told_again, (kill, outcome)
