"""What differs between the versions of torch, on whichever is installed."""

from __future__ import annotations

import importlib.util
from datetime import timedelta
from typing import Any

import pytest
from process.ranks import run_ranks
from process.stage import error_of

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not installed", allow_module_level=True)

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.distributed._functional_collectives import allow_inflight_collective_as_graph_input_ctx

SIZE = 3
TIMEOUT = timedelta(seconds=60)
N_WAITS = 200


def lacks(what: str) -> str:
    return f"torch {torch.__version__} {what}"


def told(error: Exception | None) -> list[str]:
    return [] if error is None else [type(error).__name__, str(error)]


# ---- groups ----


def split_without_rank_1() -> list[Any]:
    world = dist.group.WORLD
    if dist.get_rank() == 1:
        try:
            return [world.split_group([0, 2], group_name="even"), ""]
        except ValueError as error:
            return [None, str(error)]
    half = world.split_group([0, 2], group_name="even")
    tensor = torch.ones(1)
    half.allreduce([tensor]).wait()
    return [half.size(), tensor.item()]


def split_by_torch() -> list[Any]:
    half = error = None
    try:
        half = dist.split_group(None, [[0, 2], [1]])
    except RuntimeError as refused:
        error = str(refused)
    if half is None:
        return [None, error]
    tensor = torch.ones(1)
    dist.all_reduce(tensor, group=half)
    return [dist.get_process_group_ranks(half), tensor.item()]


def meet() -> dict[str, list[str]]:
    world = dist.group.WORLD
    return {
        "by the group": told(error_of(world.monitored_barrier, TIMEOUT)),
        "without a timeout": told(error_of(world.monitored_barrier)),
        "by torch": told(error_of(dist.monitored_barrier, world, TIMEOUT)),
    }


def estimate() -> list[str]:
    def go() -> None:
        with dist._time_estimator():
            pass

    return told(error_of(go))


# ---- works ----


def state(work: Any) -> list[Any]:
    return [work.is_completed(), work.is_success(), told(work.exception())]


def follow_a_receive(group: Any, gate: Any) -> list[Any]:
    """Rank 0 looks at a receive before rank 1 may send, and when it has waited."""
    if dist.get_rank() == 1:
        dist.barrier(gate)
        dist.send(torch.ones(2), 0, group=group)
    if dist.get_rank() != 0:
        return []
    work = dist.irecv(torch.zeros(2), 1, group=group)
    before = work.is_completed()
    dist.barrier(gate)
    work.wait()
    return [before, state(work)]


def run_out_of_time() -> list[Any]:
    """Rank 1 does not come; rank 0 looks at its Work when it has raised."""
    group = dist.new_group([0, 1], timeout=timedelta(seconds=0.3))
    if dist.get_rank() != 0:
        return []
    work = dist.all_reduce(torch.ones(1), group=group, async_op=True)
    return [told(error_of(work.wait)), state(work)]


def receive_from_any() -> list[Any]:
    tensor = torch.zeros(1)
    if dist.get_rank() == 2:
        dist.send(torch.tensor([7.0]), 0)
    return [dist.recv(tensor), tensor.item()] if dist.get_rank() == 0 else []


def futures_that_are_done(group: Any) -> int:
    n_done = 0
    for _ in range(N_WAITS):
        work = dist.all_reduce(torch.ones(4), group=group, async_op=True)
        work.wait()
        n_done += work.get_future().done()
    return n_done


def registered() -> list[int]:
    """How many works torch keeps: at first, and when each call has been waited for."""
    sizes = [c10d._get_work_registry_size()]
    with allow_inflight_collective_as_graph_input_ctx():
        dist.all_reduce(torch.ones(3), async_op=True).wait()
        sizes.append(c10d._get_work_registry_size())
        dist.all_reduce(torch.ones(3))
        sizes.append(c10d._get_work_registry_size())
    return sizes


def exchange_strided(group: Any) -> list[str]:
    strided = torch.ones(SIZE, SIZE).t()
    return told(error_of(dist.all_to_all_single, torch.ones(SIZE, SIZE), strided, group=group))


def ask_works_of_others() -> list[list[Any]]:
    """Works that are none of shoal's and, as torch's holders, do not say of what kind."""
    from shoal.frontend.torch.work_holder import patch_work_holders

    patch_work_holders()  # as making a group does, from torch 2.14 on
    future: torch.futures.Future[Any] = torch.futures.Future()
    work = c10d._create_work_from_future(future)
    before = work.is_completed()
    future.set_result([torch.ones(1)])
    return [[before, work.is_completed(), work.is_success()], told(error_of(work.source_rank))]


