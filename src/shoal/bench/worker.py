"""One rank of one library: waits for commands, measures, answers. `python -m shoal.bench.worker`.

Commands and answers are lines of JSON on a Unix socket. A rank that waits for the next command
blocks in the kernel, also under Open MPI, so idle sets of processes do not disturb the measured
set. Imports the standard library and NumPy; only a library's own ranks import it.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import queue
import socket
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any, TypeVar

from shoal.bench.collectives import COLLECTIVES, Call, CallSpec
from shoal.bench.elements import ELEMENTS
from shoal.bench.job import rank_environment
from shoal.bench.libraries import JOIN, LibraryRank
from shoal.bench.values import FilledBuffer, KnownValues
from shoal.codec import Codec
from shoal.threads import start

Buffers = dict[tuple[int, str, str], FilledBuffer]
_Library = TypeVar("_Library")


class Rank:
    """The commands of a rank, which return its answers; `buffers` last until `forget`."""

    def __init__(self, library: LibraryRank, buffers: Buffers | None = None) -> None:
        self.library = library
        self._buffers: Buffers = {} if buffers is None else buffers

    def who(self) -> dict[str, Any]:
        """Return the process id, and its host as a host name and a network namespace."""
        net = os.readlink("/proc/self/ns/net")
        return {"pid": os.getpid(), "host": socket.gethostname(), "net": net}

    def check(self, **what: Any) -> dict[str, Any]:
        """Make a call (`CallSpec`) on known values, and count the wrong elements of its result."""
        spec = CallSpec(**what)
        row, ranks, rank = COLLECTIVES[spec.collective], self.library.ranks, self.library.rank
        call, data, result = self._bind(spec)
        op = spec.op if row.folds else "sum"
        is_narrow = row.folds and spec.dtype == "float32" and op in ("sum", "avg")
        codec = self.library.codec if is_narrow else Codec.IDENTITY
        known = KnownValues(len(ranks), ELEMENTS[spec.dtype], op, codec)
        result.values.fill(0)
        known.fill(data.values, rank)
        self.library.barrier()
        call()
        n = len(data.values) // len(ranks) if row.cut else len(data.values)
        n_wrong = sum(
            known.count_wrong(result.values[n * block : n * (block + 1)], source)
            for block, source in row.want(rank, ranks, n, spec.root).items()
        )
        data.values.fill(0)  # repeated sums must not grow to infinity
        return {"n_wrong": n_wrong}

    def measure(
        self,
        *,
        n_calls: int,
        n_samples: int,
        rest_s: float = 0.0,
        n_warmup: int = 1,
        is_apart: bool = True,
        **what: Any,
    ) -> dict[str, Any]:
        """Time calls: seconds and CPU seconds of a call, by sample; its bytes over the host's NICs.

        Args:
            n_calls: calls in a row that make one sample.
            n_warmup: calls before the first sample: caches and branch predictors have seen other
                processes since last time.
            is_apart: a rest and a barrier precede each sample; else only the first one.
            what: see CallSpec.
        """
        call, _, _ = self._bind(CallSpec(**what))
        barrier = self.library.barrier
        barrier()
        for _ in range(n_warmup):
            call()
        barrier()
        before = nic_bytes()
        times_s, cpu_s = [], []
        for number in range(n_samples):
            if is_apart or number == 0:
                time.sleep(rest_s)
                barrier()
            start_cpu_s, start_s = time.process_time(), time.perf_counter()
            for _ in range(n_calls):
                call()
            times_s.append((time.perf_counter() - start_s) / n_calls)
            cpu_s.append((time.process_time() - start_cpu_s) / n_calls)
        barrier()  # other ranks' bytes have left their NICs, or are about to
        n_all = n_samples * n_calls
        sent, received = (
            (now - then) / n_all for now, then in zip(nic_bytes(), before, strict=True)
        )
        return {"times_s": times_s, "cpu_s": cpu_s, "sent": sent, "received": received}

    def forget(self) -> dict[str, Any]:
        """Free the tensors."""
        self._buffers.clear()
        return {}

    def stop(self) -> dict[str, Any]:
        """Leave the group in order."""
        self.library.close()
        return {}

    def _bind(self, what: CallSpec) -> tuple[Call, FilledBuffer, FilledBuffer]:
        data = self._buffer(what, "data")
        in_place = COLLECTIVES[what.collective].is_in_place(what.in_place)
        other = data if in_place else self._buffer(what, "other")
        return self.library.bind(what, data.data, other.data), data, other

    def _buffer(self, what: CallSpec, role: str) -> FilledBuffer:
        key = (what.n_bytes, what.dtype, role)
        if key not in self._buffers:
            n_elems = what.n_bytes // ELEMENTS[what.dtype].n_bytes
            self._buffers[key] = self.library.allocate(n_elems, what.dtype)
        return self._buffers[key]


def nic_bytes() -> tuple[int, int]:
    """Return the bytes sent and received by the NICs of this network namespace, without `lo`."""
    sent = received = 0
    for line in Path("/proc/self/net/dev").read_text(encoding="ascii").splitlines()[2:]:
        name, _, numbers = line.partition(":")
        if name.strip() != "lo":
            counts = numbers.split()
            received, sent = received + int(counts[0]), sent + int(counts[8])
    return sent, received


def fork_ranks(n_ranks: int) -> None:
    """Return in each of `n_ranks` forks; this process waits for them and ends."""
    import torch.distributed  # noqa: F401 - once for all of them

    if "shoal._native" in sys.modules:
        raise RuntimeError("the core of shoal is loaded, and forks of this process would share it")
    for rank in range(n_ranks):
        if os.fork() == 0:
            os.environ.update(rank_environment(rank, rank, n_ranks))
            return
    codes = [os.waitstatus_to_exitcode(os.wait()[1]) for _ in range(n_ranks)]
    sys.exit(max(map(abs, codes)))


def _read_commands(lines: IO[str], commands: queue.Queue[dict[str, Any]]) -> None:
    """Queue commands; end the process as soon as the launcher is gone."""
    for line in lines:
        commands.put(json.loads(line))
    os._exit(1)


def _obey(
    join: Callable[[], Rank], lines: IO[str], answer: Callable[[Mapping[str, Any]], None]
) -> None:
    commands: queue.Queue[dict[str, Any]] = queue.Queue()
    start("commands", _read_commands, lines, commands)
    rank = join()
    gc.disable()  # all ranks would wait for a collection in one
    answer({"rank": rank.library.rank})
    task = ""
    while task != "stop":
        command = commands.get()
        task = command.pop("task")
        answer(getattr(rank, task)(**command))


def serve(join: Mapping[str, Callable[[], _Library]], rank_of: Callable[[_Library], Rank]) -> None:
    """Run as one rank of the library named on the command line, until the command `stop`.

    Any error is sent as the last answer, and ends the process.

    Args:
        join: functions that join the group of each library.
        rank_of: returns the rank that obeys the commands.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("library", choices=sorted(join))
    parser.add_argument("control", help="path of the launcher's Unix socket")
    parser.add_argument("--fork", type=int, default=0, help="fork this number of ranks of one host")
    args = parser.parse_args()
    if args.fork:
        fork_ranks(args.fork)
    with socket.socket(socket.AF_UNIX) as control:
        control.connect(args.control)

        def answer(message: Mapping[str, Any]) -> None:
            control.sendall(json.dumps(message).encode() + b"\n")

        try:
            lines = control.makefile(encoding="ascii")
            _obey(lambda: rank_of(join[args.library]()), lines, answer)
        except Exception as error:
            answer({"error": f"{type(error).__name__}: {error}"})
            raise


if __name__ == "__main__":
    serve(JOIN, Rank)
