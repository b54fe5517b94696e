"""Calls of workers with servers: rails, their parts and pieces of a call, and kinds of calls."""

import itertools
import re
import threading
import time
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from shoal.codec import Codec
from shoal.dtypes import DType, Op
from shoal.engine import Fault, plan_among
from shoal.errors import Closed
from shoal.group.group import Group
from shoal.group.numbers import Numbers
from shoal.group.pool import served_group
from shoal.group.pool.leader import job_name
from shoal.group.pool.pool import Pool
from shoal.group.pool.protocol import MOST_RANKS
from shoal.group.pool.rail_call import RailCall
from shoal.group.pool.rails import MOST_PIECES, Kind, Posting, RailNumbers, RailPart, Stage, rail_of
from shoal.group.pool.served_group import ServedGroup
from shoal.group.pool.view import Parts, View
from shoal.group.pool.view_mesh import first_word_key
from shoal.group.work import Work
from shoal.limits import FIRST_NAMED_KEY
from shoal.plan import default_cluster
from shoal.plan.cluster import Nic, Nics
from shoal.shapes import Shape

TWO_BY_THREE = (0, 0, 1, 1, 2, 2)


def test_workers_with_one_local_rank_on_each_host_form_a_rail_in_any_placement() -> None:
    rails = [rail_of((0, 1, 1, 0, 2, 2), rank) for rank in range(6)]
    assert [rail.members for rail in rails[:3]] == [(0, 1, 4), (0, 1, 4), (3, 2, 5)]
    assert [rail.members for rail in rails[3:]] == [(3, 2, 5), (0, 1, 4), (3, 2, 5)]
    places = [(0, 0), (0, 1), (1, 1), (1, 0), (0, 2), (1, 2)]
    assert [(rail.place, rail.host) for rail in rails] == places


@pytest.mark.parametrize("hosts", [(0, 0, 1), (0, 1, 1, 2, 2), (0, 0, 0, 1)])
def test_hosts_with_different_numbers_of_workers_have_no_rails(hosts: tuple[int, ...]) -> None:
    assert all(rail_of(hosts, rank) is None for rank in range(len(hosts)))


@pytest.mark.parametrize("n_elems", [1 << 18, 262_145, 1_000_003, 4_000_003, 9_999_999])
@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.INT8, DType.FLOAT64])
@pytest.mark.parametrize("n_local", [2, 3, 8])
def test_each_element_is_on_one_rail_none_is_idle(n_elems: int, dtype: DType, n_local: int) -> None:
    hosts = tuple(itertools.chain.from_iterable([host] * n_local for host in range(3)))
    item = {DType.FLOAT32: 4, DType.INT8: 1, DType.FLOAT64: 8}[dtype]
    at = 0
    for piece in rail_of(hosts, 0).pieces(dtype, n_elems):
        assert piece.offset == at
        for rank in range(n_local):
            own = rail_of(hosts, rank).own(dtype, piece.n_elems)
            assert piece.offset + own.offset == at
            assert at % 64 == 0
            assert own.n_elems > 0
            at += own.n_elems * item
    assert at == n_elems * item


def test_long_calls_are_split_and_short_ones_are_not() -> None:
    rail = rail_of(TWO_BY_THREE, 1)
    n_pieces = {n: len(rail.pieces(DType.UINT8, n)) for n in (1, 32767, 32768, 1 << 20, 1 << 23)}
    assert n_pieces == {1: 0, 32767: 0, 32768: 1, 1 << 20: 1, 1 << 23: MOST_PIECES}


def test_each_rail_has_its_part_of_the_rate_of_a_hosts_link() -> None:
    cluster, rail = default_cluster(TWO_BY_THREE), rail_of(TWO_BY_THREE, 0)
    along = rail.cluster_of(cluster)
    assert along.hosts == (0, 1, 2)
    assert along.wire.us_per_byte == 2 * cluster.wire.us_per_byte
    alone = rail_of((0, 1, 2), 0)
    assert alone.cluster_of(default_cluster((0, 1, 2))) == default_cluster((0, 1, 2))


