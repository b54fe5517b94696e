"""The lowest worker as leader of servers: its leaving does not count as their death."""

from types import SimpleNamespace
from typing import Any

import pytest

from shoal.engine import RankInfo
from shoal.group.pool import leader as leaders
from shoal.group.pool.addresses import Address
from shoal.group.pool.control import Bell, Command, What
from shoal.group.pool.leader import Leader
from shoal.group.pool.stages import Stages
from shoal.rendezvous.roster import Entry

SERVER = Address("server", 7077)
IDENTITY = bytes(range(16))


class Watch:
    """A watch whose connections are gone once it is closed."""

    meet = list  # makes all messages, and sends none

    def __init__(self) -> None:
        self.is_closed = False
        self.checked: list[Address] = []
        self.servers = {SERVER: Entry("s", "s", b"", ())}
        self.identity = IDENTITY

    def ready(self) -> dict[Address, bytes]:
        return dict.fromkeys(self.servers, self.identity)

    def places(self) -> dict[Address, Entry]:
        return self.servers

    def gone(self) -> set[Address]:
        return {SERVER} if self.is_closed else set()

    def trouble(self) -> dict[Address, str]:
        return {}

    def check(self, address: Address) -> None:
        self.checked.append(address)

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


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The leader's clock: one number, which the test changes."""
    clock = [100.0]
    monkeypatch.setattr(leaders, "_now", lambda: clock[0])
    return clock


def view_of(*servers: Address) -> Any:
    """Return a view that serves."""
    group = SimpleNamespace(mesh=None, ended=lambda: None)
    state = {"number": 1, "end": None, "has_ended": False, "culprit": lambda: None}
    return SimpleNamespace(servers=servers, group=group, **state)


def test_rank_0_reports_no_lost_servers_when_it_leaves(leader: Any) -> None:
    stages, view = Stages[Any](), view_of(SERVER)
    lost = leader(SERVER)
    lost._watch.is_closed = True  # they are gone, and the view is not
    assert lost.decide([view], stages, 1) == Command(What.LOSE, 1)
    leaving = leader(SERVER)
    leaving.close()
    assert leaving.decide([view], stages, 1) is None


def test_a_server_that_a_view_has_lost_must_answer_before_it_serves_again(leader: Any) -> None:
    made, view = leader(SERVER), view_of(SERVER)
    view.has_ended, view.culprit = True, lambda: (SERVER, "was silent for 1.2 s")
    assert made.decide([view], Stages[Any](), 1) == Command(What.LOSE, 1)
    assert made._watch.checked == [SERVER]


def test_a_server_without_a_place_delays_others_only_briefly(leader: Any, now: list[float]) -> None:
    other, stages, view = Address("other", 7077), Stages[Any](), view_of(SERVER)
    made = leader(SERVER, other)
    made._wanted = (SERVER,)
    made.invite(1, [b"", b""])
    stages.propose()
    stages.begin(1, view, 1)
    made._watch.places = lambda: {other: Entry("o", "o", b"", ())}
    ready = {SERVER: IDENTITY, other: IDENTITY}
    made._watch.ready = lambda: ready
    for now[0], command in [(100.5, None), (103.9, None), (104.1, Command(What.FORM, 1))]:
        assert made.decide([], stages, 1) == command
    assert made._wanted == (other,)
    view.servers = (other,)
    assert made.decide([], stages, 1) is None  # it seems to serve
    del ready[other]
    assert made.decide([], stages, 1) is None


def test_a_server_lost_just_before_its_invitation_is_not_awaited(leader: Any) -> None:
    made = leader(SERVER)
    made._wanted = (SERVER,)
    made._watch.is_closed = True  # since `places` was called
    made.invite(1, [b"", b""])
    assert made.has_lost_invited


def test_a_server_that_always_leaves_is_invited_ever_later(leader: Any, now: list[float]) -> None:
    made, stages = leader(SERVER), Stages[Any]()
    pauses: list[float] = []
    for view in range(1, 9):
        asked_at = now[0]
        while (command := made.decide([], stages, 1)) is None:
            now[0] += 0.125
        assert command == Command(What.FORM, view)
        pauses.append(now[0] - asked_at)
        made.invite(view, [b"", b""])
        made._watch.is_closed = True
        made._changed()
        made.failed(view, "", {})
        made._watch.is_closed = False  # it is back at once
    assert pauses == [0, 1, 2, 4, 8, 16, 32, 32]
    made._watch.identity = b"another process"
    assert made.decide([], stages, 1) == Command(What.FORM, 9)


@pytest.mark.parametrize(
    ("hosts", "member"), [(["a", "b", "a"], "worker A"), (["a", "b", "c", "c"], "server server1")]
)
def test_a_server_on_the_host_of_another_member_is_excluded_and_both_are_named(
    hosts: list[str], member: str, leader: Any, now: list[float]
) -> None:
    servers = [Address(f"server{at}", 7077) for at in range(1, len(hosts) - 1)]
    made = leader(*servers)
    made._watch.servers = {
        one: Entry(host, host, b"", ()) for one, host in zip(servers, hosts[2:], strict=True)
    }
    stages = Stages[Any]()
    assert made.decide([], stages, 1) is None
    assert f"{servers[-1]} is on {hosts[-1]}, the host of {member}" in made.trouble()
    assert "leave it out of SHOAL_SERVERS" in made.trouble()
    forms = []
    for _ in range(40):  # until it would be tried again, several times
        now[0] += 0.25
        forms.append(made.decide([], stages, 1))
    assert any(forms) == (len(servers) > 1)
    assert made._wanted == tuple(servers[:-1])
    made._watch.identity = b"another process"  # on a separate host
    made._watch.servers[servers[-1]] = Entry("d", "d", b"", ())
    now[0] += 0.25
    made.decide([], stages, 1)
    now[0] += 0.25
    assert made.decide([], stages, 1).what is What.FORM
    assert made._wanted == tuple(servers)
