"""The lowest worker leaves its servers: nobody takes that for their death."""

import logging
import selectors
import socket
from typing import Any

import pytest

from shoal.group.pool import leader as leaders
from shoal.group.pool.addresses import Address
from shoal.group.pool.bell import Bell
from shoal.group.pool.commands import End, Form
from shoal.group.pool.leader import Leader
from shoal.group.pool.protocol import Reserve, Reserved
from shoal.group.pool.stages import Stages
from shoal.group.pool.watch import _Server

SERVER = Address("server", 7077)
IDENTITY = bytes(range(16))


def test_a_server_whose_connection_is_closed_at_the_end_has_not_gone() -> None:
    changes: list[bytes | None] = []
    with selectors.DefaultSelector() as selector:
        reserve = Reserve("0.1.0", "a job", 3)
        server = _Server(SERVER, bytes(32), reserve, selector, lambda: changes.append(None), int)
        server._take(Reserved("", IDENTITY))
        server.close()
        assert (server.identity, server.trouble, server.is_connected) == (IDENTITY, "", False)
        assert len(changes) == 1  # that it came
        server._lose("was lost")
        assert server.identity is None
        assert len(changes) == 2


class Watch:
    """One whose connections are gone once it is closed."""

    def __init__(self) -> None:
        self.is_closed = False

    def ready(self) -> dict[Address, bytes]:
        return {SERVER: IDENTITY}

    def gone(self) -> set[Address]:
        return {SERVER} if self.is_closed else set()

    def trouble(self) -> dict[Address, str]:
        return {}

    def close(self) -> None:
        self.is_closed = True


def leader() -> Leader:
    made: Any = Leader([SERVER], bytes(32), Bell())
    made._watch, made._host = Watch(), "127.0.0.1"
    return made


class View:
    """It serves."""

    number, end, servers, has_ended = 1, None, (SERVER,), False

    @staticmethod
    def culprit() -> None:
        return None

    class group:  # noqa: N801
        @staticmethod
        def ended() -> None:
            return None


def test_rank_0_that_leaves_tells_nobody_that_its_servers_are_lost() -> None:
    stages, view = Stages[Any](), View()
    lost = leader()
    watch: Any = lost._watch
    watch.is_closed = True  # they are gone, and it is not
    assert lost.decide([view], stages, 1) == End(1, is_lost=True)  # type: ignore[list-item]
    leaving = leader()
    leaving.close()
    assert leaving.decide([view], stages, 1) is None  # type: ignore[list-item]


def test_servers_for_which_no_port_is_free_wait_until_one_is_and_are_named_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = [0.0]
    monkeypatch.setattr(leaders, "_now", lambda: now[0])
    made = leader()
    caplog.set_level(logging.INFO, "shoal")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setenv("SHOAL_PORT_RANGE", f"{port}-{port}")
        for now[0] in (1.0, 2.0, 4.0):
            assert made.decide([], Stages[Any](), 1) is None
    (line,) = [record.getMessage() for record in caplog.records if "view" in record.message]
    assert "no port of SHOAL_PORT_RANGE is free at 127.0.0.1" in line
    now[0] = 20.0
    assert made.decide([], Stages[Any](), 1) == Form(1)
    made.close()
