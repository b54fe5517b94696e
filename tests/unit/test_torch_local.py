"""All-reduces that first sum among a host's GPUs: ranks agree which, where and in which order."""

import random
import threading
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed as dist
from unit.in_process import run_in_threads, run_well

from shoal.dtypes import DType, Op
from shoal.errors import ShoalError, TimedOut, UsageError
from shoal.frontend.torch import collectives
from shoal.frontend.torch.gpu import local_gpus, nccl
from shoal.frontend.torch.gpu.local_order import LocalOrder, Turn
from shoal.group.buffers import BufferView


def view_of(n: int, dtype: DType) -> BufferView:
    return BufferView(0, n, dtype, None)


def test_the_calls_for_gpus_depend_only_on_facts_equal_on_all_ranks() -> None:
    n = local_gpus.LEAST_BYTES // 4
    whole = [(view_of(n, DType.FLOAT32),)]
    assert local_gpus.takes(collectives.ALL_REDUCE, whole, (Op.SUM,))
    assert local_gpus.takes(collectives.ALL_REDUCE, whole, (Op.AVG,))
    assert local_gpus.takes(collectives.ALL_REDUCE, [(view_of(n, DType.INT32),)], (Op.SUM,))
    others: list[tuple[Any, Any, Any]] = [
        (collectives.REDUCE, whole, (0, Op.SUM)),
        (collectives.ALL_REDUCE, whole, (Op.MAX,)),
        (collectives.ALL_REDUCE, whole * 2, (Op.SUM,)),
        (collectives.ALL_REDUCE, [(view_of(n - 1, DType.FLOAT32),)], (Op.SUM,)),
        (collectives.ALL_REDUCE, [(view_of(n, DType.INT32),)], (Op.AVG,)),
        (collectives.ALL_REDUCE, [(view_of(n, DType.COMPLEX64),)], (Op.SUM,)),
    ]
    for other in others:
        assert not local_gpus.takes(*other)


def test_every_rank_needs_its_own_gpu_on_its_host() -> None:
    one, two, none = b"\1" * 16, b"\2" * 16, bytes(16)
    assert local_gpus.why_not([one, two, one, two], [0, 0, 1, 1]) == ""
    assert local_gpus.why_not([one, one, one, two], [0, 0, 1, 1]) == "ranks of a host share a GPU"
    why = local_gpus.why_not([one, two, none, two], [0, 0, 1, 1])
    assert why == "ranks [2] have no NCCL, or SHOAL_LOCAL_NCCL=no"


class Gpu:
    """A device with the methods used for the agreement; all ranks are on one host."""

    def __init__(self, name: str, fails: bool = False, hangs: Any = None) -> None:
        self.name, self.fails, self.hangs = name, fails, hangs
        self.made: list[MagicMock] = []

    def identity(self) -> str:
        return self.name

    def side_stream(self) -> None:
        return None

    def collectives(self, store: Any, rank: int, size: int, timeout_s: float) -> MagicMock:
        if self.hangs is not None:
            self.hangs.wait()
        if self.fails:
            raise RuntimeError("no NCCL for you")
        self.made.append(MagicMock(rank=0, size=1))
        return self.made[-1]


def agree(group: Any, gpus: list[Gpu]) -> bool:
    gpu, rail = gpus[group.rank], local_gpus.rail_in(group)
    store = dist.HashStore()
    calls = local_gpus.agreed_calls(group, rail, gpu, store, 60.0)  # type: ignore[arg-type]
    group.barrier()
    if calls is not None:
        calls.close()
    return calls is not None


