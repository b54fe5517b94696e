"""The contents of every rank after every round of a schedule, and the messages in between."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from string import ascii_lowercase
from typing import Final, NamedTuple, TypeAlias

from shoal.analysis.dataflow import Dataflow
from shoal.analysis.prove.execute import Execution
from shoal.analysis.prove.prover import prove
from shoal.analysis.prove.symbols import Expression, Symbols
from shoal.errors import UsageError
from shoal.schedule import Algorithm, Buffer, Contract, Copy, Place, Recv, Send, contract_of, find

RankPlace: TypeAlias = tuple[int, Place]


_MAX_STEPS: Final = 1_000_000
"""A minute's work. A ring of 500 ranks has as many."""


class Held(NamedTuple):
    """The value at a place: contributions of ranks to one chunk."""

    chunk: int
    ranks: tuple[int, ...]
    """In the order of their folding: the held value comes before the value folded into it."""
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
    """True if it is folded into the target's value, False if it replaces that."""
    value: Held


@dataclass(frozen=True, slots=True)
class Round:
    """The messages whose steps have equally many transfers before them, and what they leave."""

    messages: Sequence[Message]
    """In the order in which they are received. A message that left in an earlier round, because
    its receiver has to fold another one first, is counted here, where it is received."""
    writes: Mapping[RankPlace, Held]
    """What changes in this round, also by the steps without a peer that follow from it."""


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
    """By rank: what it starts with and what it must end with."""
    places: Sequence[Sequence[Place]]
    """By rank: every chunk of every buffer it has, scratch last."""
    rounds: Sequence[Round]
    """Round 0 has no messages: what every rank starts with, copies within it included."""

    def states(self) -> Iterator[Mapping[RankPlace, Held]]:
        """Yield the value of every place after each round: one mapping, changed in between."""
        held: dict[RankPlace, Held] = {}
        for one in self.rounds:
            held.update(one.writes)
            yield held


def trace(
    collective: str, name: str, size: int, *, root: int = 0, hosts: Sequence[int] = ()
) -> Trace:
    """Prove one algorithm for one size of group, and return what happens in every round.

    Raises as `prove`, and UsageError for more than a million steps. About 50 us for each step.
    """
    algorithm = find(collective, name)
    if size > 0:
        _check_length(algorithm, size, root, hosts)
    prove(collective, algorithm, size, root=root, hosts=hosts)
    n_chunks = algorithm.n_chunks(size, hosts)
    contracts = [
        contract_of(collective, rank, size, n_chunks, root, algorithm.n_servers)
        for rank in range(size)
    ]
    n_scratch = [len(algorithm.scratch(rank, size, hosts, root)) for rank in range(size)]
    schedule = [list(algorithm.steps(rank, size, root, hosts)) for rank in range(size)]
    return Trace(
        collective,
        name,
        algorithm,
        size,
        root,
        tuple(hosts) or (0,) * size,
        contracts,
        [_places(contract, n) for contract, n in zip(contracts, n_scratch, strict=True)],
        list(_Replay(Dataflow(schedule), contracts).rounds()),
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


class _Replay:
    """Does the steps again, those of one round after those of the round before."""

    def __init__(self, flow: Dataflow, contracts: Sequence[Contract]) -> None:
        idempotent = any(contract.idempotent for contract in contracts)
        self._flow, self._symbols = flow, Symbols(idempotent)
        self._held = {
            flow.number(rank, place): self._symbols.own(value.ranks.start, value.chunk)
            for rank, contract in enumerate(contracts)
            for place, value in contract.precondition.items()
        }
        self._on_the_way: dict[int, int] = {}
        self._known: dict[int, Held] = {}

    def rounds(self) -> Iterator[Round]:
        flow = self._flow
        execution = Execution(flow, self._symbols, self._held, n_segments=1, window=1)
        execution.run(newest_first=False)
        round_of = flow.rounds(execution.order)
        steps: list[list[int]] = [[] for _ in range(max(round_of, default=0) + 1)]
        for step in execution.order:
            steps[round_of[step]].append(step)
        changed = set(self._held)
        for of_round in steps:
            messages = [m for m in map(self._do, of_round) if m]
            changed.update(flow.writes[step] for step in of_round if flow.writes[step] >= 0)
            yield Round(messages, {self._named(n): self._value(self._held[n]) for n in changed})
            changed.clear()

    def _do(self, step: int) -> Message | None:
        """Do one step; a Recv is the message that it receives."""
        flow, doing = self._flow, self._flow.steps[step]
        reads, writes = flow.reads[step], flow.writes[step]
        if isinstance(doing, Send):
            self._on_the_way[flow.partner_of[step]] = self._held[reads]
            return None
        if isinstance(doing, Recv):
            value = self._on_the_way.pop(step)
        elif isinstance(doing, Copy):
            value = self._held[reads]
        else:
            value = self._symbols.finish(self._held[writes])
        folds = isinstance(doing, Recv | Copy) and doing.fold
        self._held[writes] = self._symbols.fold(self._held[writes], value) if folds else value
        if not isinstance(doing, Recv):
            return None
        source = flow.place(flow.reads[flow.partner_of[step]])
        receiver, target = self._named(writes)
        return Message(doing.peer, receiver, source, target, doing.fold, self._value(value))

    def _named(self, number: int) -> RankPlace:
        return number % self._flow.size, self._flow.place(number)

    def _value(self, symbol: int) -> Held:
        if symbol not in self._known:
            symbols = self._symbols
            ranks = tuple(_in_order(symbols.expression[symbol]))
            self._known[symbol] = Held(symbols.chunk[symbol], ranks, symbols.finished[symbol])
        return self._known[symbol]


def _in_order(expression: Expression) -> Iterator[int]:
    left = [expression]
    while left:
        first = left.pop()
        if isinstance(first, int):
            yield first
        else:
            left += reversed(first)
