"""The lowest worker leaves its servers: nobody takes that for their death."""

import contextlib
import itertools
import selectors
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.engine import Endpoint as NativeEndpoint
from shoal.engine import RankInfo
from shoal.group.pool import leader as leaders
from shoal.group.pool.addresses import Address
from shoal.group.pool.control import Bell, End, Form
from shoal.group.pool.leader import Leader
from shoal.group.pool.protocol import Reserve, Reserved
from shoal.group.pool.stages import Stages
from shoal.group.pool.watch import _Server
from shoal.rendezvous.record import Endpoint
from shoal.rendezvous.roster import Entry

SERVER = Address("server", 7077)
IDENTITY = bytes(range(16))


def test_a_server_whose_connection_is_closed_at_the_end_has_not_gone() -> None:
    changes: list[bytes | None] = []
    with (
        selectors.DefaultSelector() as selector,
        contextlib.closing(NativeEndpoint(object())) as endpoint,
    ):
        server = _Server(
            *(SERVER, bytes(32), Reserve("0.1.0", "a job", 3), selector, endpoint),
            *(lambda: changes.append(None), int),
        )
        entry = Entry("s", "s", b"", (Endpoint("127.0.0.1", 1, "lo"),))
        server._take(Reserved("", IDENTITY, entry.encode(0)))
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
        self.servers = {SERVER: Entry("s", "s", b"", ())}

    def ready(self) -> dict[Address, bytes]:
        return dict.fromkeys(self.servers, IDENTITY)

    def places(self) -> dict[Address, Entry]:
        return self.servers

    def gone(self) -> set[Address]:
        return {SERVER} if self.is_closed else set()

    def trouble(self) -> dict[Address, str]:
        return {}

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def leader(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make the leader of two workers, on hosts a and b."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setattr(leaders, "Watch", lambda *_: Watch())
    workers = [RankInfo(host.upper(), "", host) for host in "ab"]
    control: Any = SimpleNamespace(ranks=workers, size=2, name="world", epoch=1, native_id=1)
    return lambda *servers: Leader(control, servers, bytes(32), Bell())


class View:
    """It serves."""

    number, end, servers, has_ended = 1, None, (SERVER,), False

    @staticmethod
    def culprit() -> None:
        return None

    class group:  # noqa: N801
        mesh = None

        @staticmethod
        def ended() -> None:
            return None


def test_rank_0_that_leaves_tells_nobody_that_its_servers_are_lost(leader: Any) -> None:
    stages, view = Stages[Any](), View()
    lost = leader(SERVER)
    lost._watch.is_closed = True  # they are gone, and it is not
    assert lost.decide([view], stages, 1) == End(1, is_lost=True)
    leaving = leader(SERVER)
    leaving.close()
    assert leaving.decide([view], stages, 1) is None


def test_a_server_without_a_place_in_the_next_view_holds_the_others_up_for_a_while_only(
    leader: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(leaders, "_now", lambda: now[0])
    other, stages, view = Address("other", 7077), Stages[Any](), View()
    made = leader(SERVER, other)
    made._watch.meet = list
    made._wanted = (SERVER,)
    made.invite(1, [b"", b""])
    stages.propose()
    stages.begin(1, view, 1)  # type: ignore[arg-type]
    made._watch.places = lambda: {other: Entry("o", "o", b"", ())}
    ready = {SERVER: IDENTITY, other: IDENTITY}
    made._watch.ready = lambda: ready
    for now[0], command in [(100.5, None), (103.9, None), (104.1, Form(1))]:
        assert made.decide([], stages, 1) == command
    assert made._wanted == (other,)
    view.servers = (other,)
    assert made.decide([], stages, 1) is None  # it serves as far as can be
    del ready[other]
    assert made.decide([], stages, 1) is None


def test_a_server_that_has_gone_just_before_it_is_invited_is_not_waited_for(leader: Any) -> None:
    made = leader(SERVER)
    made._wanted = (SERVER,)
    made._watch.meet = list
    made._watch.is_closed = True  # since `places` was asked
    made.invite(1, [b"", b""])
    assert made.has_lost_invited


@pytest.mark.parametrize(
    ("hosts", "who"), [(["a", "b", "a"], "worker A"), (["a", "b", "c", "c"], "server server1")]
)
def test_a_server_on_the_host_of_another_member_is_left_out_and_named_with_it(
    hosts: list[str], who: str, leader: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = itertools.count(1.0)  # so nothing else is waited for
    monkeypatch.setattr(leaders, "_now", lambda: next(now))
    servers = [Address(f"server{at}", 7077) for at in range(1, len(hosts) - 1)]
    made = leader(*servers)
    made._watch.servers = {
        one: Entry(host, host, b"", ()) for one, host in zip(servers, hosts[2:], strict=True)
    }
    stages = Stages[Any]()
    assert [made.decide([], stages, 1) for _ in range(2)] == [None, None]
    assert f"{servers[-1]} is on {hosts[-1]}, the host of {who}" in made.trouble()
    assert "leave it out of SHOAL_SERVERS" in made.trouble()
    forms = [made.decide([], stages, 1) for _ in range(2)]
    assert any(forms) == (len(servers) > 1)
    assert made._wanted == tuple(servers[:-1])
