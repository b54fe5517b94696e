"""One rank of one library, with the commands of the tables. `python -m bench.scoreboard.worker`.

Imports the standard library and NumPy: the ranks of Open MPI run in an environment without torch.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from bench.scoreboard.libraries import JOIN, SuiteLibrary, allocate_shared
from shoal.bench.worker import Buffers, Rank, serve

if TYPE_CHECKING:
    from bench.scoreboard.torch_rank import TorchRank
    from bench.scoreboard.training_steps import RankTrainings


# Commands of ranks of torch.distributed, and the modules of the functions that obey them.
_TORCH_COMMANDS: Final = {
    "latencies": "disturbed",
    "cut_calls": "disturbed",
    "calls_among_strangers": "disturbed",
    "order_costs": "training_costs",
    "memory_beyond": "training_costs",
    "copied_bytes": "training_costs",
}


class SuiteRank(Rank):
    """The commands that a rank obeys. The result of each method becomes the answer."""

    def __init__(self, library: SuiteLibrary) -> None:
        self._suite = library  # first: __getattr__ needs it
        super().__init__(library.plain)
        self._shared: Buffers = {}
        self._variants: dict[tuple[str, str, bool], Rank] = {}
        self._trainings: RankTrainings | None = None

    def __getattr__(self, task: str) -> Callable[..., dict[str, Any]]:
        """Return a command of torch.distributed's ranks: of `_TORCH_COMMANDS`, or of TorchRank."""
        place: object = self._torch(task)
        if task in _TORCH_COMMANDS:
            place = import_module(f"bench.scoreboard.{_TORCH_COMMANDS[task]}")
        command: Callable[..., dict[str, Any]] = getattr(place, task)
        return command

    def check(self, **what: Any) -> dict[str, Any]:
        """See Rank; a call may also name a memory, an algorithm, or the collective "buckets"."""
        rank, plain = self._variant(**what)
        return rank.check(**plain)

    def measure(self, **what: Any) -> dict[str, Any]:
        """See Rank; a call may also name a memory, an algorithm, or the collective "buckets"."""
        rank, plain = self._variant(**what)
        return rank.measure(**plain)

    def restart(self) -> dict[str, Any]:
        """Leave the group and form a new one in the same processes."""
        self._variants.clear()
        return self._torch("restart").restart()

    def steps(self, n_bytes: int, seconds: float) -> dict[str, Any]:
        """Time all-reduces for a while, and check every result."""
        from bench.scoreboard.steps import steady_steps

        return steady_steps(self.library, n_bytes, seconds)._asdict()

    def train(self, n_steps: int, n_warmup: int = 1, **how: Any) -> dict[str, Any]:
        """Time the next steps of a training.

        Args:
            how: see Variant.
        """
        from bench.scoreboard.training_steps import Variant

        return self._trained().train(Variant(**how), n_steps, n_warmup)._asdict()

    def added_cpu(self, n_parameters: int, n_steps: int) -> dict[str, Any]:
        """Return CPU seconds that wrappers add to a step of many small parameters."""
        from bench.scoreboard.training_costs import added_cpu_s

        return dict(added_cpu_s(self._trained(), n_parameters, n_steps))

    def in_flight(self, **how: Any) -> dict[str, Any]:
        """Time the averaging of several buffers at once."""
        from bench.scoreboard.training_costs import in_flight_s

        return {"times_s": [in_flight_s(self._trained(), **how)]}

    def footprint(self) -> dict[str, Any]:
        """Return the memory and the number of descriptors of this rank."""
        return {"pss_bytes": proportional_bytes(), "n_fds": len(os.listdir("/proc/self/fd"))}

    def peak(self) -> dict[str, Any]:
        """Return the peak resident memory, and the part of tensors in it."""
        tensors = sum(n_bytes for n_bytes, *_ in (*self._buffers, *self._shared))
        return {"pid": os.getpid(), "peak_bytes": peak_resident_bytes(), "tensor_bytes": tensors}

    def forget(self) -> dict[str, Any]:
        """Free the tensors, and the models that were trained."""
        self._shared.clear()
        if self._trainings is not None:
            self._trainings.clear()
        return super().forget()

    def _variant(
        self,
        memory: str = "private",
        algorithm: str = "",
        collective: str = "all_reduce",
        **what: Any,
    ) -> tuple[Rank, dict[str, Any]]:
        """Return a rank for such calls, and the remaining arguments."""
        kind = (memory, algorithm, collective == "buckets")
        if kind not in self._variants:
            library = self._suite.by(algorithm) if algorithm else self._suite.plain
            library = self._suite.in_buckets if collective == "buckets" else library
            if memory == "shared":
                library = replace(library, allocate=allocate_shared)
            buffers = self._shared if memory == "shared" else self._buffers
            self._variants[kind] = Rank(library, buffers)
        plain = "all_reduce" if collective == "buckets" else collective
        return self._variants[kind], {"collective": plain, **what}

    def _torch(self, task: str) -> TorchRank:
        if self._suite.torch is None:
            raise AttributeError(f"only ranks of torch.distributed may have a command {task!r}")
        return self._suite.torch

    def _trained(self) -> RankTrainings:
        self._torch("train")
        if self._trainings is None:
            from bench.scoreboard.training_steps import RankTrainings

            self._trainings = RankTrainings()
        return self._trainings


def peak_resident_bytes() -> int:
    """Return VmHWM of this process: its peak resident bytes, with shared pages."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    return int(found[1]) * 1024 if found else 0


def proportional_bytes() -> int:
    """Return Pss of this process: each shared page is divided among its processes."""
    rollup = Path("/proc/self/smaps_rollup").read_text(encoding="ascii")
    found = re.search(r"^Pss:\s+(\d+) kB", rollup, re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


if __name__ == "__main__":
    serve(JOIN, SuiteRank)
