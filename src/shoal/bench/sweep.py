"""The options of a run of `shoal bench`: calls, sizes, libraries, and the place of the ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from shoal.bench.collectives import COLLECTIVES
from shoal.bench.elements import ELEMENTS, OPERATIONS
from shoal.errors import UsageError
from shoal.plan.text import counted
from shoal.schedule import COLLECTIVES as ROWS

if TYPE_CHECKING:
    from shoal.bench.elements import ElementType

PEERS: Final = ("gloo",)
"""The libraries that can be measured beside shoal."""

ALL_RANKS: Final = -1
"""Every rank is the root once."""

# TCP's payload in a full Ethernet frame, which has 14 bytes of Ethernet, 20 of IP, and 20 of TCP
# with 12 of timestamps. A lab counts all of them.
_PAYLOAD: Final = 1448 / 1514
_MOST_SIZES: Final = 1000
_MOST_BYTES: Final = 64 << 30


@dataclass(frozen=True)
class SizeRange:
    """Sizes from the least to the most: by a factor if there is one, else by a step of bytes."""

    least: int = 32 << 20
    most: int = 32 << 20
    step: int = 1 << 20
    factor: int = 1

    def sizes(self) -> Sequence[int]:
        """Return all sizes, as nccl-tests counts them; UsageError for none or too many."""
        if not 0 < self.least <= self.most <= _MOST_BYTES:
            raise UsageError(
                f"sizes from {self.least} to {self.most} bytes: -b must be above 0 and at most -e, "
                f"and -e at most {_MOST_BYTES >> 30}G"
            )
        if self.factor < 1 or self.step < 1:
            raise UsageError(f"-i {self.step} -f {self.factor}: both must be at least 1")
        sizes: list[int] = []
        size = self.least
        while size <= self.most and len(sizes) <= _MOST_SIZES:
            sizes.append(size)
            size = size * self.factor if self.factor > 1 else size + self.step
        if len(sizes) > _MOST_SIZES:
            raise UsageError(
                f"more than {_MOST_SIZES} sizes from {self.least} to {self.most} bytes by steps of "
                f"{self.step}: take larger steps with -i, or multiply with -f 2"
            )
        return sizes


@dataclass(frozen=True)
class BenchPlace:
    """The place of the ranks: this host, the hosts of a lab, or where a launcher started them.

    Args:
        n_hosts: the number of hosts of a lab; 0: no lab.
        rate_mbit: the rate of the lab's NICs; None: unshaped.
        is_joined: this process is one of the ranks.
    """

    n_ranks: int
    n_hosts: int = 0
    rate_mbit: float | None = None
    is_joined: bool = False

    @property
    def facts(self) -> dict[str, str]:
        """The ranks and their network as text."""
        ranks = counted(self.n_ranks, "rank")
        if not self.n_hosts:
            return {"ranks": ranks}
        rate = self.rate_mbit
        nics = "unshaped NICs" if rate is None else f"NICs at {rate:g} Mbit/s"
        return {"ranks": f"{ranks} on {self.n_hosts} hosts of a lab", "network": nics}

    def least_time_s(self, collective: str, n_bytes: int) -> float | None:
        """Return the least time of a call, at the rate of TCP over the NICs; None if it is unknown.

        Whatever the algorithm, some bytes must cross a host's NIC. For collectives that are the
        same on all hosts, a host counts as a rank of `bus`.
        """
        row, n_on_host = COLLECTIVES[collective], self.n_ranks // max(self.n_hosts, 1)
        if self.n_hosts < 2 or self.rate_mbit is None or (row.in_pairs and n_on_host > 1):
            return None
        n_crossing = row.bus(self.n_hosts) * n_bytes * (n_on_host if row.each else 1)
        return n_crossing / (self.rate_mbit * 1e6 / 8 * _PAYLOAD)


@dataclass(frozen=True)
class Sweep:
    """One run.

    Args:
        library: the interface to shoal: "shoal" through torch, "group" on NumPy arrays.
        peers: the libraries to compare with, from `PEERS`.
        roots: ranks, or only `ALL_RANKS`.
        n_calls: timed calls at each size, over all rounds.
        n_warmup: calls before the first timed call.
        n_checks: calls with checked results.
        is_apart: a barrier precedes each call; else calls follow one another.
        answer_s: the limit in seconds for all calls of one round.
    """

    place: BenchPlace
    collectives: Sequence[str] = ("all_reduce",)
    sizes: SizeRange = SizeRange()
    elements: Sequence[ElementType] = (ELEMENTS["float32"],)
    operations: Sequence[str] = ("sum",)
    roots: Sequence[int] = (0,)
    n_calls: int = 20
    n_warmup: int = 5
    n_checks: int = 1
    is_apart: bool = False
    n_rounds: int = 5
    library: str = "shoal"
    peers: Sequence[str] = ()
    answer_s: float = 120.0

    def kinds(self) -> Iterator[CallKind]:
        """Yield every kind of call, as nccl-tests: by type, then by operation, then by root."""
        for name in self.collectives:
            row = COLLECTIVES[name]
            roots = range(self.place.n_ranks) if ALL_RANKS in self.roots else self.roots
            for element in self.elements:
                for op in self.operations if row.folds else ("",):
                    for root in roots if row.rooted else (-1,):
                        yield CallKind(name, element, op, root)


@dataclass(frozen=True)
class CallKind:
    """Calls of one kind, which differ only in size.

    `op` is shoal's name, empty if nothing is folded; `root` is -1 if there is no root.
    """

    collective: str
    element: ElementType
    op: str
    root: int

    @property
    def experiment(self) -> str:
        """The name of nccl-tests' program for this collective."""
        return f"{self.collective}_perf"

    @property
    def redop(self) -> str:
        """The operation's name in nccl-tests."""
        return OPERATIONS[self.op] if self.op else "none"

    def count(self, n_bytes: int, n_ranks: int) -> int:
        """Return the elements of one rank's block if there are blocks, else of the tensor."""
        n_elems = n_bytes // self.element.n_bytes
        return n_elems // n_ranks if COLLECTIVES[self.collective].cut else n_elems

    def fitting(self, sizes: Sequence[int], n_ranks: int) -> Sequence[int]:
        """Return the sizes, cut to whole elements or whole blocks; [0] for a barrier."""
        row = COLLECTIVES[self.collective]
        if row.in_pairs and n_ranks % 2:
            return []
        if self.collective in ROWS and not ROWS[self.collective].carries:
            return [0]
        unit = self.element.n_bytes * (n_ranks if row.cut else 1)
        return list(dict.fromkeys(size // unit * unit for size in sizes if size >= unit))