@pytest.mark.parametrize(
    ("names", "word"),
    [("ab", "yes"), ("aab", "yes"), ("abc", "no")],
    ids=["one has none", "two share one", "the environment disables it"],
)
def test_all_ranks_or_none_use_gpus(names: str, word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_LOCAL_NCCL", word)
    gpus = [Gpu(name) for name in names] + [Gpu("")] * (3 - len(names))
    assert run_well(agree, 3, gpus) == [False] * 3
    assert not any(gpu.made for gpu in gpus)


def test_nccl_that_fails_on_one_rank_is_unused_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    gpus = [Gpu("a"), Gpu("b", fails=True), Gpu("c")]
    assert run_well(agree, 3, gpus) == [False] * 3
    assert [made.abort.call_count for gpu in gpus for made in gpu.made] == [1, 1]
    assert sum("RuntimeError: no NCCL for you" in each for each in caplog.messages) == 1
    assert all("Set SHOAL_LOCAL_NCCL=no to skip" in each for each in caplog.messages)


def test_a_hanging_nccl_is_abandoned_at_the_deadline_and_aborted_when_it_returns() -> None:
    gpu = Gpu("a", hangs=threading.Event())
    attempt = local_gpus._attempt(lambda: gpu.collectives(None, 0, 1, 60.0), 0.01)  # type: ignore[arg-type, return-value]
    assert attempt == (None, "no answer in 0.01 s")
    thread = next(each for each in threading.enumerate() if each.name == "shoal-local-connect")
    gpu.hangs.set()
    thread.join()
    assert [made.abort.call_count for made in gpu.made] == [1]


def test_a_first_call_of_nccl_that_does_not_end_is_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    backend, device = MagicMock(), MagicMock(place=torch.device("cpu"))
    device.has_passed.return_value = False
    monkeypatch.setattr(nccl, "_backend", lambda *_: backend)
    with pytest.raises(TimedOut, match="first calls among this host's GPUs"):
        nccl.NcclCollectives(device, dist.HashStore(), 0, 1, 0.01)
    backend.abort.assert_called_once()


SIZE, N_CALLS = 3, 12


def follow(group: Any, seed: int, ready: dict[Turn, set[int]]) -> list[Turn]:
    """Run one rank, which becomes ready for turns and makes calls in a random order.

    Args:
        ready: the ranks that are ready for each turn.
    """
    order = LocalOrder(group.subgroup(range(SIZE), "host"))
    choose = random.Random(seed + group.rank)
    coming, begun = [Turn(call, 0) for call in range(N_CALLS)], list[Turn]()
    n_made = 0
    while len(begun) < 2 * N_CALLS:
        if n_made < N_CALLS and choose.random() < 0.3:
            assert order.add(60.0) == n_made
            n_made += 1
        may = [turn for turn in coming if turn.call < n_made]
        if may and choose.random() < 0.5:
            turn = choose.choice(may)
            coming.remove(turn)
            ready[turn].add(group.rank)
            order.ready(turn, "it", 60.0)
        if (turn_now := order.next()) is not None:
            assert len(ready[turn_now]) == SIZE, turn_now
            begun.append(turn_now)
            if not turn_now.half:
                coming.append(Turn(turn_now.call, 1))
    group.barrier()
    order.close()
    return begun


@pytest.mark.parametrize("seed", range(4))
def test_all_ranks_begin_the_same_turns_in_the_same_order_once_all_are_ready(seed: int) -> None:
    turns = [Turn(call, half) for call in range(N_CALLS) for half in (0, 1)]
    begun, *others = run_well(follow, SIZE, 100 * seed, {turn: set() for turn in turns})
    assert others == [begun] * (SIZE - 1)
    assert [turn.call for turn in begun if not turn.half] == list(range(N_CALLS))
    assert sorted(begun) == turns


def error_in_turn(group: Any, calls: list[str], timeout_s: float) -> ShoalError | None:
    """Return the error of a rank in its turn of these calls; an empty one is not made."""
    order, error = LocalOrder(group.subgroup(range(SIZE), "host")), None
    order.add(60.0)
    if calls[group.rank]:
        order.ready(Turn(0, 0), calls[group.rank], timeout_s)
        try:
            while order.next() is None:
                pass
        except ShoalError as raised:
            error = raised
    group.barrier()
    return error


def test_a_missing_rank_is_named_at_the_deadline() -> None:
    first, second, third = run_in_threads(error_in_turn, SIZE, ["it", "", "it"], 0.05)
    assert second is None
    errors = [first, third]
    assert all(isinstance(error, TimedOut) for error in errors), errors
    assert any("rank 1" in str(error) for error in errors), errors


def test_ranks_with_different_turns_get_an_error_and_begin_none() -> None:
    # NCCL would not detect it.
    calls = ["float32[8]", "float32[8]", "float32[9]"]
    for error, call in zip(run_in_threads(error_in_turn, SIZE, calls, 60.0), calls, strict=True):
        assert isinstance(error, UsageError)
        words = f"this rank has called {call}, but another rank of this host made a different"
        assert words in str(error)
