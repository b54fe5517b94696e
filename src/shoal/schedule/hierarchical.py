"""Two levels: an all-reduce inside each host, and in its middle an all-reduce between the hosts.

If one rank finishes each chunk of an all-reduce, the steps up to its Finish are a reduce-scatter.
There each owner runs the other all-reduce with the owners of the same chunk on the other hosts, and
then sends the result to the rest of its host.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from shoal.errors import UsageError
from shoal.schedule.algorithm import Algorithm
from shoal.schedule.steps import Buffer, Copy, Finish, Recv, Send, Step


def hierarchical(local: Algorithm, across: Algorithm) -> Algorithm:
    """Reduce inside each host, all-reduce each rail between the hosts, gather inside each host.

    The buffer is cut into rails, as many as the largest host has owners of chunks. On a host with
    k of them, the j-th owner has the rails r for which r % k is j: owner j talks to owner j of
    hosts as large, and a small host's owners have several rails. Ring over ring is the 2-D ring;
    sharded over sharded is Fairring's.

    Args:
        local: an all-reduce with an `owner_rule`.
        across: any all-reduce; each rail takes the chunks and scratch that it needs.

    A sharded level has a stripe for each of its ranks, however short the buffer is.

    Cost:   the rounds of both; with h equal hosts of k ranks, each rank sends 2(k-1)/k of the
            buffer inside its host, and 1/k of what `across` sends for all of it between hosts.
    Needs:  rails times the chunks that `across` has for so many hosts.
    Leaves: every chunk folded over all ranks, on every rank. It is `local` itself where all ranks
            are on one host, `across` itself where no two are.
    Source: Jia et al. 2018 and Ying et al. 2018 (2-D ring); Fairring for sharded over sharded;
            hosts of different sizes are ours.

    Raises:
        UsageError: `local` has no owners.
    """
    if local.owner_rule is None or local.by_host or across.by_host:
        raise UsageError("inside a host, one rank alone must finish each chunk")
    return Algorithm(
        functools.partial(_steps, local, across),
        functools.partial(_chain, local, across),
        functools.partial(_chunks, local, across),
        functools.partial(_scratch, local, across),
        by_host=True,
        encodes_once=across.encodes_once,
        levels=(local, across),
        explained_by=hierarchical,
    )


class HostRanks(NamedTuple):
    """The ranks of one host, and the owners of its rails."""

    ranks: tuple[int, ...]
    owned: tuple[int, ...]
    """The chunks of the local algorithm, by their owner."""
    owners: tuple[int, ...]
    """The ranks that own them."""

    def owner(self, rail: int) -> int:
        """The rank that runs a rail for this host."""
        return self.owners[rail % len(self.owners)]

    def rails(self, chunk: int, n_rails: int) -> range:
        """The rails that a chunk of the local algorithm stands for."""
        return range(self.owned.index(chunk), n_rails, len(self.owned))


class Cut(NamedTuple):
    """The cut of the local algorithm's chunks into rails on one host."""

    team: HostRanks
    n_rails: int
    n_across: int
    """The chunks of each rail."""

    def rails(self, chunk: int) -> range:
        """The rails that a chunk of the local algorithm stands for."""
        return self.team.rails(chunk, self.n_rails)

    def chunks(self, chunk: int, first: int = 0) -> list[int]:
        """The chunks that it stands for, on each rail in a ring from `first` on."""
        turns = [(first + k) % self.n_across for k in range(self.n_across)]
        return [rail * self.n_across + turn for rail in self.rails(chunk) for turn in turns]


# For one group at a time; the halves of a split group may alternate.
@functools.lru_cache(maxsize=8)
def teams_of(local: Algorithm, hosts: tuple[int, ...]) -> tuple[HostRanks, ...]:
    """Return the teams of all hosts."""
    members: list[list[int]] = [[] for _ in range(max(hosts) + 1)]
    for rank, host in enumerate(hosts):
        members[host].append(rank)
    teams = []
    for ranks in members:
        owners = _owners(local, len(ranks))
        owned = tuple(sorted(range(len(owners)), key=owners.__getitem__))
        teams.append(HostRanks(tuple(ranks), owned, tuple(ranks[owners[chunk]] for chunk in owned)))
    return tuple(teams)


@functools.lru_cache(maxsize=256)
def _owners(local: Algorithm, size: int) -> tuple[int, ...]:
    """The owner of every chunk of the local algorithm."""
    owner_rule = local.owner_rule
    assert owner_rule is not None
    return tuple(owner_rule(chunk, size) for chunk in range(local.n_chunks(size)))


def _cut_of(teams: Sequence[HostRanks], host: int, across: Algorithm) -> Cut:
    """The cut of one host."""
    return Cut(teams[host], _n_rails(teams), across.n_chunks(len(teams)))


def _n_rails(teams: Sequence[HostRanks]) -> int:
    return max(len(team.owned) for team in teams)


def _only_level(
    local: Algorithm, across: Algorithm, teams: Sequence[HostRanks], size: int
) -> Algorithm | None:
    """The level that does it all: if all ranks are on one host, or no two are; else None."""
    return local if len(teams) == 1 else across if len(teams) == size else None


