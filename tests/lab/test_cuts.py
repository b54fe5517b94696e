"""A network that drops all packets from one host to another, for a while or for good.

Packets vanish silently, one way or both ways, while ranks all-reduce repeatedly. A cut shorter than
the ranks' patience costs only time; after a longer one the silent rank is lost. `SHOAL_SOAK=1` adds
the long cuts, as `make test-soak` does.
"""

import os
import threading

import numpy as np
import pytest
from lab.labs import enter, env_of, needs_root
from process.ranks import Outcome, start_ranks
from process.stage import Stage

import shoal
from shoal.errors import PeerLost, ShoalError
from shoal.lab import Lab

pytestmark = needs_root

SOAK = os.environ.get("SHOAL_SOAK") == "1"
N_ELEMS = 300_007
WAYS = {"one way": [(0, 1)], "both ways": [(0, 1), (1, 0)]}
# A peer silent for five seconds counts as dead: a shorter cut is harmless, a longer one ends the
# group, and one of five seconds may do either.
HARMLESS, EITHER, DEADLY = "harmless", "either", "deadly"
FOR_GOOD = float("inf")
CUTS = [("one way", 1, HARMLESS), ("both ways", 1, HARMLESS), ("one way", FOR_GOOD, DEADLY)]
if SOAK:
    CUTS += [(way, 5, EITHER) for way in WAYS] + [(way, 30, DEADLY) for way in WAYS]


def reduce_through_a_cut(namespaces: list[str]) -> tuple[int, Exception | None]:
    """All-reduce until a cue or an error; return the number of right calls and the error."""
    rank = int(os.environ["RANK"])
    stage = Stage.from_environment()
    stage.cue(f"rank {rank} is here")  # connects, which a host of the cluster cannot do
    enter(namespaces[rank])
    n_calls = 0
    with shoal.init() as group:
        try:
            go_on = np.ones(1)
            while go_on[0]:
                data = np.full(N_ELEMS, rank + n_calls, np.float32)
                group.all_reduce(data)
                assert (data == 1 + 2 * n_calls).all(), f"wrong sum in call {n_calls}"
                n_calls += 1
                if n_calls == 3:
                    stage.cue(f"rank {rank} is busy")
                go_on[0] = rank != 0 or stage.store.try_get("cue/enough") is None
                group.all_reduce(go_on, "min")
        except ShoalError as error:
            return n_calls, error
    return n_calls, None


def run_through(ways: list[tuple[int, int]], cut_s: float) -> list[Outcome]:
    """Run a rank on each of two hosts, and cut these ways once both are busy."""
    with Lab(2) as cluster, Stage() as stage:
        namespaces = [host.namespace for host in cluster.hosts]
        env = {**env_of(cluster), **stage.env, "SHOAL_RESUME_S": "3"}
        with start_ranks(reduce_through_a_cut, 2, namespaces, env=env) as ranks:
            for rank in range(2):
                stage.await_cue(f"rank {rank} is busy")
            for source, to in ways:
                cluster.cut(source, to)
            if cut_s == FOR_GOOD:
                return ranks.wait(60)
            threading.Event().wait(cut_s)  # a silence needs real time
            for source, to in ways:
                cluster.heal(source, to)
            stage.cue("enough")
            return ranks.wait(30)


@pytest.mark.parametrize(("way", "cut_s", "meaning"), CUTS)
def test_only_a_long_silence_of_the_network_fails(way: str, cut_s: float, meaning: str) -> None:
    outcomes = run_through(WAYS[way], cut_s)
    for outcome in outcomes:
        assert outcome.value is not None, outcome
        n_calls, error = outcome.value
        assert n_calls >= 3, outcome
        if error is not None:
            assert isinstance(error, PeerLost), outcome
            assert error.rank == 1 - outcome.rank, outcome
        assert meaning == EITHER or (error is None) == (meaning == HARMLESS), outcome
    assert len({outcome.value[1] is None for outcome in outcomes}) == 1
