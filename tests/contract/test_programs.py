"""The engine's dataflow equals the one that proofs and simulations derive."""

import pytest

from shoal.analysis.dataflow import Dataflow
from shoal.engine import lower
from shoal.schedule import ALGORITHMS, find

MORE = ("sharded/tree", "ring/doubling", "tree/sharded")
# Weights of workers and servers, each for one size of group.
WEIGHTED = {
    "sharded[5*2|3*7]": 8,
    "sharded[5*2|3*7].servers": 8,
    "sharded[5*2|3*7].workers": 5,
    "sharded[2,0,7,1|3,0,50,1,9]": 9,
    "sharded[16*0|20*1]": 36,
}
NAMES = [(collective, name) for collective, known in ALGORITHMS.items() for name in known]
NAMES += [("all_reduce", name) for name in (*MORE, *WEIGHTED)]
# The hosts of the ranks.
HOSTS = [(0,) * size for size in (1, 2, 3, 4, 5, 7, 8, 16)]
HOSTS += [(0, 0, 1, 1), (0, 0, 0, 1, 1), (0, 0, 1, 1, 2, 2, 3, 3), (0, 1, 0, 1, 0)]


@pytest.mark.parametrize(("collective", "name"), NAMES)
def test_a_step_waits_for_the_steps_of_an_independent_reading(collective: str, name: str) -> None:
    algorithm = find(collective, name)
    for hosts in [range(WEIGHTED[name])] if name in WEIGHTED else HOSTS:
        size = len(hosts)
        for root in {0, size // 2} if algorithm.rooted else {0}:
            schedule = [list(algorithm.steps(rank, size, root, hosts)) for rank in range(size)]
            flow = Dataflow(schedule)
            for rank, steps in enumerate(schedule):
                native = lower(steps, size).waits_for
                first = flow.first_of[rank]
                assert len(native) == len(steps)
                for at, waits in enumerate(native):
                    also = {one - first for one in flow.waits_for[first + at]}
                    assert sorted(set(waits)) == waits
                    # A step that waits for a chunk's readers also waits for the step they read.
                    assert also == {*waits, *(also & {w for one in waits for w in native[one]})}
