"""Two levels in one: an all-reduce inside each host, and in its middle one between the hosts.

An all-reduce in which every chunk is finished by one rank is over for that rank at its Finish, as a
reduce-scatter is. There each owner runs the other all-reduce with the owners of the same chunk on
the other hosts, and then goes on to tell the rest of its host.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
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
        raise UsageError("inside a host, every chunk must be finished by one rank alone")
    return Algorithm(
        functools.partial(_steps, local, across),
        functools.partial(_chunks, local, across),
        functools.partial(_scratch, local, across),
        by_host=True,
        explained_by=hierarchical,
    )


class _Team(NamedTuple):
    """The ranks of one host, and which of them owns which rail."""

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


# Of one group at a time; the two sides of a group that is split may alternate.
@functools.lru_cache(maxsize=8)
def _teams(local: Algorithm, hosts: tuple[int, ...]) -> tuple[_Team, ...]:
    """The teams of all hosts."""
    members: list[list[int]] = [[] for _ in range(max(hosts) + 1)]
    for rank, host in enumerate(hosts):
        members[host].append(rank)
    teams = []
    for ranks in members:
        owners = _owners(local, len(ranks))
        owned = tuple(sorted(range(len(owners)), key=owners.__getitem__))
        teams.append(_Team(tuple(ranks), owned, tuple(ranks[owners[chunk]] for chunk in owned)))
    return tuple(teams)


@functools.lru_cache(maxsize=256)
def _owners(local: Algorithm, size: int) -> tuple[int, ...]:
    """The owner of every chunk of the local algorithm."""
    owner_rule = local.owner_rule
    assert owner_rule is not None
    return tuple(owner_rule(chunk, size) for chunk in range(local.n_chunks(size)))


def _n_rails(teams: Sequence[_Team]) -> int:
    return max(len(team.owned) for team in teams)


def _chunks(local: Algorithm, across: Algorithm, hosts: tuple[int, ...]) -> int:
    teams = _teams(local, hosts)
    if len(teams) == 1:
        return local.n_chunks(len(hosts))
    if len(teams) == len(hosts):
        return across.n_chunks(len(hosts))
    return _n_rails(teams) * across.n_chunks(len(teams))


def _scratch(
    local: Algorithm, across: Algorithm, rank: int, hosts: tuple[int, ...]
) -> tuple[int, ...]:
    """Scratch chunks of `across`, once for each rail of this rank."""
    teams = _teams(local, hosts)
    if len(teams) == 1:
        return ()
    if len(teams) == len(hosts):
        return across.scratch(rank, len(hosts))
    like, n_across = across.scratch(hosts[rank], len(teams)), across.n_chunks(len(teams))
    rails = [r for r in range(_n_rails(teams)) if teams[hosts[rank]].owner(r) == rank]
    return tuple(rail * n_across + chunk for rail in rails for chunk in like)


def _steps(
    local: Algorithm, across: Algorithm, rank: int, hosts: tuple[int, ...]
) -> Iterator[Step]:
    teams = _teams(local, hosts)
    if len(teams) == 1:
        return local.steps(rank, len(hosts))
    if len(teams) == len(hosts):
        return across.steps(rank, len(hosts))
    return _both(local, across, rank, hosts[rank], teams)


def _both(
    local: Algorithm, across: Algorithm, rank: int, host: int, teams: Sequence[_Team]
) -> Iterator[Step]:
    """The local steps, each for all rails of its chunk; where they finish, the steps across."""
    team, n_rails, n_across = teams[host], _n_rails(teams), across.n_chunks(len(teams))
    n_scratch, n_owned = len(across.scratch(host, len(teams))), 0
    for step in local.steps(team.ranks.index(rank), len(team.ranks)):
        for rail in team.rails(step.chunk, n_rails):
            if isinstance(step, Finish):
                owners = [other.owner(rail) for other in teams]
                first = {Buffer.DATA: rail * n_across, Buffer.SCRATCH: n_owned * n_scratch}
                n_owned += 1
                for far in across.steps(host, len(teams)):
                    yield _moved(far, owners, first)
            else:
                for k in range(n_across):
                    # Hosts begin with different chunks, so that they do not all send to one.
                    chunk = rail * n_across + (host + k) % n_across
                    yield _moved(step, team.ranks, {Buffer.DATA: chunk - step.chunk})


def _moved(step: Step, peers: Sequence[int], first: Mapping[Buffer, int]) -> Step:
    """A step of an algorithm over `peers`, on chunks that begin elsewhere."""
    chunk = first[step.buffer] + step.chunk
    if isinstance(step, Send):
        return Send(peers[step.peer], chunk, step.buffer)
    if isinstance(step, Recv):
        return Recv(peers[step.peer], chunk, step.fold, step.buffer)
    if isinstance(step, Copy):
        into = first[step.into_buffer] + step.into
        return Copy(chunk, into, step.buffer, step.into_buffer, step.fold)
    return Finish(chunk, step.buffer)
