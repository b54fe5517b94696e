"""Timed calls of torch.distributed under disturbances."""

from __future__ import annotations

import resource
import select
import statistics
import subprocess
import sys
import time
from typing import Any, Final

import torch
import torch.distributed as dist

from bench.scoreboard.strangers import own_listener
from shoal.threads import start

# Small calls without large ones in flight: enough for a 99th percentile.
_N_ALONE: Final = 500
_CUT_EVERY: Final = 10
_FEW_DESCRIPTORS: Final = 64


def latencies(n_bulk: int, bulk_bytes: int) -> dict[str, Any]:
    """Return the seconds of many 4 B all-reduces while `n_bulk` large ones are in flight.

    All ranks make the same number of calls: each small call counts the ranks that have all large
    ones in flight, and the ranks stop at the first call that counts fewer than all. If there are no
    large calls, the number of small ones is fixed.
    """
    bulk = [torch.full((bulk_bytes // 4,), 1.0) for _ in range(n_bulk)]
    flag = torch.zeros(1)
    dist.barrier()
    works = [dist.all_reduce(tensor, async_op=True) for tensor in bulk]
    times_s: list[float] = []
    while n_bulk or len(times_s) < _N_ALONE:
        flag.fill_(1.0 - any(work.is_completed() for work in works))
        start_s = time.perf_counter()
        dist.all_reduce(flag)
        took_s = time.perf_counter() - start_s
        if flag.item() < dist.get_world_size():
            break
        times_s.append(took_s)
    for work in works:
        work.wait()
    if any(not bool((tensor == dist.get_world_size()).all()) for tensor in bulk):
        raise ArithmeticError("WRONG RESULT of a large call")
    return {"times_s": times_s}


def cut_calls(n_bytes: int, n_calls: int, interface: str, down_s: float) -> dict[str, Any]:
    """Time all-reduces, and set an interface of rank 1 down in the middle of every tenth one.

    Returns: the seconds of the calls during cuts, and the median of the others.

    Raises:
        ArithmeticError: a sum is wrong.
    """
    data = torch.empty(n_bytes // 4)
    clean_s: list[float] = []
    cut_s: list[float] = []
    for number in range(1, n_calls + 1):
        is_cut = number % _CUT_EVERY == 0
        data.fill_(number)
        dist.barrier()
        cutter = None
        if is_cut and dist.get_rank() == 1:
            cutter = start("cut", _cut, interface, statistics.median(clean_s) / 2, down_s)
        start_s = time.perf_counter()
        dist.all_reduce(data)
        (cut_s if is_cut else clean_s).append(time.perf_counter() - start_s)
        if not bool((data == number * dist.get_world_size()).all()):
            raise ArithmeticError(f"WRONG RESULT of call {number}")
        if cutter is not None:
            cutter.join()
    return {"cut_s": cut_s, "median_s": statistics.median(clean_s)}


def calls_among_strangers(n_bytes: int, n_held: int, n_short: int) -> dict[str, Any]:
    """Return the seconds of all-reduces while strangers connect to rank 0, and their number.

    The strangers are a process on rank 1's host. Rank 0 has at most 64 descriptors meanwhile.
    Calls go on until the strangers have ended; at least one is made.

    Raises:
        ArithmeticError: a sum is wrong.
    """
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    where: list[tuple[str, int] | None] = [own_listener() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(where)
    if where[0] is None:
        raise LookupError("rank 0 sent no address of a listener")
    crowd = _Crowd(*where[0], n_held, n_short) if dist.get_rank() == 1 else None
    if dist.get_rank() == 0:
        resource.setrlimit(resource.RLIMIT_NOFILE, (_FEW_DESCRIPTORS, limits[1]))
    data, more = torch.empty(n_bytes // 4), torch.ones(1)
    times_s: list[float] = []
    while more.item():
        data.fill_(1)
        dist.barrier()
        start_s = time.perf_counter()
        dist.all_reduce(data)
        times_s.append(time.perf_counter() - start_s)
        if not bool((data == dist.get_world_size()).all()):
            raise ArithmeticError(f"WRONG RESULT of call {len(times_s)}")
        more.fill_(crowd is not None and not crowd.is_through())
        dist.broadcast(more, 1)
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    return {"times_s": times_s, "n_made": 0 if crowd is None else crowd.stop()}


class _Crowd:
    """The process of the strangers."""

    def __init__(self, address: str, port: int, n_held: int, n_short: int) -> None:
        numbers = map(str, (port, n_held, n_short))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.scoreboard.strangers", address, *numbers],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._process.stdout is not None  # it is a pipe
        self._output: Final = self._process.stdout

    def is_through(self) -> bool:
        """Return True if all short connections were tried."""
        return bool(select.select([self._output], [], [], 0)[0])

    def stop(self) -> int:
        """End the process, and return the number of connections."""
        output, _ = self._process.communicate()
        return int(output)


def _cut(interface: str, after_s: float, down_s: float) -> None:
    """Set an interface down after a delay, and up again."""
    for pause_s, state in ((after_s, "down"), (down_s, "up")):
        time.sleep(pause_s)
        subprocess.run(["ip", "link", "set", interface, state], check=True)
