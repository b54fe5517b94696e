"""Rates of servers: announced, or measured as part of a worker's; and servers that are not used."""

import contextlib
import itertools
import logging
import struct
from typing import Any

import pytest

from shoal.errors import ShoalError
from shoal.group.pool import probe
from shoal.group.pool.addresses import Address
from shoal.group.pool.leader import LeftOut
from shoal.group.pool.notices import Notices, late_server
from shoal.group.pool.probe import UNKNOWN, measure, part_of, step_of
from shoal.group.pool.view import nics_of
from shoal.group.pool.view_mesh import card_of
from shoal.plan import default_cluster
from shoal.plan.served import choose_with_servers


def test_servers_count_as_parts_of_a_worker() -> None:
    for rate, reference, part in (
        (100.0, 100.0, 1.0),
        (250.0, 100.0, 1.0),  # the rate is not lower; one worker's link cannot show more
        (76.0, 100.0, 1.0),  # as near as two measurements of one link can be
        (70.0, 100.0, 0.5**0.5),
        (45.0, 100.0, 0.5),
        (55.0, 100.0, 0.5),
        (10.0, 100.0, 0.5**3.5),
        (0.0, 100.0, 1.0),  # it did not answer
        (100.0, 0.0, 1.0),  # the worker did not answer either
        (1e-300, 1e300, 0.5**127),
    ):
        step = step_of(rate, reference)
        assert 0 <= step <= UNKNOWN
        assert part_of(step) == pytest.approx(part)
        assert (step == UNKNOWN) == (not rate or not reference)


class Unanswered:
    """A group and all its messages; no other rank sends any."""

    def __init__(self, *, has_ended: bool = False) -> None:
        self.has_ended = has_ended
        self.ended: list[int] = []  # the ranks that know of the end

    def recv(self, *_: object, **__: object) -> Any:
        if self.has_ended:
            raise ShoalError("the group has ended")
        return self

    def send(self, data: bytearray, rank: int, *_: object, **__: object) -> None:
        self.ended += [] if any(data) else [rank]

    def drive(self, _timeout_s: float) -> bool:
        return False

    def done(self) -> bool:
        return False


def never_alone(_until: float) -> contextlib.nullcontext[bool]:
    return contextlib.nullcontext(False)


def without_descriptors(_until: float) -> Any:
    raise OSError


@pytest.mark.parametrize("lock", [None, never_alone, without_descriptors])
@pytest.mark.parametrize("has_ended", [False, True])
def test_all_ranks_learn_of_the_end_of_the_probe_even_if_it_fails(
    has_ended: bool, lock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "_OF_ONE_S", 0.01)
    if lock is not None:
        monkeypatch.setattr(probe, "_alone", lock)
    group: Any = Unanswered(has_ended=has_ended)
    assert measure(group, [3, 4], lambda: True) == [UNKNOWN, UNKNOWN]
    assert group.ended == [1, 3, 4]


def test_a_server_with_a_far_longer_queue_than_others_for_its_share_is_late() -> None:
    kib = 1 << 10
    assert late_server([80 * kib, 500 * kib, 70 * kib, 90 * kib], [1, 1, 1, 1])[0] == 1
    assert late_server([80 * kib, 100 * kib, 70 * kib, 90 * kib], [1, 1, 1, 1])[0] is None
    assert late_server([400 * kib, 100 * kib, 90 * kib], [4, 1, 1])[0] is None
    assert late_server([400 * kib, 400 * kib, 400 * kib], [4, 1, 4])[0] == 1
    # None is late without a long queue or a comparison.
    assert late_server([20_000.0, 100.0, 0.0], [1, 1, 1])[0] is None
    assert late_server([1e9, 0.0], [1, 0])[0] is None
    assert late_server([1e9], [1])[0] is None


N_WORKERS = 4
SAID = [5e-324, 1.0, 1e9, 1e308]


