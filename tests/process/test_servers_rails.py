"""Several workers per host: servers help along each rail and do not change the bits."""

import functools
import hashlib
import os
from pathlib import Path

import numpy as np
import pytest
from contract.fold_orders import folded
from process import serving
from process.arrays import Array
from process.serving import new_key, noise, served_group, wait_for_all
from process.stage import Stage, error_of, pretend_hosts
from wires import rounded

import shoal
from shoal.errors import Closed, PeerLost, TimedOut

N_HOSTS, N_LOCAL = 3, 2
N_RANKS = N_HOSTS * N_LOCAL
N_ELEMS = 4_000_003
LINE = 16  # floats in 64 bytes


def whole_lines(n_elems: int, n_parts: int) -> int:
    return -(-n_elems // (n_parts * LINE)) * LINE


def wanted(number: int, op: str = "sum", n_elems: int = N_ELEMS, is_narrow: bool = False) -> Array:
    """Return the sum that docs/bits.md defines for several workers per host."""
    travels = functools.partial(rounded, "bf16" if is_narrow else "identity")
    x = [noise(rank, number, n_elems) for rank in range(N_RANKS)]
    total = np.empty_like(x[0])
    length = whole_lines(n_elems, 4)
    for begin in range(0, n_elems, length):
        end = min(begin + length, n_elems)
        part = whole_lines(end - begin, N_LOCAL)
        for place in range(N_LOCAL):
            at = slice(begin + place * part, min(begin + (place + 1) * part, end))
            hosts = []
            for host in range(N_HOSTS):
                mates = [host * N_LOCAL + (place - k) % N_LOCAL for k in range(N_LOCAL)]
                held = x[mates[0]][at].copy()
                for mate in mates[1:]:
                    held += x[mate][at]
                hosts.append(travels(held))
            total[at] = travels(folded(hosts))
    return total / np.float32(N_RANKS) if op == "avg" else total


def check(
    group: shoal.Group, data: Array, number: int, op: str = "sum", *, is_narrow: bool = False
) -> None:
    """Check that all ranks have exactly the bits of that sum, which rank 0 compares for all."""
    bits = np.frombuffer(hashlib.blake2b(data.tobytes(), digest_size=8).digest(), np.uint8)
    of_all = np.empty(8 * group.size, np.uint8)
    group.all_gather(of_all, bits.copy())
    if group.rank == 0:
        assert data.tobytes() == wanted(number, op, data.size, is_narrow).tobytes()
        assert of_all.tobytes() == bits.tobytes() * group.size


@serving.with_a_dying_server(N_RANKS)
def test_workers_on_shared_hosts_are_served_along_rails_with_the_same_bits() -> None:
    """Sum alone, with a server, while it dies in mid-call, and alone again."""
    pretend_hosts(N_LOCAL)
    with shoal.init(timeout_s=30.0) as group:
        for number, op in enumerate(("sum", "avg", "sum")):
            if number == 1:
                serving.await_servers(group, 1)
                view = group.pool.view
            data = noise(group.rank, number, N_ELEMS)
            group.all_reduce(data, op)
            check(group, data, number, op)
        assert 8 <= view.n_shared <= 12  # four pieces a call; the first may have had no server
        data = [noise(group.rank, number, N_ELEMS) for number in (3, 4)]
        with serving.while_the_server_dies(group):
            works = [group.all_reduce(each, async_op=True) for each in data]
        for number, work in enumerate(works, start=3):
            work.wait()
            check(group, data[number - 3], number)
        serving.await_that(lambda: serving.n_servers(group) == 0, "no server")
        last = noise(group.rank, 5, N_ELEMS)
        group.all_reduce(last)
        check(group, last, 5)
        small = noise(group.rank, 6, 1000)
        group.all_reduce(small)
        assert abs(small - sum(noise(r, 6, 1000) for r in range(N_RANKS))).max() < 1e-4


@serving.with_a_server(N_RANKS)
def test_narrow_calls_by_number_are_served_along_rails() -> None:
    with served_group(1, N_LOCAL) as group:
        for op in ("sum", "avg"):
            numbers = group.reserve(3)
            group.skip(numbers[1])
            order = numbers[::2] if group.rank % 2 else numbers[::-2]
            data = {number: noise(group.rank, number, N_ELEMS) for number in order}
            works = [
                group.all_reduce(data[number], op, number=number, wire="bf16", async_op=True)
                for number in order
            ]
            wait_for_all(works)
            for number in sorted(order):
                check(group, data[number], number, op, is_narrow=True)
        assert group.pool.view.n_shared == 16


def call_while_servers_die(n_calls: int) -> None:
    """Make two calls at a time, in a different order on each rank."""
    stage = Stage.from_environment()
    with served_group(2, N_LOCAL, timeout_s=60.0) as group:
        for turn in range(n_calls):
            numbers = group.reserve(2)
            order = numbers[:: 1 if (group.rank + turn) % 2 else -1]
            data = {number: noise(group.rank, turn % 3, N_ELEMS) for number in order}
            works = [group.all_reduce(data[each], number=each, async_op=True) for each in order]
            if group.rank == 0:
                stage.cue(f"turn {turn}")
            wait_for_all(works)
            for number in numbers:
                check(group, data[number], turn % 3)


@pytest.mark.skipif(not os.environ.get("SHOAL_SOAK"), reason="soak: minutes")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(2))
def test_servers_that_die_and_return_cost_no_call_along_rails(tmp_path: Path, seed: int) -> None:
    serving.run_while_servers_die(
        call_while_servers_die, N_RANKS, 60, new_key(tmp_path), every=8, seed=seed
    )


@serving.with_a_server(N_RANKS, 3)
def test_the_others_go_on_without_a_worker_that_dies_on_a_shared_host() -> None:
    with served_group(1, N_LOCAL) as group:
        Stage.from_environment().meet(group.rank, N_RANKS, "served", victim=3)
        error = error_of(group.all_reduce, noise(group.rank, 0, N_ELEMS))
        assert isinstance(error, PeerLost)
        assert error.rank == 3
        with group.shrink() as survivors:
            data = np.ones(N_ELEMS, np.float32)
            survivors.all_reduce(data)
            assert (data == N_RANKS - 1).all()
            # Two hosts have two workers and one has one: no servers are used.
            assert serving.n_servers(survivors) == 0


@pytest.mark.parametrize("n_ranks", [N_HOSTS, N_RANKS])
@serving.with_a_server()
def test_a_call_that_a_worker_never_makes_ends_at_its_deadline(n_ranks: int) -> None:
    stage = Stage.from_environment()
    with served_group(1, n_ranks // N_HOSTS) as group:
        if group.rank < group.size - 1:
            data = noise(group.rank, 0, N_ELEMS)
            first, second = (error_of(group.all_reduce, data, timeout_s=0.5) for _ in range(2))
            assert isinstance(first, TimedOut), first
            assert isinstance(second, (TimedOut, Closed)), second
        stage.meet(group.rank, group.size, "has done")
