"""The processes that fork ranks, see `warm`."""

import os
import socket
import tempfile

import pytest
from process.warm import N_FORKERS, Forker, address_of


def test_a_forker_starts_where_another_process_ended_before_it_started_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    modules, number = "json", N_FORKERS  # no test's ranks have it
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as other:
        other.bind(address_of(modules, number, os.environ))
        monkeypatch.setattr(os, "sched_yield", other.close)
        forker = Forker(modules, number, os.environ)
    with tempfile.TemporaryFile() as printed:
        rank = forker.start(b"", os.environ, printed.fileno(), printed.fileno())
        assert rank.wait(60.0) == 1  # it has found no task
