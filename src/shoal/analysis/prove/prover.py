"""Proves that a schedule keeps its collective's contract, by running it on symbols.

All ranks' steps run under the engine's own rules, with a symbol for each rank's contribution in
place of numbers. A proved schedule is right for every tensor of every length:

- every place of the postcondition ends with exactly the required value, each contribution folded
  in once, and finished once. If several ranks end with the same value, all of them fold it in the
  same order, so they end with the same bits. Neither holds for a barrier, whose fold is idempotent;
- INPUT is never written, every chunk that a step names exists, and no chunk gets a value of another
  length. Without scratch this holds for blocks of any lengths;
- every Send meets a Recv, and no step waits forever, with `window` segments staged per Send. A
  schedule proved with window 0, without any staging, cannot hang with a larger window: staging only
  lets a Send end earlier.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shoal.analysis.dataflow import Dataflow
from shoal.analysis.prove.execute import Execution
from shoal.analysis.prove.symbols import Expression, Symbols, mask_of
from shoal.errors import ProofError, UsageError
from shoal.schedule import Algorithm, Buffer, Contract, Place, Send, Step, Value, contract_of, find


@dataclass(frozen=True, slots=True)
class Proof:
    """The properties of a proved schedule."""

    n_sent: Mapping[tuple[int, int], int]
    """The chunks over the link from one rank to another; idle links are not named."""
    rounds: int
    """Transfers in the longest chain in which each waits for the end of the one before it."""
    max_staged: int
    """The most segments that one rank had to stage at once, in the orders that were tried."""
    expressions: Mapping[tuple[int, Place], Expression]
    """The order in which contributions were folded, by rank and place of the postcondition."""


class Schedule(NamedTuple):
    """The steps, contracts and scratch chunks of all ranks, by rank."""

    steps: Sequence[Sequence[Step]]
    contracts: Sequence[Contract]
    scratch: Sequence[Sequence[int]] = ()

    @classmethod
    def of(
        cls, collective: str, algorithm: Algorithm, size: int, root: int, hosts: Sequence[int]
    ) -> Schedule:
        """Return the schedule of an algorithm for one size of group."""
        ranks, n_chunks = range(size), algorithm.n_chunks(size, hosts)
        n_servers = algorithm.n_servers
        return cls(
            [list(algorithm.steps(rank, size, root, hosts)) for rank in ranks],
            [contract_of(collective, rank, size, n_chunks, root, n_servers) for rank in ranks],
            [algorithm.scratch(rank, size, hosts, root) for rank in ranks],
        )

    @property
    def is_idempotent(self) -> bool:
        """True if a contribution may be folded in several times."""
        return any(contract.idempotent for contract in self.contracts)

    def starts(self, flow: Dataflow, symbols: Symbols) -> dict[int, int]:
        """Return the value of each place before the first step, by its number in the dataflow."""
        return {
            flow.number(rank, place): symbols.own(value.ranks.start, value.chunk)
            for rank, contract in enumerate(self.contracts)
            for place, value in contract.precondition.items()
        }


def prove(
    collective: str,
    algorithm: str | Algorithm,
    size: int,
    *,
    root: int = 0,
    hosts: Sequence[int] = (),
    n_segments: int = 2,
    window: int = 1,
) -> Proof:
    """Prove one algorithm for one size of group.

    Args:
        algorithm: the name of one of `ALGORITHMS[collective]`, or another algorithm.
        n_segments: the number of segments of each chunk.
        window: the segments of one Send that may wait in the receiver's staging memory.

    Raises:
        ProofError: the schedule is wrong. The message names the rank, the step and the chunk.
        UsageError: there is no such algorithm, or numbers are out of range. The two halves of
            `send_recv` are run by two ranks: use `prove_steps`.

    Cost: about 10 us for each step of each rank and segment.
    """
    if size < 1 or not 0 <= root < size:
        raise UsageError(f"cannot prove a group of {size} ranks with root {root}")
    if isinstance(algorithm, str):
        algorithm = find(collective, algorithm)
    whole = Schedule.of(collective, algorithm, size, root, hosts)
    return prove_steps(*whole, n_segments=n_segments, window=window)


def prove_steps(
    schedule: Sequence[Sequence[Step]],
    contracts: Sequence[Contract],
    scratch: Sequence[Sequence[int]] = (),
    *,
    n_segments: int = 2,
    window: int = 1,
) -> Proof:
    """Prove a schedule given rank by rank, like `prove`; `scratch` names each rank's chunks."""
    if len(schedule) != len(contracts) or n_segments < 1 or window < 0:
        raise UsageError(
            f"cannot prove {len(schedule)} ranks with {len(contracts)} contracts, "
            f"{n_segments} segments and window {window}"
        )
    whole = Schedule(schedule, contracts, scratch or [()] * len(contracts))
    flow, symbols = Dataflow(schedule), Symbols(whole.is_idempotent)
    _check_places(flow, contracts, whole.scratch)
    starts = whole.starts(flow, symbols)
    fits = _fits(flow, contracts, whole.scratch)
    oldest, newest = (Execution(flow, symbols, starts, n_segments, window, fits) for _ in range(2))
    oldest.run(newest_first=False)
    newest.run(newest_first=True)
    for held in oldest.held:
        _check_ends(flow, symbols, contracts, held)
    if oldest.held != newest.held:
        raise ProofError("the result depends on which of the ready steps is taken first")
    return Proof(
        n_sent=_count_sent(flow),
        rounds=max(flow.rounds(oldest.order), default=0),
        max_staged=max(oldest.max_staged, newest.max_staged),
        expressions={
            (rank, place): symbols.expression[oldest.held[0][flow.number(rank, place)]]
            for rank, contract in enumerate(contracts)
            for place in contract.postcondition
        },
    )


