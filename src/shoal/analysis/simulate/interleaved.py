"""Workers and servers numbered by turns, so that groups of them are blocks that are alike."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from shoal.schedule import Algorithm, Copy, Finish, Step


def interleaved(algorithm: Algorithm, n_bytes: int, size: int) -> Algorithm:
    """The same algorithm, its ranks in as many blocks as there can be: some workers, then servers.

    With 6 workers and 4 servers, the first block has workers 0 to 2 and servers 0 and 1.
    """
    return _interleaved(algorithm, n_bytes, size)


@functools.lru_cache(maxsize=16)
def _interleaved(algorithm: Algorithm, n_bytes: int, size: int) -> Algorithm:
    turned = _Interleaved(algorithm, size - algorithm.n_servers, algorithm.n_servers)
    return replace(
        algorithm,
        function=turned.steps,
        scratch_rule=turned.scratch,
        owner_rule=turned.owner,
        fit_rule=None,
    )


@dataclass(frozen=True, slots=True)
class _Interleaved:
    algorithm: Algorithm
    n_workers: int
    n_servers: int

    def place_of(self, rank: int) -> int:
        """The new number of a rank."""
        n_blocks = math.gcd(self.n_workers, self.n_servers)
        workers, servers = self.n_workers // n_blocks, self.n_servers // n_blocks
        if rank < self.n_workers:
            return rank // workers * (workers + servers) + rank % workers
        rank -= self.n_workers
        return rank // servers * (workers + servers) + workers + rank % servers

    def rank_at(self, place: int) -> int:
        """The rank that has this new number."""
        n_blocks = math.gcd(self.n_workers, self.n_servers)
        workers, servers = self.n_workers // n_blocks, self.n_servers // n_blocks
        block, within = divmod(place, workers + servers)
        if within < workers:
            return block * workers + within
        return self.n_workers + block * servers + within - workers

    def steps(self, place: int, size: int) -> Iterator[Step]:
        for step in self.algorithm.steps(self.rank_at(place), size):
            if isinstance(step, Copy | Finish):
                yield step
            else:
                yield replace(step, peer=self.place_of(step.peer))

    def scratch(self, place: int, size: int) -> tuple[int, ...]:
        return self.algorithm.scratch(self.rank_at(place), size)

    def owner(self, chunk: int, size: int) -> int:
        assert self.algorithm.owner_rule is not None  # of those with servers all have one
        return self.place_of(self.algorithm.owner_rule(chunk, size))
