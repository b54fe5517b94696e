"""Forming a group, and errors of forming, which name the remedy."""

import codecs
import contextlib
import io
import os
import platform
import re
import resource
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from process.ranks import on_new_ranks, on_ranks, run_ranks
from process.stage import Stage, descriptors, error_of, pretend_hosts

import shoal
from shoal.errors import ShoalError, TimedOut, UsageError
from shoal.rendezvous import MemoryStore

LONG_S = 60.0


def total(group: shoal.Group) -> float:
    data = np.ones(1000)
    group.all_reduce(data)
    return float(data[0])


# Wrong settings, and text of the error.
WRONG = {
    "MASTER_ADDR=no-such-host.invalid": "no-such-host.invalid",
    "MASTER_ADDR=192.0.2.1": "192.0.2.1",
    "MASTER_PORT=http": "UsageError: MASTER_PORT='http'",
    "RANK=7": "UsageError: RANK=7 is out of range",
    "SHOAL_ALGO=fastest": "UsageError: SHOAL_ALGO='fastest' is not an algorithm; known are",
    "SHOAL_STAGING_BYTES=lots": "UsageError: SHOAL_STAGING_BYTES: cannot read the bytes 'lots'",
    "SHOAL_STAGING_BYTES=1000": "SHOAL_STAGING_BYTES='1000' must be from 8 MiB to 1 TiB",
    "SHOAL_SPIN_US=-1": "UsageError: SHOAL_SPIN_US='-1'",
    "SHOAL_KEY=short": "UsageError: SHOAL_KEY holds 5 bytes",
    "SHOAL_KEY_FILE=/nonexistent/key": "SHOAL_KEY_FILE=/nonexistent/key cannot be read",
    "SHOAL_PORT_RANGE=1-": "UsageError: SHOAL_PORT_RANGE='1-'",
    "SHOAL_PATHS=9": "UsageError: SHOAL_PATHS='9' is not a number from 1 to 8",
    "SHOAL_ISA=sse": "UsageError: SHOAL_ISA='sse' cannot run here",
    "SHOAL_DUMP=/nowhere/%r": "UsageError: SHOAL_DUMP='/nowhere/%r' cannot be used on",
    "SHOAL_DUMP_SIGNAL=KILL": "is not one of USR1, USR2",
}


@on_ranks(1)
def test_wrong_variables_are_named_with_the_expected_values() -> None:
    before = dict(os.environ)
    for wrong, text in WRONG.items():
        name, _, value = wrong.partition("=")
        os.environ[name] = value
        # Rank 0's own store would stay for a second, to report the error to the others.
        own = () if name in ("RANK", "MASTER_ADDR", "MASTER_PORT") else (MemoryStore(), 0, 1)
        error = error_of(shoal.init, *own, timeout_s=0.5)
        assert text in f"{type(error).__name__}: {error}", (wrong, error)
        os.environ.clear()
        os.environ.update(before)
    with shoal.init() as group:  # without them forming succeeds
        assert total(group) == 1


def init_on_a_taken_port() -> Exception | None:
    return error_of(shoal.init, timeout_s=1)


def test_a_port_in_use_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        first, second = run_ranks(init_on_a_taken_port, 2, env={"MASTER_PORT": port})
    assert isinstance(first, UsageError)
    assert f"port {port} at 127.0.0.1 is taken" in str(first)
    assert "MASTER_PORT" in str(first)
    assert isinstance(second, TimedOut)
    assert port in str(second)


def log_of_rank() -> list[str]:
    pretend_hosts(2)
    os.environ.update(SHOAL_DEBUG="INFO", SHOAL_SOCKET_IFNAME="lo", SHOAL_LINK="1Gb")
    log = io.StringIO()
    with contextlib.redirect_stderr(log), shoal.init(timeout_s=LONG_S) as group:
        formed = len(log.getvalue().splitlines())
        total(group)
    return log.getvalue().splitlines()[:formed]


def test_rank_0_logs_one_block_when_a_group_forms() -> None:
    here, key = socket.gethostname(), "k" * 32
    first, *others = run_ranks(log_of_rank, 4, env={"SHOAL_KEY": key})
    assert others == [[]] * 3
    head = "shoal INFO group 'world': "
    assert all(line.startswith(head) for line in first)
    facts, hosts, address, links, table = (line.removeprefix(head) for line in first)
    for fact in (shoal.__version__, f"Python {platform.python_version()}", "key: SHOAL_KEY;"):
        assert fact in facts
    assert key not in facts
    assert hosts == f"4 ranks on 2 hosts: {here}, ranks 0, 1; {here}, ranks 2, 3"
    assert address == "rank 0 listens at 127.0.0.1 (lo), by SHOAL_SOCKET_IFNAME=lo"
    assert "1Gb" in links and "SHOAL_LINK" in links and "1 channel, since" in links  # noqa: PT018
    assert re.match(r"all_reduce by \S+ up to \d+ KiB, .*\S+ up to 1 GiB$", table)


@contextlib.contextmanager
def limited(kind: int, limit: int) -> Iterator[None]:
    before = resource.getrlimit(kind)
    resource.setrlimit(kind, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(kind, before)


def form_two(timeout_s: float) -> list[shoal.Group | Exception]:
    store = MemoryStore()

    def one(rank: int) -> shoal.Group | Exception:
        try:
            return shoal.init(store, rank, 2, timeout_s=timeout_s)
        except Exception as error:  # noqa: BLE001 - the test checks it
            return error

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(one, range(2)))


