"""Long-lived ranks for the tests of a file that need only a torch process group.

    def case_sums_are_equal() -> None: ...      # on each rank, in a new default group

    @pytest.mark.parametrize("case", cases_in(globals()))
    def test_torch(case: Case, ranks: SharedRanks) -> None:
        ranks.run(case)

The fixtures `ranks` and `three_ranks` of `conftest.py` start two and three ranks for each file.
Every call has its own default group, so a call that fails or ends its group affects no other.
Changes that a function makes to torch itself persist for later calls.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import pickle
import traceback
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any

import torch  # noqa: F401 - ranks are forked where it is imported
import torch.distributed as dist
from process.ranks import Ranks, load, start_ranks
from process.stage import pretend_hosts

Case = Callable[..., Any]

CALL_S = 90.0  # seconds; every call is far quicker
_IDLE_S = 600.0  # seconds that ranks wait for the next call


@contextlib.contextmanager
def gloo_group(**how: Any) -> Iterator[dist.ProcessGroup]:
    """Make a Gloo group between two barriers of all ranks over shoal.

    Gloo fails on a rank that still connects, or is still in a call, when another rank leaves.
    """
    group = dist.new_group(backend="gloo", **how)
    dist.barrier()
    yield group
    dist.barrier()


def cases_in(names: Mapping[str, Any]) -> list[Any]:
    """The functions called `case_` among a file's globals, as pytest's parameters."""
    import pytest

    return [
        pytest.param(case, id=name.removeprefix("case_"))
        for name, case in names.items()
        if name.startswith("case_")
    ]


class SharedRanks:
    """Ranks that are started with the first call. Leaving the context ends them.

    Args:
        env: the ranks' environment; with RANKS_PER_HOST=n, each n ranks count as one host.
    """

    def __init__(self, size: int, *, backend: str = "shoal", **env: str) -> None:
        self.size = size
        self._backend, self._env = backend, env
        self._ranks: Ranks | None = None
        self._n_calls = 0

    def run(self, function: Case, *args: Any) -> list[Any]:
        """Call a function of a test file in every rank.

        Returns:
            The returned values, by rank.

        Raises:
            AssertionError: a rank raised, died or hung.
        """
        if self._ranks is None:
            self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            where = self._store.port, self._backend
            self._ranks = start_ranks(answer_calls, self.size, *where, env=self._env)
            self._n_calls = 0
        number = self._n_calls = self._n_calls + 1
        call = inspect.getfile(function), function.__qualname__, args
        self._store.set(f"call {number}", pickle.dumps(call))
        answers = [self._answer(number, rank) for rank in range(self.size)]
        failed = [f"rank {rank}: {error}" for rank, (_, error) in enumerate(answers) if error]
        assert not failed, "\n".join(failed)
        return [value for value, _ in answers]

    def _answer(self, number: int, rank: int) -> tuple[Any, str]:
        key = f"answer {number} {rank}"
        try:
            self._store.wait([key], timedelta(seconds=CALL_S))
        except dist.DistStoreError:
            assert self._ranks is not None
            outcomes, self._ranks = self._ranks.wait(0), None
            raise AssertionError("\n".join(map(str, outcomes))) from None
        answer: tuple[Any, str] = pickle.loads(self._store.get(key))
        return answer

    def __enter__(self) -> SharedRanks:
        return self

    def __exit__(self, *_error: object) -> None:
        if self._ranks is None:
            return
        self._store.set(f"call {self._n_calls + 1}", b"")
        for outcome in self._ranks.wait():
            assert not outcome.error, str(outcome)
            assert not outcome.died, str(outcome)


def answer_calls(port: int, backend: str) -> None:
    """On a rank: make the calls in turn, and put each result or error into the store."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore("127.0.0.1", port, timeout=timedelta(seconds=_IDLE_S))
    if "RANKS_PER_HOST" in os.environ:
        pretend_hosts(int(os.environ["RANKS_PER_HOST"]))

    def meet(where: str) -> None:
        """Wait for all ranks, if the default group uses Gloo."""
        if backend == "gloo":  # see `gloo_group`; shoal's ranks may leave when they like
            store.set(f"{where} {number} {rank}", "")
            store.wait([f"{where} {number} {other}" for other in range(size)])

    number = 1
    while call := store.get(f"call {number}"):
        file, name, args = pickle.loads(call)
        print(f"call {number}: {name}", flush=True)  # noqa: T201 - a rank that dies names it
        answer: tuple[Any, str] = None, ""
        try:
            function = load(file, name)
            dist.init_process_group(
                backend,
                store=dist.PrefixStore(f"group {number}", store),
                rank=rank,
                world_size=size,
                timeout=timedelta(seconds=30),
            )
            meet("has a group")
            answer = function(*args), ""
        except BaseException:  # noqa: BLE001 - CheckpointException is one; the next call is made
            answer = None, traceback.format_exc()
        finally:
            meet("has called")
            if dist.is_initialized():
                dist.destroy_process_group()
        store.set(f"answer {number} {rank}", pickle.dumps(answer))
        number += 1
