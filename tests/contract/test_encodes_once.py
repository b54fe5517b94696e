"""`Algorithm.encodes_once`, checked by carrying marks through all ranks' steps."""

from collections import deque
from dataclasses import dataclass

import pytest

from shoal.plan import numbered
from shoal.schedule import (
    Algorithm,
    Buffer,
    Copy,
    Finish,
    Recv,
    Send,
    find,
)

NAMES = {
    "all_reduce": (
        *("direct", "sharded", "ring", "tree", "doubling", "halving", "ring_2d", "fairring"),
        *("ring/sharded", "sharded/ring", "halving/tree", "sharded/doubling", "sharded/direct"),
    ),
    "reduce_scatter": ("direct", "ring"),
}
LAYOUTS = [
    *(tuple(range(size)) for size in range(1, 9)),
    *((0, 0), (0, 0, 1), (0, 1, 0, 1), (0, 0, 1, 1), (0, 0, 0, 1), (0, 0, 1, 1, 2, 2)),
    *((0, 1, 1, 2, 2, 2), (0, 0, 0, 0, 1, 1, 1, 1), (0, 1, 2, 0, 1, 2, 0)),
]


@dataclass
class Value:
    """The state of a chunk: how often one of its parts was encoded, and the finishing rank."""

    n_encoded: int = 0
    finished_by: int = -1

    def encoded(self) -> "Value":
        """Return the state on arrival at another host; the finishing rank has already rounded."""
        return Value(self.n_encoded + (self.finished_by < 0), self.finished_by)


def run(algorithm: Algorithm, hosts: tuple[int, ...]) -> tuple[dict[tuple[int, int], Value], bool]:
    """Return the final values by rank and chunk, and True if every finisher sends its chunk.

    Only sends to another host count; one host needs none.
    """
    size = len(hosts)
    held: dict[tuple[int, Buffer, int], Value] = {}
    wires: dict[tuple[int, int], deque[Value]] = {}
    waiting = [deque(algorithm.steps(rank, size, 0, hosts)) for rank in range(size)]
    finished: dict[tuple[int, Buffer, int], bool] = {}
    moved = True
    while moved:
        moved = False
        for rank, steps in enumerate(waiting):
            while steps and step_once(rank, steps[0], hosts, held, wires, finished):
                steps.popleft()
                moved = True
    assert not any(waiting)
    ends = {
        (rank, chunk): value
        for (rank, buffer, chunk), value in held.items()
        if buffer in (Buffer.DATA, Buffer.OUTPUT)
    }
    return ends, all(finished.values()) or len(set(hosts)) == 1


def step_once(
    rank: int,
    step: Send | Recv | Copy | Finish,
    hosts: tuple[int, ...],
    held: dict[tuple[int, Buffer, int], Value],
    wires: dict[tuple[int, int], deque[Value]],
    finished: dict[tuple[int, Buffer, int], bool],
) -> bool:
    here = (rank, step.buffer, step.chunk)
    value = held.get(here, Value())
    if isinstance(step, Send):
        far = hosts[rank] != hosts[step.peer]
        wires.setdefault((rank, step.peer), deque()).append(value.encoded() if far else value)
        if far and here in finished:
            finished[here] = True
        return True
    if isinstance(step, Finish):
        held[here] = Value(value.n_encoded, rank)
        finished[here] = False
        return True
    if isinstance(step, Copy):
        here, arrived = (rank, step.into_buffer, step.into), value
    else:
        wire = wires.get((step.peer, rank))
        if not wire:
            return False
        arrived = wire.popleft()
    if step.fold:
        own = held.get(here, Value())
        arrived = Value(max(own.n_encoded, arrived.n_encoded))
    held[here] = arrived
    return True


def is_kept(collective: str, algorithm: Algorithm, hosts: tuple[int, ...]) -> bool:
    ends, is_sent = run(algorithm, hosts)
    if len(set(hosts)) == 1:
        return True
    are_equal = collective == "reduce_scatter" or (
        is_sent
        and all(
            len({ends[rank, chunk].finished_by for rank in range(len(hosts))}) == 1
            for _, chunk in ends
        )
    )
    return are_equal and all(value.n_encoded <= 1 for value in ends.values())


@pytest.mark.parametrize(
    ("collective", "name"),
    [(collective, name) for collective in NAMES for name in NAMES[collective]],
)
def test_encodes_once_is_true_exactly_for_algorithms_that_do(collective: str, name: str) -> None:
    algorithm = find(collective, name)
    layouts = [hosts for hosts in LAYOUTS if can_run(algorithm, hosts)]
    assert len(layouts) > 10
    assert algorithm.encodes_once == all(is_kept(collective, algorithm, h) for h in layouts)


def can_run(algorithm: Algorithm, hosts: tuple[int, ...]) -> bool:
    try:
        algorithm.n_chunks(len(hosts), numbered(hosts))
    except ValueError:
        return False
    return True
