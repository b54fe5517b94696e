"""Write the schedules of all algorithms and the contracts of collectives for the native tests.

The build of the tests runs it from the source alone: `PYTHONPATH=src python tests/programs.py
FILE`; with names such as tree:1024 after the file it writes all-reduces of larger groups.

A collective is one line; a schedule is one line with its name and a line per rank:

    collective NAME reads BLOCKS writes BLOCKS root WORD folds F
    program COLLECTIVE ALGORITHM size N root R hosts H chunks C uneven U
    LEAVES | SCRATCH | STEPS

F is `no`, `any` operation, or `max` where contributions may be folded in twice. H is the host of
every rank, or a dash if the algorithm ignores hosts; U is 1 if chunks, or blocks of ranks, may have
any lengths. LEAVES lists the required content of each chunk of the result: 0-3.2 is chunk 2 of the
contributions of ranks 0 to 3, with a final ! if it is finished. SCRATCH names for each scratch
chunk a chunk of the same length. A dash means an empty list. Buffers are letters:

    s2D0      send chunk 0 of DATA to rank 2
    r2D0 f2D0 receive it, or fold it
    cI0O3 a.. copy chunk 0 of INPUT into chunk 3 of OUTPUT, or fold it
    eD0       finish
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from shoal.schedule import ALGORITHMS, Algorithm, find
from shoal.schedule.collectives import COLLECTIVES, MESSAGE, Place, Value, contract_of
from shoal.schedule.steps import Buffer, Copy, Recv, Send, Step

# Powers of two, their neighbours and a larger prime.
SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 13)
ALL_ROOTS_UPTO = 5
ALL_HOSTS_OF = (2, 3, 4, 5, 8)
# Besides the table's algorithms: fewer reducers than ranks, and levels that differ.
MORE_ALL_REDUCES = ("sharded/tree", "ring/doubling", "tree/sharded")


# Every algorithm of the table, with its collective.
EVERY = [(collective, name) for collective, names in ALGORITHMS.items() for name in names]


def written(sizes: Iterable[int] = SIZES) -> Iterator[str]:
    """Return all lines."""
    yield from _collectives()
    for size in sizes:
        for collective, name in _names(size):
            algorithm = find(collective, name)
            for root in _roots(size) if algorithm.rooted else (0,):
                for hosts in _hosts(size) if algorithm.by_host else ((),):
                    yield from _program(collective, name, size, root, hosts)
        if size > 1:
            yield from _message(size)


def of_many_ranks(wanted: Iterable[str]) -> Iterator[str]:
    """Return all-reduces such as "tree:1024": an algorithm and the size of its group."""
    yield from _collectives()
    for name, size in (each.split(":") for each in wanted):
        yield from _program("all_reduce", name, int(size), 0, ())


def _collectives() -> Iterator[str]:
    for name, row in COLLECTIVES.items():
        folds = "max" if row.idempotent else "any" if row.folds else "no"
        blocks = f"reads {row.reads.name} writes {row.writes.name}"
        yield f"collective {name} {blocks} root {row.root.value or '-'} folds {folds}"
    yield f"collective {MESSAGE} reads NONE writes NONE root - folds no"


def _names(size: int) -> Iterator[tuple[str, str]]:
    yield from EVERY
    yield from (("all_reduce", name) for name in MORE_ALL_REDUCES if size > 1)


def _roots(size: int) -> Sequence[int]:
    return range(size) if size <= ALL_ROOTS_UPTO else (0, size // 2)


def _hosts(size: int) -> list[tuple[int, ...]]:
    """Return layouts of hosts: halves, all but one on the first, one host per two, alternating."""
    halves = tuple(int(rank >= size // 2) for rank in range(size)) if size > 1 else (0,)
    first = (*(0 for _ in range(size - 1)), int(size > 1))
    pairs = tuple(rank // 2 for rank in range(size))
    turns = tuple(rank % 2 for rank in range(size))
    layouts = (halves, first, pairs, turns)
    return list(dict.fromkeys(layouts if size in ALL_HOSTS_OF else (halves,)))


def _program(
    collective: str, name: str, size: int, root: int, hosts: tuple[int, ...]
) -> Iterator[str]:
    algorithm = find(collective, name)
    # If only two ranks know a block's length, a list of one length per rank cannot express it.
    uneven = algorithm.takes_uneven and not COLLECTIVES[collective].by_pair
    yield _title(collective, name, size, root, hosts, algorithm, uneven)
    n_chunks = algorithm.n_chunks(size, hosts)
    for rank in range(size):
        leaves = contract_of(collective, rank, size, n_chunks, root).postcondition
        scratch = algorithm.scratch(rank, size, hosts, root)
        yield _rank(leaves.values(), scratch, algorithm.steps(rank, size, root, hosts))


def _message(size: int) -> Iterator[str]:
    """Return a message from rank 0 to the last one: both halves, and nothing for the others."""
    send, recv = find(MESSAGE, "send"), find(MESSAGE, "recv")
    yield _title(MESSAGE, "both", size, 0, (), send, True)
    yield _rank([Value(range(1), 0)], (), send.steps(0, size, size - 1))
    for rank in range(1, size - 1):
        yield _rank([Value(range(rank, rank + 1), 0)], (), ())
    yield _rank([Value(range(1), 0)], (), recv.steps(size - 1, size, 0))


def _title(
    collective: str,
    name: str,
    size: int,
    root: int,
    hosts: tuple[int, ...],
    algorithm: Algorithm,
    uneven: bool,
) -> str:
    named = ",".join(map(str, hosts)) or "-"
    return (
        f"program {collective} {name} size {size} root {root} hosts {named} "
        f"chunks {algorithm.n_chunks(size, hosts)} uneven {int(uneven)}"
    )


def _rank(leaves: Iterable[Value], scratch: Sequence[int], steps: Iterable[Step]) -> str:
    values = (f"{v.ranks[0]}-{v.ranks[-1]}.{v.chunk}{'!' if v.finished else ''}" for v in leaves)
    parts = (" ".join(values), ",".join(map(str, scratch)), " ".join(map(_step, steps)))
    return " | ".join(part or "-" for part in parts)


def _step(step: Step) -> str:
    here = _place(Place(step.buffer, step.chunk))
    if isinstance(step, Send):
        return f"s{step.peer}{here}"
    if isinstance(step, Recv):
        return f"{'f' if step.fold else 'r'}{step.peer}{here}"
    if isinstance(step, Copy):
        return f"{'a' if step.fold else 'c'}{here}{_place(Place(step.into_buffer, step.into))}"
    return f"e{here}"


def _place(place: Place) -> str:
    return f"{Buffer(place.buffer).name[0]}{place.chunk}"


if __name__ == "__main__":
    lines = of_many_ranks(sys.argv[2:]) if len(sys.argv) > 2 else written()
    Path(sys.argv[1]).write_text("".join(line + "\n" for line in lines))