@on_ranks(1)
def test_without_descriptors_forming_fails_clearly_and_leaks_nothing() -> None:
    texts = []
    for group in form_two(LONG_S):  # loads everything that needs descriptors once
        assert isinstance(group, shoal.Group), group
        group.close()
    at_rest = len(descriptors())
    for n_free in range(64):
        with limited(resource.RLIMIT_NOFILE, at_rest + n_free):
            groups = form_two(0.2)
        formed = [group for group in groups if isinstance(group, shoal.Group)]
        texts += [f"{type(one).__name__}: {one}" for one in groups if isinstance(one, Exception)]
        for group in formed:
            group.close()
        # Also while the caller keeps the errors and groups.
        assert len(descriptors()) == at_rest, (n_free, os.listdir("/proc/self/fd"))
        if len(formed) == 2:
            break
    assert len(formed) == 2, "64 descriptors were not enough"
    assert n_free > 4
    assert any("ulimit -n" in text for text in texts)
    for text in texts:
        in_words = "ulimit -n" in text and text.startswith(("UsageError", "ShoalError"))
        # A rank with descriptors waits for the other, and only that one names the shortage.
        assert in_words or text.startswith(("TimedOut", "PeerLost")), text
        assert in_words or "too many open files" not in text


@on_new_ranks(1, has_stage=True)
def test_a_rank_that_cannot_start_a_thread_fails_clearly_and_leaks_nothing() -> None:
    store = Stage.from_environment().store
    # Load everything first: another user may not read the files.
    shoal.init(store, 0, 1).close()
    codecs.lookup("ascii")
    if os.getuid() == 0:
        os.setuid(65534)  # the limit does not apply to root
    before = len(descriptors())
    with limited(resource.RLIMIT_NPROC, 1):
        errors = [error_of(shoal.init, store, 0, size) for size in (1, 1, 2)]
        assert len(descriptors()) == before
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == set()
    with shoal.init(store, 0, 1) as group:
        group.barrier()
    for error in errors:
        assert type(error) is ShoalError, error
        assert "rank 0 cannot join: could not start " in str(error)
        assert "ulimit -u" in str(error)


@on_ranks(2)
def test_without_descriptors_a_group_works_until_it_must_map_memory() -> None:
    with shoal.init() as group:
        mine, data = shoal.empty(100_000), np.ones(100_000, np.float32)
        mine[:] = 1
        with limited(resource.RLIMIT_NOFILE, 3 if group.rank == 1 else 1000):
            refused = error_of(shoal.empty, 10)
            group.all_reduce(data)
            assert data[0] == 2
        group.barrier()
        group.all_reduce(mine)
        assert mine[-1] == 2
        # Rank 0 offers shared memory that rank 1 has no descriptor to map with.
        offered = shoal.empty(1_000_000) if group.rank == 0 else np.ones(1_000_000, np.float32)
        with limited(resource.RLIMIT_NOFILE, 3 if group.rank == 1 else 1000):
            group.barrier()  # NOT before: the offer could arrive while there are descriptors
            error = error_of(group.all_reduce, offered)
        if group.rank == 1:
            assert isinstance(refused, ShoalError)
            assert "shoal.empty((10,), float32)" in str(refused)
            assert "ulimit -n" in str(refused)
    assert isinstance(error, ShoalError)
    assert "descriptor" in str(error)


@on_ranks(1)
def test_a_request_for_more_memory_than_exists_is_a_clear_error() -> None:
    texts = {}
    for n_elems in (1 << 44, 1 << 58):  # 64 TiB, 1 EiB
        texts[f"empty {n_elems}"] = str(error_of(shoal.empty, n_elems))
    with limited(resource.RLIMIT_FSIZE, 1 << 16):
        texts["limited"] = str(error_of(shoal.empty, 1 << 20))
        for rank, each in enumerate(form_two(LONG_S)):
            texts[f"arena of rank {rank}"] = f"{type(each).__name__}: {each}"
    with open("/proc/self/statm", encoding="ascii") as statm:
        n_mapped = int(statm.read().split()[0]) * resource.getpagesize()
    with limited(resource.RLIMIT_AS, n_mapped + (16 << 20)):
        texts["addresses"] = str(error_of(shoal.empty, 64 << 20, "uint8"))
    kept = shoal.empty(10)
    assert (kept == 0).all()
    assert len(descriptors()) < 64
    for name, text in texts.items():
        assert "shared memory" in text, (name, text)
        is_file_size = name == "limited" or name.startswith("arena")
        assert ("ulimit -f" if is_file_size else "free memory") in text, (name, text)
        assert not is_file_size or "free memory" not in text, (name, text)
    arenas = [text for name, text in texts.items() if name.startswith("arena")]
    # The first rank to fail reports it, which may reach the other before that fails itself.
    assert any(text.startswith("ShoalError: rank") for text in arenas), arenas


N_CALLS = 60
N_ELEMS = 1 << 20  # 4 MiB of float32, and as much scratch
CEILING_MIB = 50  # SHOAL_STAGING_BYTES


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


@pytest.mark.parametrize("ranks_per_host", [2, 1])
@on_new_ranks(2, env={"SHOAL_ALGO": "all_reduce:direct"})
def test_scratch_of_many_calls_stays_under_the_ceiling_of_staging(ranks_per_host: int) -> None:
    pretend_hosts(ranks_per_host)
    with shoal.init() as group:
        data = [np.full(N_ELEMS, at + group.rank, np.float32) for at in range(N_CALLS)]
        group.all_reduce(np.zeros(N_ELEMS, np.float32))
        before = peak_mib()
        works = [group.all_reduce(each, async_op=True) for each in data]
        for at, (work, each) in enumerate(zip(works, data, strict=True)):
            work.wait()
            assert (each == 2 * at + 1).all()
        # Besides the ceiling there are slots, one call's scratch, and memory the allocator keeps:
        # 48 to 88 MiB in all, where the scratch of all calls alone would be 240.
        assert peak_mib() - before < 2.5 * CEILING_MIB
