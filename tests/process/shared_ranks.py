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
import functools
import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any

import torch  # noqa: F401 - ranks are forked where it is imported
import torch.distributed as dist
from process.ranks import FileRanks, as_test, load
from process.stage import pretend_hosts

Case = Callable[..., Any]

CALL_S = 90.0  # seconds; every call is far quicker


@contextlib.contextmanager
def gloo_group(**how: Any) -> Iterator[dist.ProcessGroup]:
    """Make a Gloo group between two barriers of all ranks over shoal.

    Gloo fails on a rank that still connects, or is still in a call, when another rank leaves.
    """
    group = dist.new_group(backend="gloo", **how)
    dist.barrier()
    yield group
    dist.barrier()


def shared_ranks(size: int, **how: Any) -> Any:
    """Make a fixture of ranks that the tests of a file share; `how`: see SharedRanks."""
    import pytest

    @pytest.fixture(scope="module")
    def ranks() -> Iterator[SharedRanks]:
        with SharedRanks(size, **how) as some:
            yield some

    return ranks


def in_torch(fixture: str) -> Callable[[Case], Callable[..., None]]:
    """Make a test of a function that every rank of a fixture runs in a new default group."""

    def run(ranks: SharedRanks, function: Case, given: dict[str, Any]) -> list[Any]:
        return ranks.run(function, *given.values())

    return as_test(fixture, run)


def cases_in(names: Mapping[str, Any]) -> list[Any]:
    """The functions called `case_` among a file's globals, as pytest's parameters."""
    import pytest

    cases = [name for name in names if name.startswith("case_")]
    return [pytest.param(names[name], id=name.removeprefix("case_")) for name in cases]


class SharedRanks:
    """Ranks that are started with the first call. Leaving the context ends them.

    Args:
        env: the ranks' environment; with RANKS_PER_HOST=n, each n ranks count as one host.
    """

    def __init__(self, size: int, *, backend: str = "shoal", **env: str) -> None:
        self.size = size
        self._backend, self._env = backend, env
        self._ranks = FileRanks()
        self._store: dist.TCPStore | None = None
        self._n_calls = 0

    def run(self, function: Case, *args: Any, backend: str = "") -> list[Any]:
        """Call a function of a test file in every rank.

        Args:
            backend: of the call's default group; empty: that of the other calls.

        Returns:
            The returned values, by rank.

        Raises:
            AssertionError: a rank raised, died or hung.
        """
        if self._store is None:
            self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._n_calls += 1
        where = self._store.port, self._n_calls, backend or self._backend
        call = *where, inspect.getfile(function), function.__qualname__, args
        return self._ranks.run(call_in_group, self.size, *call, env=self._env, deadline_s=CALL_S)

    def __enter__(self) -> SharedRanks:
        return self

    def __exit__(self, *error: object) -> None:
        self._ranks.__exit__(*error)


def call_in_group(port: int, number: int, backend: str, file: str, name: str, args: Any) -> Any:
    """On a rank: make a call in a new default group."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = store_at(port)
    if "RANKS_PER_HOST" in os.environ:
        pretend_hosts(int(os.environ["RANKS_PER_HOST"]))

    def meet(where: str) -> None:
        """Wait for all ranks, if the default group uses Gloo."""
        if backend == "gloo":  # see `gloo_group`; shoal's ranks may leave when they like
            store.set(f"{where} {number} {rank}", "")
            store.wait([f"{where} {number} {other}" for other in range(size)])

    function = load(file, name)
    where = {"store": dist.PrefixStore(f"group {number}", store), "rank": rank, "world_size": size}
    try:
        dist.init_process_group(backend, **where, timeout=timedelta(seconds=30))
        meet("has a group")
        return function(*args)
    finally:
        meet("has called")
        if dist.is_initialized():
            dist.destroy_process_group()


@functools.cache
def store_at(port: int) -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", port, timeout=timedelta(seconds=CALL_S))
