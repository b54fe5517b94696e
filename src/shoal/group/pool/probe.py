"""Measures the rates of servers whose hosts report none, once for each view.

Rank 0 requests some bytes from worker 1 and then from each such server, and times the replies. A
server's rate is a part of a worker's, measured in the same way, so that this machine's cores do not
matter. The part is rounded to steps of the square root of 2, so that nearly equal rates are equal.

The probe takes at most `BUDGET_S`, and a reply `_MOST_BYTES`. It never raises: a server whose reply
is late counts as fast as a worker.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import statistics
import time
from typing import TYPE_CHECKING, Final

from shoal.errors import ShoalError
from shoal.group.pool.view_mesh import is_in_time

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from shoal.group.pool.view_mesh import PoolGroup
    from shoal.group.work import Work

BUDGET_S: Final = 1.0
"""Seconds for all servers of a view."""

UNKNOWN: Final = 255
"""The step of a server that was not measured."""

REFERENCE: Final = 1
"""The worker whose rate servers are compared with."""

_OF_ONE_S: Final = 0.3  # for one rank
_ASK, _REPLY = 2, 3  # tags of messages
_LEAST_BYTES: Final = 256 << 10
_MOST_BYTES: Final = 8 << 20
# In a reply that takes this long, the delay of a thread matters little. The first reply of each
# rank is discarded: it waits for the connection, and a shaped link sends the first 100 KiB or so at
# once. The result is the median of three more.
_ENOUGH_S: Final = 0.002
_N_TIMED: Final = 3
_EQUAL: Final = 0.75  # of a worker's rate: measurements of equal links differ by up to this


def measure(group: PoolGroup, servers: Sequence[int], is_wanted: Callable[[], bool]) -> list[int]:
    """Return the step of each of these ranks, on rank 0; see `part_of`."""
    until, ranks = time.monotonic() + BUDGET_S, (REFERENCE, *servers)
    rates: dict[int, float] = {}
    with contextlib.suppress(ShoalError, MemoryError, OSError):
        try:
            with _alone(until) as is_alone:
                for rank in ranks if is_alone else ():
                    rates[rank] = _rate_of(group, rank, until, is_wanted)
                    if not rates[REFERENCE]:
                        break
        finally:  # also to ranks that have not answered: servers serve no calls before this
            for rank in ranks:
                group.send(bytearray(8), rank, _ASK, async_op=True)  # 0 bytes: the end
    reference = rates.get(REFERENCE, 0.0)
    return [step_of(rates.get(rank, 0.0), reference) for rank in servers]


def answer(group: PoolGroup, is_wanted: Callable[[], bool]) -> None:
    """Send rank 0 the bytes that it requests, until it requests 0."""
    until = time.monotonic() + 2 * BUDGET_S
    asked = bytearray(8)
    with contextlib.suppress(ShoalError, MemoryError):
        while _ends(group.recv(asked, 0, _ASK, async_op=True), until, is_wanted):
            n_bytes = min(int.from_bytes(asked, "little"), _MOST_BYTES)
            if not n_bytes:
                return
            if not _ends(
                group.send(bytearray(n_bytes), 0, _REPLY, async_op=True), until, is_wanted
            ):
                return


def step_of(rate: float, reference: float) -> int:
    """Return the steps from a worker's rate down to this rate; `UNKNOWN` if either is 0."""
    if not rate or not reference:
        return UNKNOWN
    if rate >= _EQUAL * reference:
        return 0
    return min(UNKNOWN - 1, round(2 * (math.log2(reference) - math.log2(rate))))


def part_of(step: int) -> float:
    """Return the fraction of a worker's rate for this step."""
    return 1.0 if step == UNKNOWN else 2.0 ** (-step / 2)


def _rate_of(group: PoolGroup, rank: int, until: float, is_wanted: Callable[[], bool]) -> float:
    """Return the rate of a rank in bytes per microsecond; 0 if it does not answer in time."""
    until = min(until, time.monotonic() + _OF_ONE_S)
    n_bytes, is_first, rates = _LEAST_BYTES, True, list[float]()
    while len(rates) < _N_TIMED:
        began = time.monotonic_ns()
        reply = group.recv(bytearray(n_bytes), rank, _REPLY, async_op=True)
        group.send(bytearray(n_bytes.to_bytes(8, "little")), rank, _ASK, async_op=True)
        if reply is None or not _ends(reply, until, is_wanted):
            break
        took_us = (reply.finished_ns - began) / 1e3
        if took_us < 1e6 * _ENOUGH_S and n_bytes < _MOST_BYTES:
            n_bytes *= 2
        elif not is_first:
            rates.append(n_bytes / took_us)
        is_first = False
    return statistics.median(rates) if rates else 0.0


def _ends(work: Work | None, until: float, is_wanted: Callable[[], bool]) -> bool:
    """Return True if a message succeeds by `until`. A late one stays in flight."""
    assert work is not None  # because of `async_op`
    return is_in_time(work, until, is_wanted) and work.error() is None


@contextlib.contextmanager
def _alone(until: float) -> Iterator[bool]:
    """Wait until no other group on this host measures: all of them share its NIC."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as lock:
        while time.monotonic() < until:
            with contextlib.suppress(OSError):  # another process has the name
                lock.bind(f"\0shoal probe {os.getuid()}")
                break
            time.sleep(0.002)
        yield bool(lock.getsockname())
