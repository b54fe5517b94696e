"""Writes the programs of all algorithms to `native/test/programs.txt`, for the native tests.

`make programs` runs it; `contract/test_programs.py` fails where the file is not what it writes.

A program is one line that names it and a line for each rank:

    program COLLECTIVE ALGORITHM size N root R hosts H chunks C uneven U
    SCRATCH | STEPS without Finish | STEPS with it, where there is any

H is the host of every rank, a dash where the algorithm does not ask; U is 1 where blocks or chunks
may differ in any way; SCRATCH names for each scratch chunk the chunk that is as long, or a dash.
Buffers are letters (D, I, O, S). `<` begins how many steps before this one those are that it waits
for. A version is named only where it is an earlier send's:

    s2D0v1    send chunk 0 of DATA to rank 2, the very value that was the second to be sent
    r2D0 f2D0 receive it, or fold it
    cI0O3 a.. copy chunk 0 of INPUT into chunk 3 of OUTPUT, or fold it
    eD0       finish
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from shoal.engine import Row, rows_of
from shoal.schedule import ALGORITHMS, MESSAGE, Algorithm, Finish, Step, find

FILE = Path(__file__).parent.parent / "native" / "test" / "programs.txt"

# Powers of two, their neighbours and a larger prime.
SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 13)
ALL_ROOTS_UPTO = 5
ALL_HOSTS_OF = (2, 3, 4, 5, 8)
# Besides those of the table: reducers that are fewer than ranks, and levels that differ.
MORE_ALL_REDUCES = ("sharded(2)", "sharded/tree", "ring/doubling", "tree/sharded")

_LETTERS = "DIOS"


def written(sizes: Iterable[int] = SIZES) -> str:
    """The whole file."""
    return "".join(line + "\n" for size in sizes for line in _of_size(size))


def of_many_ranks(wanted: Iterable[str]) -> str:
    """All-reduces such as "tree:1024": an algorithm and the size of its group."""
    pairs = [each.split(":") for each in wanted]
    programs = (_program("all_reduce", name, int(size), 0, ()) for name, size in pairs)
    return "".join(line + "\n" for program in programs for line in program)


def _of_size(size: int) -> Iterator[str]:
    for collective, name in _names(size):
        algorithm = find(collective, name)
        for root in _roots(size) if algorithm.rooted else (0,):
            for hosts in _hosts(size) if algorithm.by_host else ((),):
                yield from _program(collective, name, size, root, hosts)
    if size > 1:
        yield from _message(size)


def _names(size: int) -> Iterator[tuple[str, str]]:
    for collective, algorithms in ALGORITHMS.items():
        yield from ((collective, name) for name in algorithms)
    yield from (("all_reduce", name) for name in MORE_ALL_REDUCES if size > 1)


def _roots(size: int) -> Sequence[int]:
    return range(size) if size <= ALL_ROOTS_UPTO else (0, size // 2)


def _hosts(size: int) -> list[tuple[int, ...]]:
    """Layouts of hosts: halves, all but one on the first, a host for every two, alternating."""
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
    yield _title(collective, name, size, root, hosts, algorithm)
    for rank in range(size):
        steps = list(algorithm.steps(rank, size, root, hosts))
        yield _rank(steps, algorithm.scratch(rank, size, hosts, root))


def _message(size: int) -> Iterator[str]:
    """A message from rank 0 to the last one: both halves, and nothing for the others."""
    send, recv = find(MESSAGE, "send"), find(MESSAGE, "recv")
    yield _title(MESSAGE, "both", size, 0, (), send)
    for rank in range(size):
        steps: Iterable[Step] = ()
        if rank == 0:
            steps = send.steps(rank, size, size - 1)
        elif rank == size - 1:
            steps = recv.steps(rank, size, 0)
        yield _rank(list(steps), ())


def _title(
    collective: str,
    name: str,
    size: int,
    root: int,
    hosts: tuple[int, ...],
    algorithm: Algorithm,
) -> str:
    named = ",".join(map(str, hosts)) or "-"
    chunks, uneven = algorithm.n_chunks(size, hosts), int(algorithm.takes_uneven)
    return (
        f"program {collective} {name} size {size} root {root} hosts {named} "
        f"chunks {chunks} uneven {uneven}"
    )


def _rank(steps: list[Step], scratch: Sequence[int]) -> str:
    parts = [",".join(map(str, scratch)) or "-", _steps(rows_of(steps, finish=False))]
    if any(isinstance(step, Finish) for step in steps):
        parts.append(_steps(rows_of(steps)))
    return " | ".join(parts)


def _steps(rows: list[Row]) -> str:
    texts, n_versions = [], 0
    for at, row in enumerate(rows):
        kind, fold, buffer, into_buffer, peer, chunk, into, version, waits_for = row
        here = f"{_LETTERS[buffer]}{chunk}"
        is_new = kind == 0 and version == n_versions
        n_versions += is_new
        text = (
            f"s{peer}{here}" + ("" if is_new else f"v{version}"),
            f"{'f' if fold else 'r'}{peer}{here}",
            f"{'a' if fold else 'c'}{here}{_LETTERS[into_buffer]}{into}",
            f"e{here}",
        )[kind]
        back = ",".join(str(at - before) for before in waits_for)
        texts.append(f"{text}<{back}" if back else text)
    return " ".join(texts) or "-"


if __name__ == "__main__":
    if len(sys.argv) > 2:  # another file, for larger groups
        Path(sys.argv[1]).write_text(of_many_ranks(sys.argv[2:]))
    else:
        FILE.write_text(written())
