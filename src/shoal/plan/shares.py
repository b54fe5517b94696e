"""The share of a buffer that each reducer folds, so that the busiest NIC has the least work.

A worker that folds the share s sends and receives 1 + (n-2) s buffers: its parts of what others
fold, and the results of its share to n-1 others. A server that folds v sends and receives n v. The
shares that minimise the busiest NIC's time are a linear program with a solution in closed form,
since the share that a NIC can take in a time T grows linearly with T.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from shoal.errors import UsageError
from shoal.plan.cluster import Nic
from shoal.schedule.weights import Weights

# Weights are the smallest numbers within this part of the shares, so a NIC is busy longer by at
# most this part. More exact numbers would only make names longer.
_NEAR: Final = 1 / 1000
_MOST: Final = 1000
# Times within this ratio are equal, and smaller shares count as none.
_EQUAL: Final = 1 + 1e-9
_NONE: Final = 1e-9
# A worker has one connection to each server and several to other workers, all with equal turns of
# its NIC. So until the workers are done with each other, a server's NIC passes this part of its
# rate, and more by the servers' part of the buffer (docs/decisions/0033).
_BESIDE_WORKERS: Final = 0.75
_MORE_BY_PART: Final = 0.2
_ROUNDS: Final = 8  # until part and rates agree: each round leaves a tenth of the difference


class Shares(NamedTuple):
    """The parts of a buffer that workers and servers fold.

    Args:
        us_per_byte: the time of the busiest NIC for each byte of the buffer.
    """

    workers: tuple[float, ...]
    servers: tuple[float, ...]
    us_per_byte: float

    def weights(self) -> Weights:
        """Return the shares in whole numbers; UsageError if these have no `Weights.name`."""
        shares = (*self.workers, *self.servers)
        largest = max(shares)
        kinds = {share / largest for share in shares}
        best = next((m for m in range(1, _MOST) if _is_near(kinds, m)), _MOST)
        rounded = tuple(round(share / largest * best) for share in shares)
        n = len(self.workers)
        weights = Weights(rounded[:n], rounded[n:]).reduced
        weights.name()
        return weights


def _is_near(kinds: set[float], most: int) -> bool:
    return all(abs(kind * most - round(kind * most)) <= _NEAR * most * kind for kind in kinds)


def best_shares(workers: Sequence[Nic], servers: Sequence[Nic] = ()) -> Shares:
    """Return the shares that keep the busiest NIC busy for the shortest time.

    Servers get nothing if workers alone are as fast, and otherwise as much as they can take without
    being the busiest.

    Args:
        workers, servers: their NICs; the slower direction counts.

    Raises:
        UsageError: there is no worker.

    Source: Jiang et al., OSDI 2020 (BytePS), 4.1, for NICs that differ: with equal NICs the time is
        2n(n-1) / (n^2 + kn - 2k) of the time of the buffer.
    """
    n = len(workers)
    if not n:
        raise UsageError("shares of a buffer need at least one worker")
    alone = _time_of(workers, ())
    time = _time_of(workers, servers)
    if time * _EQUAL >= alone:
        servers, time = [nic._replace(out=0.0, into=0.0) for nic in servers], alone
    takes = [time * nic.slower / n for nic in servers]
    scale = min(1.0, 1 / sum(takes)) if any(takes) else 0.0
    of_servers = tuple(share * scale for share in takes)
    left = 1 - sum(of_servers)
    # The most that each worker can fold in this time; each of two workers can fold it all.
    can = [max(0.0, time * nic.slower - 1) / (n - 2) if n > 2 else 1.0 for nic in workers]
    per_share = left / sum(can) if left > _NONE else 0.0
    of_workers = tuple(per_share * each for each in can)
    return Shares(of_workers, of_servers, time)


def kept_beside(part: float) -> float:
    """Return the part of its rate that a server's NIC passes while workers exchange data too.

    Args:
        part: the part of the buffer that servers reduce.
    """
    return _BESIDE_WORKERS + _MORE_BY_PART * part


def shares_beside(workers: Sequence[Nic], servers: Sequence[Nic]) -> Shares:
    """Return `best_shares` for the rates that servers' NICs reach beside the workers' own traffic.

    The workers' part and the servers' part then take equally long.
    """
    shares = best_shares(workers, servers)
    for _ in range(_ROUNDS):
        part = sum(shares.servers)
        if not 0 < part < 1:
            break
        kept = kept_beside(part)
        shares = best_shares(workers, [Nic(kept * nic.out, kept * nic.into) for nic in servers])
    return shares


def servers_alone(workers: Sequence[Nic], servers: Sequence[Nic]) -> Shares:
    """Return the shares if servers, at least one, reduce everything, by the rates of their NICs."""
    rate, n = sum(nic.slower for nic in servers), len(workers)
    time = max(n / rate, *(1 / nic.slower for nic in workers))
    return Shares((0.0,) * n, tuple(nic.slower / rate for nic in servers), time)


def _time_of(workers: Sequence[Nic], servers: Sequence[Nic]) -> float:
    """Return the time of the best shares for each byte.

    A worker sends the buffer at least once. From that time on all shares grow linearly, so the time
    at which they add up to the buffer is one division.
    """
    n = len(workers)
    if n == 1:
        return 0.0
    least = max(1 / nic.slower for nic in workers)
    if n == 2:
        return least
    per_time = sum(nic.slower for nic in workers) / (n - 2)
    per_time += sum(nic.slower for nic in servers) / n
    return max(least, (1 + n / (n - 2)) / per_time)


def loads(weights: Weights) -> list[float]:
    """Return the number of buffers that each NIC sends and receives, workers first."""
    n_workers, total = len(weights.workers), weights.total
    shares = [weight / total for weight in (*weights.workers, *weights.servers)]
    return [
        1 + (n_workers - 2) * share if rank < n_workers else n_workers * share
        for rank, share in enumerate(shares)
    ]
