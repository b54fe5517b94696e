"""One rank of one library: waits for commands, measures, answers. `python -m shoal.bench.worker`.

Commands and answers are lines of JSON on a Unix socket. A rank that waits for the next command
blocks in the kernel, also under Open MPI, so idle sets of processes do not disturb the one that is
measured. Imports the standard library and NumPy; the library comes with its endpoint.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import queue
import re
import socket
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from shoal.bench.collectives import CALLS, Call, CallSpec
from shoal.bench.elements import ELEMENTS
from shoal.bench.endpoints import JOIN, LibraryRank
from shoal.bench.values import FilledBuffer, KnownValues
from shoal.threads import start

if TYPE_CHECKING:
    from shoal.bench.torch_rank import TorchRank
    from shoal.bench.training_steps import RankTrainings


class Rank:
    """What a rank can be told to do. Each method's result becomes the answer."""

    def __init__(self, endpoint: LibraryRank) -> None:
        self._endpoint = endpoint
        self._buffers: dict[tuple[int, str, str, str], FilledBuffer] = {}
        self._trainings: RankTrainings | None = None

    def who(self) -> dict[str, Any]:
        """The process, and the host that it is on: what shares its name and its network."""
        net = os.readlink("/proc/self/ns/net")
        return {"pid": os.getpid(), "host": socket.gethostname(), "net": net}

    def check(self, **what: Any) -> dict[str, Any]:
        """Call once on known values; `n_wrong` elements of the result are not what they must be.

        Args:
            what: see CallSpec.
        """
        spec = CallSpec(**what)
        row, ranks, rank = CALLS[spec.collective], self._endpoint.ranks, self._endpoint.rank
        call, data, result = self._bind(spec)
        op = spec.op if row.folds else "sum"
        is_narrow = row.folds and spec.dtype == "float32" and op in ("sum", "avg")
        error = self._endpoint.error if is_narrow else 0.0
        known = KnownValues(len(ranks), ELEMENTS[spec.dtype], op, error)
        result.values.fill(0)
        known.fill(data.values, rank)
        self._endpoint.barrier()
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
        n_calls: int,
        n_samples: int,
        rest_s: float = 0.0,
        n_warmup: int = 1,
        is_apart: bool = True,
        **what: Any,
    ) -> dict[str, Any]:
        """Seconds and CPU seconds of a call, by sample; bytes of a call over the host's NICs.

        Args:
            n_calls: calls in a row that make one sample.
            n_warmup: calls before the first sample: caches and branch predictors have seen other
                processes since last time.
            is_apart: a rest and a barrier precede each sample; else only the first one.
            what: see CallSpec.
        """
        call, _, _ = self._bind(CallSpec(**what))
        barrier = self._endpoint.barrier
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
        barrier()  # what others still have to send has left their NICs, or is about to
        n_all = n_samples * n_calls
        sent, received = (
            (now - then) / n_all for now, then in zip(nic_bytes(), before, strict=True)
        )
        return {"times_s": times_s, "cpu_s": cpu_s, "sent": sent, "received": received}

    def choice(self, collective: str, n_bytes: int) -> dict[str, Any]:
        """The name of the algorithm that shoal's planner takes."""
        return {"name": self._torch().choice(collective, n_bytes)}

    def restart(self) -> dict[str, Any]:
        """Leave the group and form a new one in the same processes."""
        return {"time_s": self._torch().restart()}

    def subgroups(self, n_groups: int, n_members: int) -> dict[str, Any]:
        """Form groups of some of the ranks, and then use each."""
        form_s, use_s = self._torch().subgroups(n_groups, n_members)
        return {"form_s": form_s, "use_s": use_s}

    def latencies(self, n_bulk: int, bulk_bytes: int) -> dict[str, Any]:
        """Time small calls beside large ones."""
        self._torch()
        from shoal.bench.disturbed import latencies_beside

        return {"times_s": latencies_beside(n_bulk, bulk_bytes)}

    def cut_calls(
        self, n_bytes: int, n_calls: int, interface: str, down_s: float
    ) -> dict[str, Any]:
        """Time calls in whose middle an interface goes down."""
        self._torch()
        from shoal.bench.disturbed import cut_calls

        return cut_calls(n_bytes, n_calls, interface, down_s)._asdict()

    def among_strangers(self, n_bytes: int, n_held: int, n_short: int) -> dict[str, Any]:
        """Time calls while processes without the key connect to rank 0."""
        self._torch()
        from shoal.bench.disturbed import calls_among_strangers

        times_s, n_made = calls_among_strangers(n_bytes, n_held, n_short)
        return {"times_s": times_s, "n_made": n_made}

    def steps(self, n_bytes: int, seconds: float) -> dict[str, Any]:
        """Time all-reduces for a while, and look at every result."""
        from shoal.bench.steps import steady_steps

        return steady_steps(self._endpoint, n_bytes, seconds)._asdict()

    def train(self, n_steps: int, n_warmup: int = 1, **how: Any) -> dict[str, Any]:
        """Time steps of a training, and go on where the last ones ended.

        Args:
            how: see Variant.
        """
        from shoal.bench.training_steps import Variant

        return self._trained().train(Variant(**how), n_steps, n_warmup)._asdict()

    def added_cpu(self, n_parameters: int, n_steps: int) -> dict[str, Any]:
        """CPU seconds that wrappers add to a step of many small parameters."""
        from shoal.bench.training_costs import added_cpu_s

        return dict(added_cpu_s(self._trained(), n_parameters, n_steps))

    def order_costs(self, n_arrays: int, n_elems: int, n_steps: int) -> dict[str, Any]:
        """What it costs to agree on an order, and on another one."""
        self._torch()
        from shoal.bench.training_costs import order_costs

        return order_costs(n_arrays, n_elems, n_steps)

    def memory_beyond(self, model: str, n_steps: int, as_views: bool) -> dict[str, Any]:
        """Resident memory of a wrapped model's steps beyond a bare one's."""
        self._torch()
        from shoal.bench.training_costs import memory_beyond

        return dict(memory_beyond(model, n_steps, as_views))

    def copied(self, **how: Any) -> dict[str, Any]:
        """Bytes of gradients that a step copies."""
        self._torch()
        from shoal.bench.training_costs import copied_bytes

        return dict(copied_bytes(**how))

    def in_flight(self, **how: Any) -> dict[str, Any]:
        """Time buffers that are averaged several at once."""
        from shoal.bench.training_costs import in_flight_s

        return {"times_s": [in_flight_s(self._trained(), **how)]}

    def footprint(self) -> dict[str, Any]:
        """The memory and the descriptors of this rank."""
        return {"pss_bytes": proportional_bytes(), "n_fds": len(os.listdir("/proc/self/fd"))}

    def peak(self) -> dict[str, Any]:
        """The peak resident memory, and how much of it are the buffers."""
        tensors = sum(n_bytes for n_bytes, *_ in self._buffers)
        return {"pid": os.getpid(), "peak_bytes": peak_resident_bytes(), "tensor_bytes": tensors}

    def forget(self) -> dict[str, Any]:
        """Free the buffers, and the models that were trained."""
        self._buffers.clear()
        if self._trainings is not None:
            self._trainings.clear()
        return {}

    def stop(self) -> dict[str, Any]:
        """Leave the group in good order."""
        self._endpoint.close()
        return {}

    def _torch(self) -> TorchRank:
        if self._endpoint.torch is None:
            raise NotImplementedError("only torch.distributed can be asked that")
        return self._endpoint.torch

    def _trained(self) -> RankTrainings:
        self._torch()
        if self._trainings is None:
            from shoal.bench.training_steps import RankTrainings

            self._trainings = RankTrainings()
        return self._trainings

    def _bind(self, what: CallSpec) -> tuple[Call, FilledBuffer, FilledBuffer]:
        """The call, and the tensors of its input and its result."""
        data = self._buffer(what, "data")
        in_place = CALLS[what.collective].is_in_place(what.in_place)
        other = data if in_place else self._buffer(what, "other")
        return self._endpoint.bind(what, data.data, other.data), data, other

    def _buffer(self, what: CallSpec, role: str) -> FilledBuffer:
        key = (what.n_bytes, what.memory, what.dtype, role)
        if key not in self._buffers:
            n_elems = what.n_bytes // ELEMENTS[what.dtype].n_bytes
            self._buffers[key] = self._endpoint.allocate(n_elems, what.memory, what.dtype)
        return self._buffers[key]


