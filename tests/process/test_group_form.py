"""How a group comes to be, and every way in which it cannot: in words that say what to do."""

import contextlib
import os
import resource
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from process.ranks import run_ranks
from process.stage import Stage, error_of, pretend_hosts

import shoal
from shoal.errors import PeerLost, ShoalError, TimedOut, UsageError
from shoal.rendezvous import MemoryStore

LONG_S = 60.0


def total(group: shoal.Group) -> float:
    data = np.ones(1000)
    group.all_reduce(data)
    return float(data[0])


# Variables.


def init_under(rank: str, size: str) -> float:
    environment = {rank: os.environ["RANK"], size: os.environ["WORLD_SIZE"]}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        del os.environ[name]
    os.environ.update(environment)
    with shoal.init(timeout_s=LONG_S) as group:
        return total(group)


@pytest.mark.parametrize(
    "names", [("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS")]
)
def test_other_launchers_need_no_other_program(names: tuple[str, str]) -> None:
    assert run_ranks(init_under, 2, *names) == [2.0, 2.0]


# What is set wrongly, and words of the error.
WRONG = {
    "MASTER_ADDR=no-such-host.invalid": "no-such-host.invalid",
    "MASTER_ADDR=192.0.2.1": "192.0.2.1",
    "MASTER_PORT=http": "UsageError: MASTER_PORT='http'",
    "RANK=7": "UsageError: RANK=7 is out of range",
    "SHOAL_ALGO=fastest": "UsageError: SHOAL_ALGO='fastest' is not an algorithm; known are",
    "SHOAL_STAGING_BYTES=lots": "UsageError: SHOAL_STAGING_BYTES: cannot read the bytes 'lots'",
    "SHOAL_STAGING_BYTES=1000": "SHOAL_STAGING_BYTES='1000' is not from 8 MiB to 1 TiB",
    "SHOAL_SPIN_US=-1": "UsageError: SHOAL_SPIN_US='-1'",
    "SHOAL_KEY=short": "UsageError: SHOAL_KEY holds 5 bytes",
    "SHOAL_KEY_FILE=/nonexistent/key": "SHOAL_KEY_FILE=/nonexistent/key cannot be read",
    "SHOAL_PORT_RANGE=1-": "UsageError: SHOAL_PORT_RANGE='1-'",
    "SHOAL_PATHS=9": "UsageError: SHOAL_PATHS='9' is not a number from 1 to 8",
    "SHOAL_ISA=sse": "UsageError: SHOAL_ISA='sse' cannot run here",
    "SHOAL_DUMP_SIGNAL=KILL": "is none of USR1, USR2",
}


def init_wrongly() -> dict[str, str]:
    """The error of each wrong variable, set alone."""
    texts = {}
    before = dict(os.environ)
    for wrong in WRONG:
        name, _, value = wrong.partition("=")
        os.environ[name] = value
        error = error_of(shoal.init, timeout_s=0.5)
        texts[wrong] = f"{type(error).__name__}: {error}"
        os.environ.clear()
        os.environ.update(before)
    with shoal.init() as group:  # and all is well without them
        assert total(group) == 1
    return texts


def test_wrong_variables_are_named_with_what_they_should_be() -> None:
    (texts,) = run_ranks(init_wrongly, 1)
    for wrong, text in texts.items():
        assert WRONG[wrong] in text, (wrong, text)


def init_through_no_interface() -> tuple[Exception | None, Exception | None]:
    pretend_hosts(1)
    error = error_of(shoal.init, timeout_s=2)
    return error, error_of(shoal.empty, 3)


def test_an_interface_that_does_not_exist_is_named_with_those_that_do() -> None:
    env = {"SHOAL_SOCKET_IFNAME": "nosuch0"}
    outcomes = run_ranks(init_through_no_interface, 2, env=env)
    for error, other in outcomes:
        assert isinstance(error, (UsageError, PeerLost, TimedOut)), error
        assert other is None
    first, _ = outcomes[0]
    assert isinstance(first, UsageError)
    assert "nosuch0" in str(first)
    assert "lo" in str(first)


def init_on_a_taken_port() -> Exception | None:
    return error_of(shoal.init, timeout_s=1)


def test_a_port_in_use_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        first, second = run_ranks(init_on_a_taken_port, 2, env={"MASTER_PORT": port})
    assert isinstance(first, UsageError)
    assert port in str(first)
    assert "MASTER_PORT" in str(first)
    assert isinstance(second, TimedOut)
    assert port in str(second)


