"""Processes without a key, which a benchmark starts against a rank."""

import socket
import subprocess
import sys

import pytest
from process.ranks import run_ranks
from process.stage import error_of

from bench.scoreboard.strangers import own_listener


def find_own_listener() -> tuple[str, bool]:
    nowhere = str(error_of(own_listener))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return nowhere, own_listener() == listener.getsockname()


def test_a_process_finds_its_listener_or_raises() -> None:
    # NOT in this process: an earlier test may have left an uncollected listener.
    assert run_ranks(find_own_listener, 1) == [("this process has no listener", True)]


def test_strangers_hold_some_connections_and_send_garbage_on_others() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address, port = listener.getsockname()
        argv = [sys.executable, "-m", "bench.scoreboard.strangers", address, str(port), "2", "3"]
        pipe = subprocess.PIPE
        with subprocess.Popen(argv, stdin=pipe, stdout=pipe) as process:
            accepted = [listener.accept()[0] for _ in range(5)]
            received = [one.makefile("rb").read(128) for one in accepted[2:]]
            accepted[0].setblocking(False)
            with pytest.raises(BlockingIOError):
                accepted[0].recv(1)  # held: no message and no end
            output, _ = process.communicate()
        assert [len(each) for each in received] == [128] * 3
        assert int(output) == 3
        for one in accepted:
            one.close()
