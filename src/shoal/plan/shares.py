"""How much of a buffer each reducer should fold, so that no NIC is busy for longer than it must.

Of a buffer of which worker i folds s_i, it sends and receives 1 + (n-2) s_i: its own part of what
others fold, and the results of its share to n-1 others. A server that folds v sends and receives
n v. The shares that make the busiest NIC's time the least are a linear program; its solution is in
closed form, since every NIC of a time T can take a share that grows with T in a straight line.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from shoal.errors import UsageError
from shoal.plan.cluster import Nic
from shoal.schedule.weights import Weights

# Weights are the smallest numbers that are this near to the shares, for the largest of them: a
# share's NIC is then busy for that much longer. Less makes names and sums longer for nothing.
_NEAR: Final = 1 / 1000
_MOST: Final = 1000
# Times that differ by less are equal; what is left is nothing.
_EQUAL: Final = 1 + 1e-9
_NONE: Final = 1e-9
# A worker has one connection to a server and several to other workers, which get as much of its NIC
# each; so a server's NIC passes less than it could until the workers are done with each other, and
# the less, the less of the buffer is the servers': this part of it, and so much more by their part
# (docs/decisions/0033).
_BESIDE_WORKERS: Final = 0.75
_MORE_BY_PART: Final = 0.2
_ROUNDS: Final = 8  # until part and rates agree: each leaves a tenth of what was missing


class Shares(NamedTuple):
    """The best shares of some workers and servers."""

    workers: tuple[float, ...]
    """Of each worker, of the whole buffer."""
    servers: tuple[float, ...]
    us_per_byte: float
    """How long the busiest NIC takes for each byte of the buffer."""

    def weights(self) -> Weights:
        """The same in whole numbers.

        Raises:
            UsageError: there are too many of them to be named, see `Weights.name`.
        """
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
    """The shares that keep the busiest NIC busy for the shortest time.

    Where workers alone are as fast as with servers, servers get nothing; otherwise they get all
    that they can take without being the busiest.

    Args:
        workers, servers: what their NICs carry each way; the slower way counts.

    Raises:
        UsageError: there is no worker.

    Source: Jiang et al., OSDI 2020 (BytePS), 4.1, for NICs that differ: with equal ones it is
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
    can = [_most_of(n, time, nic.slower) for nic in workers]
    per_share = left / sum(can) if left > _NONE else 0.0
    of_workers = tuple(per_share * each for each in can)
    return Shares(of_workers, of_servers, time)


def kept_beside(part: float) -> float:
    """What a server's NIC passes beside workers, of what it carries; servers reduce this part."""
    return _BESIDE_WORKERS + _MORE_BY_PART * part


def shares_beside(workers: Sequence[Nic], servers: Sequence[Nic]) -> Shares:
    """As `best_shares`, by what servers' NICs get beside what workers send each other.

    The workers' part and the servers' then take as long as each other.
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
    """The shares by which servers do it all: there must be one, and the slower ones get less."""
    rate, n = sum(nic.slower for nic in servers), len(workers)
    time = max(n / rate, *(1 / nic.slower for nic in workers))
    return Shares((0.0,) * n, tuple(nic.slower / rate for nic in servers), time)


def _most_of(n: int, time: float, rate: float) -> float:
    """What a worker can fold in a time: without a limit where that does not cost its NIC more."""
    return max(0.0, time * rate - 1) / (n - 2) if n > 2 else 1.0


def _time_of(workers: Sequence[Nic], servers: Sequence[Nic]) -> float:
    """Of the best shares, for each byte.

    No worker sends less than the buffer once. From there on everyone's share grows with the time in
    a straight line, so the time at which they are the whole buffer is one division.
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
    """What each NIC sends, and receives, by these weights: of the buffer; workers first."""
    n_workers, total = len(weights.workers), weights.total
    shares = [weight / total for weight in (*weights.workers, *weights.servers)]
    return [
        1 + (n_workers - 2) * share if rank < n_workers else n_workers * share
        for rank, share in enumerate(shares)
    ]