# Ranks that do not come.


def init_as_rank_1_of_2() -> Exception | None:
    os.environ.update(RANK="1", WORLD_SIZE="2")
    return error_of(shoal.init, timeout_s=0.5)


def test_a_missing_rank_0_is_named_at_the_deadline() -> None:
    (error,) = run_ranks(init_as_rank_1_of_2, 1)
    assert isinstance(error, TimedOut)
    assert "is rank 0 running there" in str(error)


def init_with_a_key(key: str, own_store: bool) -> Exception | None:
    rank, stage = int(os.environ["RANK"]), Stage.from_environment()
    if rank == 1:
        os.environ["SHOAL_KEY"] = key
    if not own_store:
        return error_of(lambda: shoal.init(stage.store, rank, 2, timeout_s=LONG_S).close())
    if rank == 1:
        error = error_of(lambda: shoal.init(timeout_s=LONG_S).close())
        stage.cue("refused")
        return error
    while True:  # nobody reaches rank 0, which stays until rank 1 has been refused
        error = error_of(lambda: shoal.init(timeout_s=1.0).close())
        if stage.store.try_get("cue/refused") is not None:
            return error


@pytest.mark.parametrize("own_store", [True, False])
def test_a_rank_with_another_job_key_gets_an_error_that_says_so(own_store: bool) -> None:
    with Stage() as stage:
        env = {**stage.env, "SHOAL_KEY": "the key that all the others hold"}
        args = "a key that nobody holds", own_store
        first, second = run_ranks(init_with_a_key, 2, *args, env=env)
    # Rank 0's own store refuses a rank with another key, so no such rank can leave a record there.
    assert isinstance(first, TimedOut if own_store else UsageError)
    assert isinstance(second, UsageError)
    for error in (second,) if own_store else (first, second):
        assert "holds another" in str(error)
        assert "SHOAL_KEY" in str(error)


# Again and again.


def init_three_times() -> list[float]:
    totals = []
    for _ in range(3):
        with shoal.init() as group:
            totals.append(total(group))
    return totals


def test_a_program_may_form_one_group_after_another_at_the_same_port() -> None:
    assert run_ranks(init_three_times, 4) == [[4.0, 4.0, 4.0]] * 4


def init_again_after_an_error() -> tuple[Exception | None, float]:
    """Rank 1 is late for the first meeting: the others give up, and all come to the second."""
    stage = Stage.from_environment()
    error = None
    if os.environ["RANK"] != "1":
        error = error_of(shoal.init, timeout_s=0.5)
        stage.cue(f"rank {os.environ['RANK']} has given up")
    for rank in (0, 2):
        stage.await_cue(f"rank {rank} has given up")
    with shoal.init(timeout_s=LONG_S) as group:
        return error, total(group)


def test_ranks_that_gave_up_can_meet_again() -> None:
    with Stage() as stage:
        results = run_ranks(init_again_after_an_error, 3, env=stage.env)
    for rank, (error, sum_of_all) in enumerate(results):
        assert sum_of_all == 3.0
        assert rank == 1 or isinstance(error, (TimedOut, PeerLost))


# Descriptors and memory.


@contextlib.contextmanager
def limited(kind: int, limit: int) -> Iterator[None]:
    before = resource.getrlimit(kind)
    resource.setrlimit(kind, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(kind, before)


def n_open() -> int:
    return len(os.listdir("/proc/self/fd")) - 1  # the listing's own


def form_two(timeout_s: float) -> list[shoal.Group | Exception]:
    """Two ranks as two threads of this process."""
    store = MemoryStore()

    def one(rank: int) -> shoal.Group | Exception:
        try:
            return shoal.init(store, rank, 2, timeout_s=timeout_s)
        except Exception as error:  # noqa: BLE001 - the test looks at it
            return error

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(one, range(2)))


def form_with_ever_more_descriptors() -> tuple[list[str], int]:
    """From none at all to enough; every failure must say what to do, and leave nothing behind."""
    texts = []
    for group in form_two(LONG_S):  # loads everything that needs descriptors once
        assert isinstance(group, shoal.Group), group
        group.close()
    at_rest = n_open()
    for n_free in range(64):
        with limited(resource.RLIMIT_NOFILE, at_rest + n_free):
            groups = form_two(0.2)
        formed = [group for group in groups if isinstance(group, shoal.Group)]
        texts += [
            f"{type(each).__name__}: {each}" for each in groups if isinstance(each, Exception)
        ]
        for group in formed:
            group.close()
        # Also while somebody keeps the errors and the groups.
        assert n_open() == at_rest, (n_free, os.listdir("/proc/self/fd"))
        if len(formed) == 2:
            return texts, n_free
    raise AssertionError("64 descriptors were not enough")