def live() -> dict[str, Any]:
    dist.init_process_group("shoal", timeout=TIMEOUT)
    gloo, gate = dist.new_group(backend="gloo"), dist.new_group([0, 1])
    world = dist.group.WORLD
    both = {"shoal": world, "gloo": gloo}
    seen = {
        "split": split_without_rank_1(),
        "split by torch": split_by_torch(),
        "meeting": meet(),
        "estimate": estimate() if hasattr(dist, "_time_estimator") else [],
        "receive": {name: follow_a_receive(group, gate) for name, group in both.items()},
        "out of time": run_out_of_time(),
        "from any": receive_from_any(),
        "futures": {name: futures_that_are_done(group) for name, group in both.items()},
        "registered": registered(),
        "strided": {name: exchange_strided(group) for name, group in both.items()},
    }
    dist.barrier()
    dist.destroy_process_group()
    return {**seen, "others": ask_works_of_others()}


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_ranks(live, SIZE)


def test_a_rank_outside_a_split_gets_none_or_an_error_and_lives(ranks: list[Any]) -> None:
    assert [ranks[0]["split"], ranks[2]["split"]] == [[2, 2.0]] * 2
    nothing, why = ranks[1]["split"]
    assert nothing is None
    if c10d.ProcessGroup not in type_of_groups():
        assert "got ranks [0, 2], of which this is none" in why
    else:
        assert why == ""


def type_of_groups() -> tuple[type, ...]:
    from shoal.frontend.torch.process_group import ShoalBackend, ShoalProcessGroup, takes_backends

    return (ShoalBackend if takes_backends() else ShoalProcessGroup).__mro__


def test_torchs_own_split_works_where_torch_lets_a_cpu_split(ranks: list[Any]) -> None:
    splits = [rank["split by torch"] for rank in ranks]
    if splits[0][0] is None and "support" not in splits[0][1]:
        pytest.skip(lacks(f"splits no groups of the CPU: {splits[0][1]}"))
    assert splits == [[[0, 2], 2.0], [[1], 1.0], [[0, 2], 2.0]]


def test_monitored_barriers_pass_when_all_come(ranks: list[Any]) -> None:
    for rank in ranks:
        assert rank["meeting"]["by the group"] == []
        assert rank["meeting"]["without a timeout"] == []


def test_torchs_monitored_barrier_passes_where_torch_does_not_ask_for_gloo(
    ranks: list[Any],
) -> None:
    errors = [rank["meeting"]["by torch"] for rank in ranks]
    if errors[0] and "GLOO" in errors[0][1]:
        pytest.skip(lacks(f"refuses: {errors[0][1]}"))
    assert errors == [[]] * SIZE


def test_an_estimate_of_time_is_refused_in_words(ranks: list[Any]) -> None:
    if not hasattr(c10d.Backend, "_supports_time_estimate"):
        pytest.skip(lacks("has no `_supports_time_estimate`"))
    for rank in ranks:
        kind, message = rank["estimate"]
        assert kind == "NotImplementedError"
        assert "estimator is not supported" in message


@pytest.mark.parametrize("backend", ["shoal", "gloo"])
def test_a_work_says_whether_it_is_complete(ranks: list[Any], backend: str) -> None:
    assert ranks[0]["receive"][backend] == [False, [True, True, []]]


def test_a_work_that_ran_out_of_time_says_so(ranks: list[Any]) -> None:
    raised, (completed, success, kept) = ranks[0]["out of time"]
    assert raised[0] == "TimedOut", raised
    assert (completed, success) == (True, False)
    assert kept == raised


def test_a_receive_from_any_tells_the_source(ranks: list[Any]) -> None:
    assert ranks[0]["from any"] == [2, 7.0]


@pytest.mark.parametrize("backend", ["shoal", "gloo"])
def test_every_future_is_done_when_wait_has_returned(ranks: list[Any], backend: str) -> None:
    assert [rank["futures"][backend] for rank in ranks] == [N_WAITS] * SIZE


def test_torch_keeps_no_work_that_has_been_waited_for(ranks: list[Any]) -> None:
    assert [rank["registered"] for rank in ranks] == [[0, 0, 0]] * SIZE


@pytest.mark.parametrize("backend", ["shoal", "gloo"])
def test_rows_of_a_strided_tensor_are_not_exchanged(ranks: list[Any], backend: str) -> None:
    for rank in ranks:
        kind, message = rank["strided"][backend]
        assert kind in ("UsageError", "ValueError")
        assert "contiguous" in message


def test_works_of_others_answer_for_themselves(ranks: list[Any]) -> None:
    for rank in ranks:
        states, no_source = rank["others"]
        assert states == [False, True, True]
        assert "sourceRank() not implemented" in no_source[1]