def test_pieces_leave_in_any_order_and_are_open_until_then() -> None:
    calls = Numbers("here")
    numbers = RailNumbers(calls)
    first, second = calls.reserve(2)
    pieces = numbers.begin(calls.use(second), 3)
    assert list(pieces) == [second * MOST_PIECES + at for at in range(3)]
    assert all(map(numbers.is_open, pieces))
    assert not numbers.is_open(pieces[-1] + 1)  # the call has no fourth
    assert numbers.is_open(first * MOST_PIECES)
    assert numbers.lowest_open() == first * MOST_PIECES
    calls.skip(first)
    for at in (1, 0):
        numbers.left(pieces[at])
    assert numbers.lowest_open() == pieces[2]
    numbers.left(pieces[2])
    assert numbers.lowest_open() == (second + 1) * MOST_PIECES


KIND = Kind(DType.FLOAT32, Op.SUM, 1 << 20, Codec.IDENTITY)
refuse = Mock(side_effect=MemoryError)


def pool_of(world: Any, numbers: Any) -> Pool:
    control: Any = SimpleNamespace(planner=SimpleNamespace(cluster=None), rank=0)
    return Pool(control, b"", world, numbers, rail_of(TWO_BY_THREE, 0))


def test_a_call_that_cannot_be_planned_ends_the_group_of_its_ranks() -> None:
    ended: list[str] = []
    pool = pool_of(SimpleNamespace(abort=ended.append), None)
    view: Any = SimpleNamespace(call=refuse, takes=lambda _number: True, is_settling=False)
    pool.stages.propose()
    pool.stages.begin(0, view, 1)
    with pytest.raises(MemoryError):
        pool.post(Posting(KIND, 7, 0, time.monotonic() + 1.0, 0))
    assert len(ended) == 1


def test_pieces_of_a_call_that_could_not_be_made_are_not_awaited() -> None:
    calls, rail = Numbers("a group"), rail_of(TWO_BY_THREE, 0)
    coming = RailNumbers(calls)
    pool = pool_of(SimpleNamespace(post_in_place=refuse), coming)
    kind = KIND._replace(pieces=tuple(rail.pieces(KIND.dtype, KIND.n_elems)))
    numbers = pool.begin_pieces(calls.take(), len(kind.pieces))
    with pytest.raises(MemoryError):
        pool.post_pieces(Posting(kind, 1, 0, time.monotonic() + 1.0, 0), numbers)
    assert coming.lowest_open() == 2 * MOST_PIECES


def test_keys_of_stages_and_calls_differ() -> None:
    rail = rail_of(TWO_BY_THREE, 0)
    keys = [rail.key(number, stage) for number in range(1, 100) for stage in Stage]
    assert len(set(keys) | set(range(1, 100))) == 99 * len(Stage) + 99


def test_no_call_in_a_view_has_the_key_of_a_servers_first_message() -> None:
    rail = rail_of(TWO_BY_THREE, 0)
    calls = {rail.key(number, Stage.RAIL) for number in range(MOST_PIECES, 20_000)}
    words = {first_word_key(server) for server in range(1, MOST_RANKS)}
    assert len(words) == MOST_RANKS - 1
    assert calls.isdisjoint(words)
    assert min(words) >= FIRST_NAMED_KEY


def test_ranks_in_different_stages_get_an_error() -> None:
    shape = Shape("all_reduce", "sharded", DType.FLOAT32, Op.AVG, 100_000, 0, 2, hosts=(0, 0))
    for what, is_second in (("folded", False), ("shared", True)):
        text = plan_among(shape, (0, 1), 6, what, is_second).descriptor
        assert text == f"all_reduce float32[100000] avg by sharded, {what}"


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
    send = Mock(side_effect=Closed("the group has ended"))
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
    group._number = group._finish = group._hold = lambda *_: None
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
        group.pool = servers

    group._use_servers = look
    group.all_reduce(data)
    other.join()
    assert made == ["shared", "shared"]
