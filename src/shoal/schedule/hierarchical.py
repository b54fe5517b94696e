"""Two levels: an all-reduce inside each host, and in its middle an all-reduce between the hosts.

If one rank finishes each chunk of an all-reduce, the steps up to its Finish are a reduce-scatter.
There each owner runs the other all-reduce with the owners of the same chunk on the other hosts, and
then sends the result to the rest of its host.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from shoal.errors import UsageError
from shoal.schedule.algorithm import Algorithm
from shoal.schedule.steps import Buffer, Copy, Finish, Recv, Send, Step


def hierarchical(local: Algorithm, across: Algorithm) -> Algorithm:
    """Reduce inside each host, all-reduce each rail between the hosts, gather inside each host.

    The buffer is cut into one rail for each owner of chunks on the largest host. On a host with k
    owners, owner j has the rails r with r % k = j: it communicates with owner j of hosts of the
    same size, and a small host's owners have several rails. Ring over ring is the 2-D ring; sharded
    over sharded is Fairring's algorithm.

    Args:
        local: an all-reduce with an `owner_rule` and without scratch.
        across: any all-reduce; each rail takes the chunks and scratch that it needs.

    A sharded level has a stripe for each of its ranks, however short the buffer is.

    Cost:   the rounds of both; with h equal hosts of k ranks, each rank sends 2(k-1)/k of the
            buffer inside its host, and 1/k of what `across` sends for all of it between hosts.
    Needs:  rails times the chunks of `across` for that number of hosts.
    Leaves: every chunk folded over all ranks, on every rank. It is `local` itself if all ranks
            share one host, `across` itself if no two ranks share one.
    Source: Jia et al. 2018 and Ying et al. 2018 (2-D ring); Fairring for sharded over sharded;
            hosts of different sizes are ours.

    Raises:
        UsageError: `local` has no owners.
    """
    if local.owner_rule is None or not local.takes_uneven or local.by_host or across.by_host:
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
    """The ranks that own these chunks."""
    n_rails: int
    """The rails of the whole group: the number of owners on the largest host."""

    def owner(self, rail: int) -> int:
        """Return the rank that runs a rail for this host."""
        return self.owners[rail % len(self.owners)]

    def rails(self, chunk: int) -> range:
        """Return the rails that a chunk of the local algorithm consists of."""
        return range(self.owned.index(chunk), self.n_rails, len(self.owned))


# Usually for one group at a time; the halves of a split group may alternate.
@functools.lru_cache(maxsize=8)
def teams_of(local: Algorithm, hosts: tuple[int, ...]) -> tuple[HostRanks, ...]:
    """Return the teams of all hosts."""
    members: list[list[int]] = [[] for _ in range(max(hosts) + 1)]
    for rank, host in enumerate(hosts):
        members[host].append(rank)
    n_rails = max(len(_owners(local, len(ranks))) for ranks in members)
    teams = []
    for ranks in members:
        owners = _owners(local, len(ranks))
        owned = tuple(sorted(range(len(owners)), key=owners.__getitem__))
        of_chunks = tuple(ranks[owners[chunk]] for chunk in owned)
        teams.append(HostRanks(tuple(ranks), owned, of_chunks, n_rails))
    return tuple(teams)


@functools.lru_cache(maxsize=256)
def _owners(local: Algorithm, size: int) -> tuple[int, ...]:
    owner_rule = local.owner_rule
    assert owner_rule is not None
    return tuple(owner_rule(chunk, size) for chunk in range(local.n_chunks(size)))


def _only_level(
    local: Algorithm, across: Algorithm, teams: Sequence[HostRanks], size: int
) -> Algorithm | None:
    """Return the only level if all ranks share one host, or no two ranks share one; else None."""
    return local if len(teams) == 1 else across if len(teams) == size else None


def _chunks(local: Algorithm, across: Algorithm, hosts: tuple[int, ...]) -> int:
    teams = teams_of(local, hosts)
    if only := _only_level(local, across, teams, len(hosts)):
        return only.n_chunks(len(hosts))
    return teams[0].n_rails * across.n_chunks(len(teams))


def _chain(
    local: Algorithm, across: Algorithm, hosts: tuple[int, ...]
) -> Sequence[tuple[int, int]]:
    """Return the local chain's first half, the first rail's chain across, and the local rest."""
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
    """Return the scratch chunks of `across` for each of the rank's rails."""
    teams = teams_of(local, hosts)
    if only := _only_level(local, across, teams, len(hosts)):
        return only.scratch(rank, len(hosts))
    like, n_across = across.scratch(hosts[rank], len(teams)), across.n_chunks(len(teams))
    team = teams[hosts[rank]]
    rails = [rail for rail in range(team.n_rails) if team.owner(rail) == rank]
    return tuple(rail * n_across + chunk for rail in rails for chunk in like)


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
    """Yield local steps, each for all rails of its chunk, and at their Finish the steps across."""
    team, n_across = teams[host], across.n_chunks(len(teams))
    n_scratch, n_used = len(across.scratch(host, len(teams))), 0
    steps = local.steps(team.ranks.index(rank), len(team.ranks))
    for finishes, run in itertools.groupby(steps, lambda step: isinstance(step, Finish)):
        if not finishes:
            for step in run:
                for rail in team.rails(step.chunk):
                    # Hosts begin with different chunks, so that they do not all send to one host.
                    for turn in range(host, host + n_across):
                        there = rail * n_across + turn % n_across
                        yield moved(step, team.ranks, {Buffer.DATA: there - step.chunk})
            continue
        # Two owners may have several rails in common, and must go through them in the same order.
        for rail in sorted(rail for step in run for rail in team.rails(step.chunk)):
            owners = [other.owner(rail) for other in teams]
            first = {Buffer.DATA: rail * n_across, Buffer.SCRATCH: n_used}
            n_used += n_scratch
            for far in across.steps(host, len(teams)):
                yield moved(far, owners, first)


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
