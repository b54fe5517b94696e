"""Records the contents of every rank after every round of a schedule, and the messages."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from string import ascii_lowercase
from typing import Final, NamedTuple, TypeAlias

from shoal.analysis.dataflow import Dataflow
from shoal.analysis.prove.execute import Execution
from shoal.analysis.prove.prover import Schedule, prove
from shoal.analysis.prove.symbols import Expression, Symbols
from shoal.errors import UsageError
from shoal.schedule import Algorithm, Buffer, Contract, Place, Recv, find

RankPlace: TypeAlias = tuple[int, Place]


_MAX_STEPS: Final = 1_000_000
"""A ring of 500 ranks has this many steps, which take a minute."""


class Held(NamedTuple):
    """The value at a place: contributions of ranks to one chunk."""

    chunk: int
    ranks: tuple[int, ...]
    """The ranks in the order of folding: the held value comes before the value folded into it."""
    finished: bool = False

    def __str__(self) -> str:
        return "".join(f"{letter(self.chunk)}{rank}" for rank in self.ranks)


@dataclass(frozen=True, slots=True)
class Message:
    """One chunk from one rank to another."""

    sender: int
    receiver: int
    source: Place
    target: Place
    fold: bool
    """True if it is folded into the target's value, False if it replaces that value."""
    value: Held


@dataclass(frozen=True, slots=True)
class Round:
    """Messages whose steps have equally many transfers before them, and the values they leave."""

    messages: Sequence[Message]
    """The messages in the order of receipt. A message counts in the round in which it is received,
    even if it was sent in an earlier one because its receiver had to fold another message first."""
    writes: Mapping[RankPlace, Held]
    """The values changed in this round, also by the steps without a peer that follow from it."""


@dataclass(frozen=True, slots=True)
class Trace:
    """One schedule, run on symbols round by round. It has been proved."""

    collective: str
    name: str
    algorithm: Algorithm
    size: int
    root: int
    hosts: tuple[int, ...]
    contracts: Sequence[Contract]
    """The values of each rank before the first step, and the values required after the last."""
    places: Sequence[Sequence[Place]]
    """The places of each rank: every chunk of each of its buffers, scratch last."""
    rounds: Sequence[Round]
    """Round 0 has no messages, only the values at the start, including copies within a rank."""

    def states(self) -> Iterator[Mapping[RankPlace, Held]]:
        """Yield the value of every place after each round: one mapping, changed in between."""
        held: dict[RankPlace, Held] = {}
        for one in self.rounds:
            held.update(one.writes)
            yield held


def trace(
    collective: str, name: str, size: int, *, root: int = 0, hosts: Sequence[int] = ()
) -> Trace:
    """Prove one algorithm for one size of group, and return all its rounds.

    Raises as `prove`, and UsageError for more than a million steps. Takes about 50 us a step.
    """
    algorithm = find(collective, name)
    if size > 0:
        _check_length(algorithm, size, root, hosts)
    prove(collective, algorithm, size, root=root, hosts=hosts)
    whole = Schedule.of(collective, algorithm, size, root, hosts)
    pairs = zip(whole.contracts, whole.scratch, strict=True)
    return Trace(
        collective,
        name,
        algorithm,
        size,
        root,
        tuple(hosts) or (0,) * size,
        whole.contracts,
        [_places(contract, len(like)) for contract, like in pairs],
        list(_rounds(whole)),
    )


def letter(chunk: int) -> str:
    """Return a chunk's name: a, b, ... z, aa, ab, ..."""
    higher, last = divmod(chunk, len(ascii_lowercase))
    return (letter(higher - 1) if higher else "") + ascii_lowercase[last]


def _check_length(algorithm: Algorithm, size: int, root: int, hosts: Sequence[int]) -> None:
    every = (algorithm.steps(rank, size, root, hosts) for rank in range(size))
    # Every rank of a group does something, so more ranks have too many steps.
    if size > _MAX_STEPS or next(islice(chain.from_iterable(every), _MAX_STEPS, None), None):
        raise UsageError(
            f"{size} ranks are too many to trace: they do more than {_MAX_STEPS} steps in all"
        )


def _places(contract: Contract, n_scratch: int) -> list[Place]:
    n_chunks = {**contract.n_chunks, Buffer.SCRATCH: n_scratch}
    return [Place(buffer, c) for buffer in sorted(n_chunks) for c in range(n_chunks[buffer])]


def _rounds(whole: Schedule) -> Iterator[Round]:
    """Run the steps, and group their effects by round."""
    flow, symbols = Dataflow(whole.steps), Symbols(whole.is_idempotent)
    starts = whole.starts(flow, symbols)
    run = Execution(flow, symbols, starts, n_segments=1, window=1)
    run.run(newest_first=False)

    @functools.cache
    def held(symbol: int) -> Held:
        ranks = tuple(_in_order(symbols.expression[symbol]))
        return Held(symbols.chunk[symbol], ranks, symbols.finished[symbol])

    def named(number: int) -> RankPlace:
        return number % flow.size, flow.place(number)

    def message(step: int, recv: Recv) -> Message:
        source = flow.place(flow.reads[flow.partner_of[step]])
        receiver, target = named(flow.writes[step])
        return Message(recv.peer, receiver, source, target, recv.fold, held(run.given[step]))

    round_of = flow.rounds(run.order)
    steps: list[list[int]] = [[] for _ in range(max(round_of, default=0) + 1)]
    for step in run.order:
        steps[round_of[step]].append(step)
    changed = dict(starts)
    for of_round in steps:
        pairs = ((step, flow.steps[step]) for step in of_round)
        messages = [message(step, doing) for step, doing in pairs if isinstance(doing, Recv)]
        changed |= {flow.writes[step]: run.left[step] for step in of_round if step in run.left}
        yield Round(messages, {named(number): held(value) for number, value in changed.items()})
        changed = {}


def _in_order(expression: Expression) -> Iterator[int]:
    left = [expression]
    while left:
        first = left.pop()
        if isinstance(first, int):
            yield first
        else:
            left += reversed(first)
