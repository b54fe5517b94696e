"""Calls that cannot be made with servers, jobs with one key, and kinds of calls in rotation."""

import itertools
import re
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.codec import Codec
from shoal.dtypes import DType, Op
from shoal.engine import Fault
from shoal.errors import Closed
from shoal.group.group import Group
from shoal.group.pool import served_group
from shoal.group.pool.leader import job_name
from shoal.group.pool.rail_call import RailCall
from shoal.group.pool.rails import Kind, Posting, RailPart, Stage, rail_of
from shoal.group.pool.served_group import ServedGroup
from shoal.group.pool.view import Parts, View
from shoal.group.work import Work
from shoal.plan import default_cluster
from shoal.plan.cluster import Nic, Nics
from shoal.shapes import Shape

KIND = Kind(DType.FLOAT32, Op.SUM, 1 << 20, Codec.IDENTITY)
RAIL: Any = rail_of(range(3), 0)


def test_jobs_with_one_key_on_one_host_have_different_names() -> None:
    jobs = list(itertools.product(["world", "world (rail 1)"], [1, 2, 1 << 63], [7]))
    # Two groups with one name, and two with long names.
    jobs += itertools.product(["world/a", "world/" + 99 * "x"], [1], [7, 8])
    names = set[str]()
    for name, epoch, native_id in jobs:
        what = {"name": f"{name}/pool control", "epoch": epoch, "native_id": native_id}
        control: Any = SimpleNamespace(**what)
        names.add(job_name(control, "10.0.0.1"))
        assert len(job_name(control, "")) < 90
    assert len(names) == len(jobs)
    of_rail = [n for n in names if re.fullmatch(r"world \(rail 1\) [0-9a-f]{16} of 10.0.0.1", n)]
    assert len(of_rail) == 3


def view_of(group: Any) -> View:
    nics = Nics((Nic(1.0, 1.0),), (Nic(1.0, 1.0),) * 3)
    return View(1, group, ["a server"], default_cluster(range(3)), nics, RAIL)


@pytest.mark.parametrize("n_kinds", [200, 512])
def test_rotating_kinds_are_announced_once(n_kinds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    view, announced = view_of(SimpleNamespace(size=4, rank=0)), []
    monkeypatch.setattr(view, "_made", lambda kind: Parts(object(), None, kind))
    monkeypatch.setattr(view, "_announce", announced.append)
    for _ in range(3):
        for n_elems in range(n_kinds):
            view.parts(KIND._replace(n_elems=n_elems))
    assert len(announced) == n_kinds


def test_a_new_kind_of_call_after_the_loss_of_servers_is_no_error() -> None:
    def send(*_: object, **__: object) -> None:
        raise Closed("the group has ended")

    group = SimpleNamespace(size=4, rank=0, has_ended=True, send=send)
    view = view_of(group)
    shape = Shape("all_reduce", "sharded[3*0|1].servers", DType.FLOAT32, Op.SUM, 1 << 20, 0, 4)
    view._announce(shape)  # not announced: no server needs it
    group.has_ended = False
    with pytest.raises(Closed):
        view._announce(shape)


# A native call.
SUCCEEDED = SimpleNamespace(
    finished_ns=1,
    done=lambda: True,
    wait=lambda _timeout_s: True,
    succeeded=lambda: True,
    error=lambda: (Fault.NONE, -1, "", ""),
)


def test_a_call_whose_next_stage_waits_for_servers_delays_no_other() -> None:
    waits, goes_on, callbacks = threading.Event(), threading.Event(), []

    def post(stage: Stage, *_: object) -> Work:
        if stage is Stage.RAIL:
            waits.set()
            assert goes_on.wait(10.0)
        return SimpleNamespace(_call=SUCCEEDED, on_done=callbacks.append)

    pool: Any = SimpleNamespace(post_stage=post)
    kind = KIND._replace(pieces=(RailPart(0, KIND.n_elems),))
    call, over = RailCall(pool, Posting(kind, 0, 0, 0.0, 0), [0]), threading.Event()
    thread = threading.Thread(target=callbacks[0], args=(None,))
    thread.start()
    assert waits.wait(10.0)
    asks = threading.Thread(target=call.on_over, args=(over.set,))
    asks.start()
    asks.join(10.0)
    is_free = not asks.is_alive()
    is_in_time = is_free and not call.wait(0.01)
    goes_on.set()
    thread.join()
    asks.join()
    assert is_free
    assert is_in_time
    assert call.wait(10.0)
    assert over.wait(10.0)
    assert call.succeeded()


class ToldLock:
    """A lock that signals when a thread has to wait for it."""

    def __init__(self) -> None:
        self._lock, self.is_awaited = threading.RLock(), threading.Event()

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            self.is_awaited.set()
            self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def test_calls_while_another_looks_for_servers_are_like_it(monkeypatch: pytest.MonkeyPatch) -> None:
    lock, made = ToldLock(), list[str]()
    monkeypatch.setattr(served_group, "_FIRST_USE", lock)
    group: Any = object.__new__(ServedGroup)
    group._native, group._looks_at_first_use = None, True
    group._timeout = lambda _how: 1.0
    group._number = group._finish = lambda *_: None
    monkeypatch.setattr(ServedGroup, "_kind", lambda *_: KIND)
    monkeypatch.setattr(served_group, "FLOOR_BYTES", 8)
    servers = SimpleNamespace(changed=threading.Condition(), post=lambda *_: made.append("shared"))

    def make_alone(*_: object, **__: object) -> None:
        made.append("alone")
        lock.is_awaited.set()

    monkeypatch.setattr(Group, "all_reduce", make_alone)
    data = bytearray(8)
    other = threading.Thread(target=lambda: group.all_reduce(data))

    def look(*_: object) -> None:
        other.start()
        assert lock.is_awaited.wait(10.0)
        group._pool = servers

    group._use_servers = look
    group.all_reduce(data)
    other.join()
    assert made == ["shared", "shared"]