def nic_bytes() -> tuple[int, int]:
    """What the NICs of this process's network have sent and received; not what stayed inside."""
    sent = received = 0
    for line in Path("/proc/self/net/dev").read_text(encoding="ascii").splitlines()[2:]:
        name, _, numbers = line.partition(":")
        if name.strip() != "lo":
            counts = numbers.split()
            received, sent = received + int(counts[0]), sent + int(counts[8])
    return sent, received


def peak_resident_bytes() -> int:
    """VmHWM of this process: the most that was resident at once, shared pages included."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    return int(found[1]) * 1024 if found else 0


def proportional_bytes() -> int:
    """Pss of this process: what is shared counts in part, by how many processes map it."""
    rollup = Path("/proc/self/smaps_rollup").read_text(encoding="ascii")
    found = re.search(r"^Pss:\s+(\d+) kB", rollup, re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


def fork_ranks(n_ranks: int) -> None:
    """Return in each of so many forks, a rank; this process waits for them and ends.

    Raises:
        RuntimeError: shoal's core is loaded already: no rank can begin so.
    """
    import torch.distributed  # noqa: F401 - once for all of them

    if "shoal._native" in sys.modules:
        raise RuntimeError("the core of shoal is loaded, and forks of this process would share it")
    for rank in range(n_ranks):
        if os.fork() == 0:
            places = {"RANK": rank, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": n_ranks}
            os.environ.update({name: str(value) for name, value in places.items()})
            return
    codes = [os.waitstatus_to_exitcode(os.wait()[1]) for _ in range(n_ranks)]
    sys.exit(max(map(abs, codes)))


def _read_commands(lines: IO[str], commands: queue.Queue[dict[str, Any]]) -> None:
    """Pass commands on; end the process when the launcher is gone, whatever it is doing."""
    for line in lines:
        commands.put(json.loads(line))
    os._exit(1)


def _serve(library: str, lines: IO[str], answer: Callable[[Mapping[str, Any]], None]) -> None:
    commands: queue.Queue[dict[str, Any]] = queue.Queue()
    start("commands", _read_commands, lines, commands)
    endpoint = JOIN[library]()
    rank = Rank(endpoint)
    gc.disable()  # a collection in one rank is waited for by all
    start_s = endpoint.torch.start_s if endpoint.torch else 0.0
    answer({"rank": endpoint.rank, "start_s": start_s})
    task = ""
    while task != "stop":
        command = commands.get()
        task = command.pop("task")
        answer(getattr(rank, task)(**command))


def main() -> None:
    """Serve commands until told to stop. Any error is the last answer, then the process ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("library", choices=sorted(JOIN))
    parser.add_argument("control", help="path of the launcher's Unix socket")
    parser.add_argument("--fork", type=int, default=0, help="ranks of one host that this becomes")
    args = parser.parse_args()
    if args.fork:
        fork_ranks(args.fork)
    with socket.socket(socket.AF_UNIX) as control:
        control.connect(args.control)

        def answer(message: Mapping[str, Any]) -> None:
            control.sendall(json.dumps(message).encode() + b"\n")

        try:
            _serve(args.library, control.makefile(encoding="ascii"), answer)
        except Exception as error:
            answer({"error": f"{type(error).__name__}: {error}"})
            raise


if __name__ == "__main__":
    main()