def test_without_descriptors_forming_fails_in_words_and_leaves_nothing_behind() -> None:
    ((texts, n_needed),) = run_ranks(form_with_ever_more_descriptors, 1)
    assert 4 < n_needed < 64
    assert any("ulimit -n" in text for text in texts)
    for text in texts:
        in_words = "ulimit -n" in text and text.startswith(("UsageError", "ShoalError"))
        # Whoever got its descriptors waits in vain for the other.
        assert in_words or text.startswith(("TimedOut", "PeerLost")), text
        assert in_words or "too many open files" not in text  # who has none says it, in words


def use_memory_without_descriptors() -> list[Any]:
    """The group is there; now the process has no descriptor left."""
    results: list[Any] = []
    with shoal.init() as group:
        mine = shoal.empty(100_000)
        mine[:] = 1
        with limited(resource.RLIMIT_NOFILE, 3 if group.rank == 1 else 1000):
            results.append(error_of(shoal.empty, 10))
            data = np.ones(100_000, np.float32)
            group.all_reduce(data)
            results.append(float(data[0]))
        group.barrier()
        group.all_reduce(mine)
        results.append(float(mine[-1]))
    return results


def test_a_group_goes_on_while_its_process_has_no_descriptor_left() -> None:
    (_, *first), (error, *second) = run_ranks(use_memory_without_descriptors, 2)
    assert first == second == [2.0, 2.0]
    assert isinstance(error, ShoalError)
    assert "shoal.empty((10,), float32)" in str(error)
    assert "ulimit -n" in str(error)


def receive_memory_without_descriptors() -> Exception | None:
    """Rank 0 offers shared memory that rank 1 has no descriptor to map with."""
    with shoal.init() as group:
        data = shoal.empty(1_000_000) if group.rank == 0 else np.ones(1_000_000, np.float32)
        data[:] = 1
        if group.rank == 0:
            group.barrier()
            return error_of(group.all_reduce, data)
        with limited(resource.RLIMIT_NOFILE, 3):
            group.barrier()  # NOT before: the offer could come while there are descriptors
            error = error_of(group.all_reduce, data)
        assert error is not None or data[0] == 2
        return error


def test_memory_that_cannot_be_mapped_for_want_of_descriptors_is_a_clear_error() -> None:
    for error in run_ranks(receive_memory_without_descriptors, 2):
        assert isinstance(error, ShoalError)
        assert "descriptor" in str(error)


def ask_for_too_much_memory() -> dict[str, str]:
    texts = {}
    for n_elems in (1 << 44, 1 << 58):  # 64 TiB, 1 EiB
        texts[f"empty {n_elems}"] = str(error_of(shoal.empty, n_elems))
    with limited(resource.RLIMIT_FSIZE, 1 << 16):
        texts["limited"] = str(error_of(shoal.empty, 1 << 20))
        for rank, each in enumerate(form_two(0.5)):
            texts[f"arena of rank {rank}"] = f"{type(each).__name__}: {each}"
    with open("/proc/self/statm", encoding="ascii") as statm:
        n_mapped = int(statm.read().split()[0]) * resource.getpagesize()
    with limited(resource.RLIMIT_AS, n_mapped + (16 << 20)):
        texts["addresses"] = str(error_of(shoal.empty, 64 << 20, "uint8"))
    kept = shoal.empty(10)
    assert (kept == 0).all()
    assert n_open() < 64
    return texts


def test_memory_that_the_kernel_does_not_have_is_a_clear_error() -> None:
    (texts,) = run_ranks(ask_for_too_much_memory, 1)
    for name, text in texts.items():
        assert "shared memory" in text, (name, text)
        is_file_size = name == "limited" or name.startswith("arena")
        assert ("ulimit -f" if is_file_size else "free memory") in text, (name, text)
        assert not is_file_size or "free memory" not in text, (name, text)
    arenas = [text for name, text in texts.items() if name.startswith("arena")]
    # Whoever is first to fail says so, and the other may hear of it before it fails itself.
    assert any(text.startswith("ShoalError: rank") for text in arenas), arenas
