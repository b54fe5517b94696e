"""Compare two builds of shoal in alternating rounds, by calls of torch's all_reduce in one host.

    python bench/pairs.py THEN/.venv/bin/python NOW/.venv/bin/python --pairs 10

Each round forks the ranks of one build from a process that has imported torch but not shoal.
It prints a line per number: the medians of each build over the rounds, and their ratios.
Times are the slowest rank's. The other numbers are means over the ranks, per call: sleeps
(voluntary context switches), yields (involuntary ones, to another thread), and CPU time.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import socket
import statistics
import subprocess
import sys
import time
from typing import Any

N_WARM_CALLS = 8000
SIZES = [4, 64 << 10, 1 << 20]


def main() -> None:
    """Run the builds in turn, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("builds", nargs="+", help="a Python; may begin with env NAME=VALUE")
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--ranks", type=int, nargs="*", default=[4, 8])
    parser.add_argument("--bytes", type=int, nargs="*", default=SIZES)
    args = parser.parse_args()
    builds = [
        subprocess.Popen([*one.split(), __file__, "--fork"], stdin=-1, stdout=-1, text=True)
        for one in args.builds
    ]
    seen: dict[tuple[int, str, str], list[list[float]]] = {}
    for n in range(args.pairs):
        for n_ranks in args.ranks:
            for which in range(len(builds))[:: 1 if n % 2 == 0 else -1]:
                print(n_ranks, *args.bytes, file=builds[which].stdin, flush=True)
                for (cell, what), value in json.loads(builds[which].stdout.readline()):
                    columns = seen.setdefault((n_ranks, cell, what), [[] for _ in builds])
                    columns[which].append(value)
    for (n_ranks, cell, what), columns in seen.items():
        medians = [statistics.median(column) for column in columns]
        ratios = [f"{one / medians[0]:.2f}" if medians[0] else "-" for one in medians[1:]]
        shown = " ".join(f"{one:8.2f}" for one in medians)
        print(f"{n_ranks:5} {cell:>9} {what:>10} {shown}   {' '.join(ratios)}")
    for build in builds:
        build.stdin.close()
        build.wait()


def serve() -> None:
    """Fork ranks for each line of input, and print their measurements."""
    import torch.distributed  # noqa: F401 - the forked ranks have it imported

    for line in sys.stdin:
        n_ranks, *sizes = map(int, line.split())
        # Keep the port until the ranks have ended: only a socket with SO_REUSEADDR, such as the
        # store's, can listen on it.
        held = socket.socket()
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
        pipes = [os.pipe() for _ in range(n_ranks)]
        for rank, (_, out) in enumerate(pipes):
            if os.fork() == 0:
                code = 1
                try:
                    os.write(out, json.dumps(measure(rank, n_ranks, port, sizes)).encode())
                    code = 0
                finally:
                    sys.stderr.flush()
                    os._exit(code)
            os.close(out)
        rows = [json.loads(os.fdopen(read).read()) for read, _ in pipes]
        for _ in pipes:
            os.wait()
        held.close()
        merged = []
        for i, (key, _) in enumerate(rows[0]):
            merge = max if key[1] in ("us", "ms") else statistics.mean
            merged.append((key, merge(row[i][1] for row in rows)))
        print(json.dumps(merged), flush=True)


def measure(rank: int, n_ranks: int, port: int, sizes: list[int]) -> list[Any]:
    """Form a group and make calls; return each number with its name, in one order on all ranks."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, n_ranks, is_master=rank == 0)
    if store.add("ready", 1) == n_ranks:
        store.set("all", "")
    store.wait(["all"])
    begin, before = time.perf_counter(), counts()
    dist.init_process_group("shoal", store=store, rank=rank, world_size=n_ranks)
    found: list[Any] = [(("form", "ms"), (time.perf_counter() - begin) * 1e3)]
    found.append((("form", "cpu ms"), (counts()[2] - before[2]) / 1e3))
    warm = torch.zeros(1)
    for _ in range(N_WARM_CALLS):  # meanwhile the kernel spreads the ranks over the cores
        dist.all_reduce(warm)
    for n_bytes in sizes:
        n_calls = max(200, min(1000, (32 << 20) // n_bytes))
        tensor = torch.zeros(n_bytes // 4)
        for _ in range(max(20, n_calls // 10)):
            dist.all_reduce(tensor)
        begin, before = time.perf_counter(), counts()
        for _ in range(n_calls):
            dist.all_reduce(tensor)
        spent, after = time.perf_counter() - begin, counts()
        cell = f"{n_bytes >> 10} KiB" if n_bytes >= 1024 else f"{n_bytes} B"
        found.append(((cell, "us"), spent / n_calls * 1e6))
        for name, one, other in zip(("sleeps", "yields", "cpu us"), before, after, strict=True):
            found.append(((cell, name), (other - one) / n_calls))
    dist.destroy_process_group()
    return found


def counts() -> tuple[float, float, float]:
    """Return sleeps, yields and microseconds of CPU of this process so far."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_nvcsw, used.ru_nivcsw, (used.ru_utime + used.ru_stime) * 1e6


if __name__ == "__main__":
    serve() if sys.argv[1:] == ["--fork"] else main()