def _check_places(
    flow: Dataflow, contracts: Sequence[Contract], scratch: Sequence[Sequence[int]]
) -> None:
    n_chunks = [
        {**contract.n_chunks, Buffer.SCRATCH: len(like)}
        for contract, like in zip(contracts, scratch, strict=True)
    ]
    good: set[int] = set()
    for step, (reads, writes) in enumerate(zip(flow.reads, flow.writes, strict=True)):
        if writes >= 0 and flow.place(writes).buffer is Buffer.INPUT:
            raise ProofError(f"{flow.name(step)}: writes INPUT")
        for number in (reads, writes):
            if number < 0 or number in good:
                continue
            place = flow.place(number)
            if place.chunk >= n_chunks[flow.rank_of[step]].get(place.buffer, 0):
                raise ProofError(f"{flow.name(step)}: there is no such chunk")
            good.add(number)


def _fits(
    flow: Dataflow, contracts: Sequence[Contract], scratch: Sequence[Sequence[int]]
) -> Mapping[int, Value]:
    """Return by place the value that fixes its length: its final block, or a chunk of any ranks.

    Scratch chunks for blocks are not named: an algorithm with such chunks needs equal blocks.
    """
    fits = {}
    everyone = range(len(contracts))
    has_data = any(contract.n_chunks.get(Buffer.DATA) for contract in contracts)
    for rank, (contract, like) in enumerate(zip(contracts, scratch, strict=True)):
        n_data = contract.n_chunks.get(Buffer.DATA, 0)
        places = {Place(Buffer.DATA, chunk): chunk for chunk in range(n_data)}
        if has_data:
            places |= {Place(Buffer.SCRATCH, place): chunk for place, chunk in enumerate(like)}
        for place, chunk in places.items():
            fits[flow.number(rank, place)] = Value(everyone, chunk)
        for place, value in contract.postcondition.items():
            if place.buffer is Buffer.OUTPUT:
                fits[flow.number(rank, place)] = value
    return fits


def _check_ends(
    flow: Dataflow, symbols: Symbols, contracts: Sequence[Contract], held: Mapping[int, int]
) -> None:
    first: dict[Value, tuple[int, int]] = {}
    for rank, contract in enumerate(contracts):
        for place, want in contract.postcondition.items():
            where = f"rank {rank} {place.buffer.name}[{place.chunk}]"
            got = held.get(flow.number(rank, place))
            if got is None:
                raise ProofError(f"{where}: nothing was ever written there")
            _check_value(where, symbols, got, want)
            first_rank, first_got = first.setdefault(want, (rank, got))
            if got != first_got and not contract.idempotent:
                raise ProofError(f"{where}: folded in another order than on rank {first_rank}")


def _check_value(where: str, symbols: Symbols, got: int, want: Value) -> None:
    if symbols.ranks[got] != mask_of(want.ranks) or symbols.chunk[got] != want.chunk:
        ranks = ", ".join(map(str, want.ranks))
        raise ProofError(
            f"{where}: holds {symbols.name(got)}, not chunk {want.chunk} of rank {ranks}"
        )
    if symbols.finished[got] != want.finished:
        raise ProofError(f"{where}: {'never' if want.finished else 'should not be'} finished")


def _count_sent(flow: Dataflow) -> Mapping[tuple[int, int], int]:
    ends = zip(flow.rank_of, flow.steps, strict=True)
    return Counter((rank, step.peer) for rank, step in ends if isinstance(step, Send))
