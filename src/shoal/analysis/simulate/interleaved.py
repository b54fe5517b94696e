"""Workers and servers numbered in turns, so that groups of them form alike blocks."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator

from shoal.schedule import Algorithm, Copy, Finish, Step


@functools.lru_cache(maxsize=16)
def interleaved(algorithm: Algorithm, size: int) -> Algorithm:
    """Renumber an algorithm's ranks in as many blocks as possible: some workers, then servers.

    With 6 workers and 4 servers, the first block has workers 0 to 2 and servers 0 and 1.
    """
    n_workers, owner_rule = size - algorithm.n_servers, algorithm.owner_rule
    assert owner_rule is not None  # every algorithm with servers has one
    n_blocks = math.gcd(n_workers, algorithm.n_servers)
    workers, servers = n_workers // n_blocks, algorithm.n_servers // n_blocks
    ranks: list[int] = []  # by new number
    for block in range(n_blocks):
        ranks += range(block * workers, (block + 1) * workers)
        ranks += range(n_workers + block * servers, n_workers + (block + 1) * servers)
    places = {rank: place for place, rank in enumerate(ranks)}

    def steps(place: int, size: int) -> Iterator[Step]:
        for step in algorithm.steps(ranks[place], size):
            yield step if isinstance(step, Copy | Finish) else step.replace(peer=places[step.peer])

    return algorithm._replace(
        function=steps,
        scratch_rule=lambda place, size: algorithm.scratch(ranks[place], size),
        owner_rule=lambda chunk, size: places[owner_rule(chunk, size)],
        fit_rule=None,
    )