def _chunks(local: Algorithm, across: Algorithm, hosts: tuple[int, ...]) -> int:
    teams = teams_of(local, hosts)
    if only := _only_level(local, across, teams, len(hosts)):
        return only.n_chunks(len(hosts))
    return _n_rails(teams) * across.n_chunks(len(teams))


def _chain(
    local: Algorithm, across: Algorithm, hosts: tuple[int, ...]
) -> Sequence[tuple[int, int]]:
    """Half of the local chain in the largest host, the chain across on the first rail, the rest."""
    teams = teams_of(local, hosts)
    if only := _only_level(local, across, teams, len(hosts)):
        return only.chain(len(hosts))
    ranks = max((team.ranks for team in teams), key=len)
    inside = [(ranks[source], ranks[to]) for source, to in local.chain(len(ranks))]
    owners = [team.owner(0) for team in teams]
    rail = [(owners[source], owners[to]) for source, to in across.chain(len(teams))]
    return [*inside[: len(inside) // 2], *rail, *inside[len(inside) // 2 :]]


def _scratch(
    local: Algorithm, across: Algorithm, rank: int, hosts: tuple[int, ...]
) -> tuple[int, ...]:
    """Scratch chunks of `local`, cut as its chunks are, and those of `across` for each own rail."""
    teams = teams_of(local, hosts)
    if only := _only_level(local, across, teams, len(hosts)):
        return only.scratch(rank, len(hosts))
    cut, like = _cut_of(teams, hosts[rank], across), across.scratch(hosts[rank], len(teams))
    rails = [rail for rail in range(cut.n_rails) if cut.team.owner(rail) == rank]
    of_local = [chunk for _, chunk in _scratch_of_local(local, rank, cut)]
    return (*of_local, *(rail * cut.n_across + chunk for rail in rails for chunk in like))


def _scratch_of_local(local: Algorithm, rank: int, cut: Cut) -> list[tuple[int, int]]:
    """The scratch chunks of `local`, each with one of the chunks that its chunk stands for."""
    like = local.scratch(cut.team.ranks.index(rank), len(cut.team.ranks))
    return [(place, piece) for place, chunk in enumerate(like) for piece in cut.chunks(chunk)]


def _steps(
    local: Algorithm, across: Algorithm, rank: int, hosts: tuple[int, ...]
) -> Iterator[Step]:
    teams = teams_of(local, hosts)
    if only := _only_level(local, across, teams, len(hosts)):
        return only.steps(rank, len(hosts))
    return _both(local, across, rank, hosts[rank], teams)


def _both(
    local: Algorithm, across: Algorithm, rank: int, host: int, teams: Sequence[HostRanks]
) -> Iterator[Step]:
    """The local steps, each for all rails of its chunk; where they finish, the steps across."""
    cut = _cut_of(teams, host, across)
    scratch = _scratch_of_local(local, rank, cut)
    places = {pair: place for place, pair in enumerate(scratch)}
    n_scratch, n_used = len(across.scratch(host, len(teams))), len(scratch)
    steps = local.steps(cut.team.ranks.index(rank), len(cut.team.ranks))
    for finishes, run in itertools.groupby(steps, lambda step: isinstance(step, Finish)):
        if not finishes:
            yield from _inside(run, host, cut, places)
            continue
        # Two owners may have several rails in common, and must go through them in the same order.
        for rail in sorted(rail for step in run for rail in cut.rails(step.chunk)):
            owners = [other.owner(rail) for other in teams]
            first = {Buffer.DATA: rail * cut.n_across, Buffer.SCRATCH: n_used}
            n_used += n_scratch
            for far in across.steps(host, len(teams)):
                yield moved(far, owners, first)


def _inside(
    steps: Iterable[Step], host: int, cut: Cut, places: Mapping[tuple[int, int], int]
) -> Iterator[Step]:
    """Yield local steps, each for all pieces of its chunk."""
    for step in steps:
        own, saved = _data_and_scratch(step)
        # Hosts begin with different chunks, so that they do not all send to the same one.
        for chunk in cut.chunks(own, first=host):
            there = places[saved, chunk] if saved >= 0 else 0
            first = {Buffer.DATA: chunk - own, Buffer.SCRATCH: there - saved}
            yield moved(step, cut.team.ranks, first)


def _data_and_scratch(step: Step) -> tuple[int, int]:
    """The chunks of data and scratch that a local step names; -1 for no scratch."""
    if not isinstance(step, Copy):
        return step.chunk, -1
    data, scratch = step.chunk, step.into
    return (scratch, data) if step.buffer is Buffer.SCRATCH else (data, scratch)


def moved(step: Step, peers: Sequence[int], first: Mapping[Buffer, int]) -> Step:
    """Return a step with its peer taken from `peers` and its chunks moved by `first`."""
    chunk = first[step.buffer] + step.chunk
    if type(step) is Send:
        return Send(peers[step.peer], chunk, step.buffer)
    if type(step) is Recv:
        return Recv(peers[step.peer], chunk, step.fold, step.buffer)
    if type(step) is Copy:
        into = first[step.into_buffer] + step.into
        return Copy(chunk, into, step.buffer, step.into_buffer, step.fold)
    return Finish(chunk, step.buffer)
