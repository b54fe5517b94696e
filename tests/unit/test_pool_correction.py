"""What rank 0 makes of what calls took, and when it takes a correction back."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from shoal.codec import Codec
from shoal.dtypes import DType
from shoal.group.pool.addresses import Address
from shoal.group.pool.commands import Form, decode, encode
from shoal.group.pool.correction import Correction, LinkWatch, Tally, Window
from shoal.plan.cluster import Nic, Pool
from shoal.plan.measured import Seen
from shoal.schedule.weights import Weights

SERVERS = [Address("cpu1", 7077), Address("cpu2", 7077)]
READY = dict(zip(SERVERS, (b"one", b"other"), strict=True))
EVEN = "sharded[3*1|2*3]"
REPORTED = Pool((Nic(50.0, 50.0),) * 2, (Nic(50.0, 50.0),) * 3)
MS = 1_000_000


def call(
    began_ms: int, servers_ms: int, workers_ms: int = 0, algorithm: str = f"{EVEN}.servers"
) -> Any:
    """One of 4 MiB, by when its parts had ended."""
    part = lambda ms: SimpleNamespace(finished_ns=ms * MS) if ms else None  # noqa: E731
    shape = SimpleNamespace(
        algorithm=algorithm, n_elems=1 << 20, dtype=DType.FLOAT32, codec=Codec.IDENTITY
    )
    parts = {"workers": part(workers_ms), "servers": part(servers_ms)}
    return SimpleNamespace(shape=shape, began_ns=began_ms * MS, is_mended=False, **parts)


def state(*waiting: int) -> dict[str, Any]:
    """A mesh in which so many bytes wait for each server."""
    peers = [{"rank": rank, "queued_bytes": 10**9, "sockets": []} for rank in range(3)]
    for at, n_bytes in enumerate(waiting):
        sockets = [{"unsent_bytes": n_bytes // 2, "n_unacked": 0}]
        peers.append({"rank": 3 + at, "queued_bytes": n_bytes // 2, "sockets": sockets})
    return {"peers": peers}


def tally_of(n_calls: int, *waiting: int) -> Tally:
    tally = Tally(3, 2)
    for number in range(n_calls):  # each made as the one before it begins
        at = 1000 + 300 * number
        tally.ended(call(at - 250, at + 300, at + 200))
        for _ in range(4):
            tally.sample(state(*waiting))
    return tally


def test_of_calls_that_are_made_at_once_each_takes_from_the_end_of_the_one_before() -> None:
    window = tally_of(5, 4000, 1000).take()
    assert window is not None
    seen = window.seen
    assert seen is not None
    assert (seen.weights, window.n_calls) == (Weights((1, 1, 1), (3, 3)), 5)
    assert seen.n_bytes == 5 * (4 << 20)
    assert seen.servers_us == pytest.approx(250e3 + 300e3 * 5)
    assert seen.workers_us == pytest.approx(450e3 + 4 * 300e3)
    rate = 5 * (4 << 20) / 3 / seen.servers_us  # of the link to each server
    assert seen.delays_us == pytest.approx([4000 / rate, 1000 / rate])
    assert window.us_per_byte == pytest.approx(seen.servers_us / seen.n_bytes)


def test_little_says_nothing_and_what_was_said_is_not_said_again() -> None:
    assert Tally(3, 2).take() is None
    assert tally_of(3, 1, 1).take() is None
    tally = tally_of(5, 1, 1)
    assert tally.take() is not None
    assert tally.take() is None


def test_what_workers_do_alone_or_was_mended_says_nothing_of_servers() -> None:
    tally = Tally(3, 2)
    for number in range(9):
        tally.ended(call(300 * number, 0, 300 * (number + 1), "sharded"))
    lost = call(2700, 9999)
    lost.is_mended = True
    tally.ended(lost)
    window = tally.take()
    assert window is not None
    assert (window.seen, window.n_calls) == (None, 9)
    assert window.us_per_byte == pytest.approx(300e3 / (4 << 20))


def window(us_per_byte: float, *delays_us: float) -> Window:
    weights = Weights((1, 1, 1), (3, 3))
    took_us = us_per_byte * 1e8
    return Window(Seen(weights, 1e8, 0.9 * took_us, took_us, delays_us), us_per_byte, 9)


LATE = (20e3, 2e3)  # for the first server bytes wait ten times as long


def test_what_a_link_is_measured_to_carry_is_the_same_number_for_all_and_for_one_process() -> None:
    correction = Correction()
    assert correction.rates(READY, SERVERS) == ()
    assert correction.judge(window(0.08, *LATE), REPORTED, READY, SERVERS, 0.0) is None
    found = correction.judge(window(0.08, *LATE), REPORTED, READY, SERVERS, 0.0)
    assert found is not None
    rates = correction.rates(READY, SERVERS)
    assert rates == (pytest.approx(found.servers[0].out, rel=1e-5), 0.0)
    form = Form(2, tuple(SERVERS), "host", 4711, rates)
    assert decode(encode(form)) == form
    assert correction.rates({**READY, SERVERS[0]: b"it was started anew"}, SERVERS) == ()
    assert correction.rates(READY, SERVERS[1:]) == ()


def test_corrections_that_bring_nothing_are_taken_back_and_rest() -> None:
    correction, pool = Correction(), REPORTED
    took = 0.08
    for turn in range(4):
        for _ in range(2):
            found = correction.judge(window(took, *LATE), pool, READY, SERVERS, float(turn))
        assert found is not None
        pool, took = found, took * 1.1
    back = correction.judge(window(took, *LATE), pool, READY, SERVERS, 5.0)
    assert back is None
    back = correction.judge(window(took, *LATE), pool, READY, SERVERS, 5.0)
    assert back == REPORTED
    for now in (6.0, 30.0, 64.0):
        assert correction.judge(window(0.08, *LATE), REPORTED, READY, SERVERS, now) is None
    assert correction.judge(window(0.08, *LATE), REPORTED, READY, SERVERS, 66.0) is not None


def test_a_link_that_gets_slower_in_a_job_stays_corrected_though_calls_once_were_faster() -> None:
    correction = Correction()
    judge = lambda seen, pool: correction.judge(seen, pool, READY, SERVERS, 0.0)  # noqa: E731
    assert judge(window(0.05, 2e3, 2e3), REPORTED) is None  # all links are as reported
    assert judge(window(0.09, *LATE), REPORTED) is None
    found = judge(window(0.09, *LATE), REPORTED)
    assert found is not None
    alone = Window(None, 0.06, 9)  # 1.5 times as fast as before, and not what it once was
    assert judge(alone, found) is None


def test_what_only_one_window_says_is_noise() -> None:
    correction = Correction()
    for _ in range(9):
        for delays in (LATE, LATE[::-1], (2e3, 2e3)):
            said = window(0.08, *delays)
            assert correction.judge(said, REPORTED, READY, SERVERS, 0.0) is None


def test_of_what_two_windows_say_only_that_counts_in_which_they_agree() -> None:
    correction, third = Correction(), Address("cpu3", 7077)
    servers, ready = [*SERVERS, third], {**READY, third: b"a third"}
    pool = Pool((Nic(50.0, 50.0),) * 3, (Nic(50.0, 50.0),) * 4)
    weights = Weights((0, 0, 0, 0), (1, 1, 1))
    found = None
    for delays in ((20e3, 20e3, 2e3), (20e3, 2e3, 20e3)):
        assert found is None
        said = Window(Seen(weights, 1e8, 0.0, 8e6, delays), 0.08, 9)
        found = correction.judge(said, pool, ready, servers, 0.0)
    assert found is not None
    assert found.servers[0].out < 50.0
    assert found.servers[1:] == pool.servers[1:]


def test_a_view_is_looked_at_as_its_calls_go_on_and_whose_link_is_slow_is_named() -> None:
    links, tally = LinkWatch(), Tally(3, 2)
    mesh = SimpleNamespace(state=lambda _s: {**state(64000, 4000), **EMPTY})
    running = SimpleNamespace(servers=SimpleNamespace(done=lambda: False))
    view: Any = SimpleNamespace(
        group=SimpleNamespace(mesh=mesh), tally=tally, calls=[running], nics=REPORTED
    )
    view.servers = SERVERS
    said = []
    for number in range(20):
        tally.ended(call(300 * number, 300 * (number + 1), 300 * number + 100))
        said.append(links.look(view, READY, 0.3 * number))
    (line,) = [each for each in said if each]
    assert line.startswith("server cpu1:7077 is taken to carry ")
    assert "not 400, by 8 calls" in line
    assert links.rates(READY, SERVERS)[0] > 0


EMPTY: dict[str, Any] = {"groups": [], "n_in_flight": 0, "scratch_bytes": 0, "staging": {}}