def encoded(rate: float) -> bytes:
    return struct.pack("<4sd3H16x", b"pool", rate, 0, 1, 2)


@pytest.mark.parametrize("rates", list(itertools.combinations_with_replacement(SAID, 3)))
def test_calls_are_shared_by_any_announced_rates(rates: tuple[float, ...]) -> None:
    cluster = default_cluster(range(N_WORKERS))
    known = [card_of(encoded(rate)).rate for rate in (*[50.0] * N_WORKERS, *rates)]
    pool = nics_of(known, N_WORKERS, cluster)
    served = choose_with_servers(8 << 20, cluster, pool)
    assert 0 < served.cost_us <= served.alone_us


@pytest.mark.parametrize("rate", [float("nan"), float("inf"), -1.0])
def test_an_invalid_rate_is_refused(rate: float) -> None:
    with pytest.raises(ShoalError, match="sent no server-pool record"):
        card_of(encoded(rate))


ONE, OTHER = Address("cpu1", 7077), Address("cpu2", 7077)
READY = {ONE: b"process 1", OTHER: b"process 2"}


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [f"{record.levelname} {record.getMessage()}" for record in caplog.records]
    caplog.clear()
    return found


def test_the_exclusion_is_reset_only_after_a_server_has_served_for_a_while() -> None:
    left_out = LeftOut()
    for at in (0.0, 1.0):
        left_out.blame(ONE, READY[ONE], "is cut off", at)
    left_out.used([ONE, OTHER])
    assert left_out.why() == {}
    left_out.blame(ONE, READY[ONE], "is cut off", 4.0)  # soon after: 4 s
    assert left_out.may_serve(READY, 7.9) == [OTHER]
    assert left_out.may_serve(READY, 8.0) == [ONE, OTHER]
    left_out.used([ONE])
    left_out.blame(ONE, READY[ONE], "is cut off", 8.0 + 4 * 4)  # 1 s
    assert left_out.may_serve(READY, 24.9) == [OTHER]
    assert left_out.may_serve(READY, 25.0) == [ONE, OTHER]


def test_an_absent_server_is_named_once_for_many_tries(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "shoal")
    notices = Notices(0.0)
    notices.update([], {ONE: "has not answered yet"}, 0.9)
    assert lines(caplog) == []  # it may be about to start
    for now, why in enumerate(("does not answer", "cannot be reached: No route to host") * 20, 1):
        notices.update([], {ONE: why, OTHER: ""}, float(now))
    assert lines(caplog) == ["WARNING server cpu1:7077 is not used: it does not answer"]
    notices.update([], {ONE: "does not have our job key"}, 50.0)
    notices.update([], {ONE: "does not answer"}, 51.0)
    notices.update([], {ONE: "does not have our job key"}, 52.0)
    assert lines(caplog) == ["WARNING server cpu1:7077 is not used: it does not have our job key"]
    notices.update([ONE], {}, 61.0)
    notices.update([ONE], {}, 62.0)
    assert lines(caplog) == ["INFO server cpu1:7077 is used again, after 60.1 s"]
    notices.update([], {ONE: "was lost"}, 63.0)
    assert lines(caplog) == ["WARNING server cpu1:7077 is not used: it was lost"]


def test_reasons_that_never_repeat_do_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    notices = Notices(0.0)
    for now in range(1, 100):
        notices.update([], {ONE: f"refuses: it serves {now} jobs"}, float(now))
    assert len(lines(caplog)) == 4


def test_a_servers_assumed_rate_is_logged_at_each_change(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "shoal")
    notices = Notices(0.0)
    for step, rate in ((0, 125.0), (0, 125.0), (2, 62.5), (UNKNOWN, 125.0)):
        notices.take({ONE: (rate, step)})
    same, half, _unknown = lines(caplog)
    assert same.startswith(f"INFO server {ONE} ")
    assert half.startswith(f"WARNING server {ONE} ")
    assert "500 Mbit/s" in half
