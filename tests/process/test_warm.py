"""The forkers of `warm`."""

import os
import random
import socket
import struct
import tempfile

import pytest
from process import ranks as of_ranks
from process.ranks import FileRanks
from process.warm import N_FORKERS, Fork, Forker, address_of, forker_for


def test_a_forker_starts_after_another_process_died_before_starting_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    modules, number = "json", random.randrange(N_FORKERS, 1 << 32)  # no test's ranks have it
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as other:
        other.bind(address_of(modules, number, os.environ))
        monkeypatch.setattr(os, "sched_yield", other.close)
        forker = Forker(modules, number, os.environ)
    with tempfile.TemporaryFile() as printed:
        rank = forker.start(b"", os.environ, printed.fileno(), printed.fileno())
        assert rank.wait(60.0) == 1  # it has found no task


def test_only_a_variable_read_at_start_gives_a_rank_a_fresh_interpreter() -> None:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    forker = forker_for(0, "json", env)
    assert forker is not None
    assert forker_for(0, "json", env | {"TORCHINDUCTOR_CACHE_DIR": "elsewhere"}) is forker
    assert forker_for(0, "json", env | {"TORCH_LOGS": "all"}) is None


def test_a_rank_whose_forker_has_died_is_named_once_and_not_killed() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        theirs.send(struct.pack("i", (1 << 31) - 1))  # not a pid
    rank = Fork(ours)
    with pytest.raises(AssertionError, match="the process that forks ranks has died"):
        rank.wait(60.0)
    rank.kill()


def test_ranks_of_a_file_that_do_not_connect_end_their_call_at_its_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with FileRanks() as ranks:
        with monkeypatch.context() as patched:
            patched.setattr(of_ranks, "serve_calls", connect_nowhere)
            with pytest.raises(AssertionError) as raised:
                ranks.run(own_pid, 2, deadline_s=3.0)
        assert "ranks [0, 1] did not connect in time" in str(raised.value)
        assert "rank 1 returned None" in str(raised.value)
        assert len(set(ranks.run(own_pid, 2))) == 2


def connect_nowhere(_address: str) -> None:
    pass


def own_pid() -> int:
    return os.getpid()
