"""The processes without a key that a benchmark sends to a rank."""

import socket
import subprocess
import sys

import pytest

from bench.scoreboard.strangers import own_listener


def test_a_process_finds_where_it_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert own_listener() == listener.getsockname()


def test_a_process_that_listens_nowhere_says_so() -> None:
    with pytest.raises(LookupError, match="no listener"):
        own_listener()


def test_strangers_hold_some_connections_and_send_garbage_on_others() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address, port = listener.getsockname()
        argv = [sys.executable, "-m", "bench.scoreboard.strangers", address, str(port), "2", "3"]
        pipe = subprocess.PIPE
        with subprocess.Popen(argv, stdin=pipe, stdout=pipe) as process:
            came = [listener.accept()[0] for _ in range(5)]
            said = [one.makefile("rb").read(128) for one in came[2:]]
            came[0].setblocking(False)
            with pytest.raises(BlockingIOError):
                came[0].recv(1)  # held: neither a word nor an end
            told, _ = process.communicate()
        assert [len(each) for each in said] == [128] * 3
        assert int(told) == 3
        for one in came:
            one.close()
