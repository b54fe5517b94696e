"""Calls that a server serves: the binding's side of native/test/test_served.cc."""

from __future__ import annotations

import os
import signal

import numpy as np
import pytest
from process.ranks import run_ranks, start_ranks
from process.stage import pretend_hosts

import shoal
from shoal import engine
from shoal.dtypes import DType, Op
from shoal.limits import FIRST_NAMED_KEY, SEGMENT_BYTES
from shoal.schedule.stripes import Stripe
from shoal.schedule.weighted import weighted_all_reduce

N_WORKERS = 2


def plan_of(rank: int, n_elems: int) -> engine.Plan:
    """An all-reduce of float32 by workers 0 and 1 and one server, rank 2: a chunk for each."""
    chunks = [Stripe(chunk=worker, first=worker, reducer=N_WORKERS) for worker in range(N_WORKERS)]
    halves = [0, 2 * n_elems], [2 * n_elems, 2 * n_elems]
    nothing: tuple[list[int], list[int]] = ([], [])
    data, scratch = (halves, nothing) if rank < N_WORKERS else (nothing, halves)
    return engine.Plan.make(
        program=engine.lower(weighted_all_reduce(rank, N_WORKERS, chunks), N_WORKERS + 1),
        layouts=[data, nothing, nothing, scratch],
        dtype=DType.FLOAT32,
        op=Op.SUM,
        divisor=N_WORKERS,
        codec=0,
        descriptor=f"average of {n_elems} by a server",
        agreement=f"average of {n_elems} by a server",
        by_pair=False,
        n_workers=N_WORKERS,
    )


def serve_or_average(ranks_per_host: int) -> list[float]:
    """The server knows of one plan before the workers call, and of the other when they wait."""
    pretend_hosts(ranks_per_host)
    with shoal.init() as group:
        native, averages = group._native, []
        assert isinstance(native, engine.NativeGroup)
        for n_elems in (8, 500_000):
            is_server = group.rank == N_WORKERS
            if is_server and n_elems == 8:
                native.serve(plan_of(group.rank, n_elems))
            group.barrier()
            if is_server:
                native.serve(plan_of(group.rank, n_elems))
                continue
            for key in (FIRST_NAMED_KEY + n_elems, FIRST_NAMED_KEY + n_elems + 1):
                data = np.full(n_elems, 1 + 2.0 * group.rank, np.float32)
                address = engine.address_of(memoryview(data))
                call = native.post_in_place(
                    plan_of(group.rank, n_elems), key, address, 30.0, False, 0
                )
                assert call.wait(30.0)
                assert call.succeeded(), call.error()
                n_segments = -(-2 * n_elems // SEGMENT_BYTES)  # of each half
                full = ((1 << n_segments) - 1).to_bytes(-(-n_segments // 8), "little")
                assert sorted(call.landed()) == [(0, full), (1, full)]
                averages.append(float(data.mean()))
        group.barrier()
        return averages


@pytest.mark.parametrize("ranks_per_host", [1, 3])
def test_calls_of_workers_are_served_by_a_rank_that_makes_none(ranks_per_host: int) -> None:
    served = run_ranks(serve_or_average, N_WORKERS + 1, ranks_per_host)
    assert served == [[2.0] * 4, [2.0] * 4, []]


def lose_a_server() -> list[tuple[int, bytes]]:
    """The second worker posts nothing: nothing can have landed when the server dies."""
    with shoal.init() as group:
        native = group._native
        assert isinstance(native, engine.NativeGroup)
        word = np.zeros(1)
        if group.rank == N_WORKERS:
            group.recv(word, 0)
            os.kill(os.getpid(), signal.SIGKILL)
        if group.rank == 1:
            return []
        data = np.full(8, 1.0, np.float32)
        address = engine.address_of(memoryview(data))
        call = native.post_in_place(plan_of(0, 8), FIRST_NAMED_KEY, address, 30.0, True, 0)
        with pytest.raises(RuntimeError, match="not over yet"):
            call.landed()
        group.send(word, N_WORKERS)
        while not call.wait(1.0):
            pass
        assert call.error()[:2] == (engine.Fault.PEER_LOST, N_WORKERS)
        assert data.tolist() == [1.0] * 8
        return sorted(call.landed())


def test_a_call_that_lost_its_server_tells_which_segments_are_still_the_input() -> None:
    with start_ranks(lose_a_server, N_WORKERS + 1) as ranks:
        worker, *_ = ranks.wait(30)
    assert worker.value == [(0, b"\0"), (1, b"\0")], worker


def refuse_plans() -> list[str]:
    with shoal.init() as group:
        native = group._native
        assert isinstance(native, engine.NativeGroup)
        return [refusal(native, plan_of(rank, 8)) for rank in (0, 2)]


def refusal(native: engine.NativeGroup, plan: engine.Plan) -> str:
    try:
        native.serve(plan)
    except ValueError as error:
        return str(error)
    return ""


def test_a_plan_that_a_rank_cannot_serve_is_refused_with_the_reason() -> None:
    of_two = "a plan for 3 ranks cannot be served in a group of 2"
    assert run_ranks(refuse_plans, 2) == [[of_two] * 2] * 2
    rank_0, _, server = run_ranks(refuse_plans, 3)
    assert rank_0 == ["rank 0 is one of 2 workers, and serves nothing"] * 2
    assert server == ["a served plan may only receive, finish and send chunks of scratch", ""]


def test_a_plan_has_no_more_workers_than_its_group_has_ranks() -> None:
    builder = engine.ProgramBuilder.of(2)
    nothing: tuple[list[int], list[int]] = ([], [])
    with pytest.raises(ValueError, match="no more workers than its group has ranks"):
        engine.Plan.make(
            builder.done(), [nothing] * 4, 0, 0, 1, 0, "none", "none", False, n_workers=3
        )
