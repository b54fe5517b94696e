"""Servers that cannot be used: their retries and log lines."""

import logging
from dataclasses import replace

import pytest

from shoal.group.pool.addresses import Address
from shoal.group.pool.leader import LeftOut
from shoal.group.pool.notices import Notices
from shoal.group.pool.probe import UNKNOWN
from shoal.group.pool.view import nics_of
from shoal.plan import default_cluster
from shoal.plan.defaults import wire_of

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


def test_a_server_of_unknown_rate_counts_as_its_measured_part_of_a_worker() -> None:
    cluster = replace(default_cluster(range(3)), wire=wire_of(1000))
    rates = (125.0, 125.0, 125.0, 0.0, 60.0)
    assert [nic.out for nic in nics_of(rates, 3, cluster).servers] == [125.0, 60.0]
    nics = nics_of(rates, 3, cluster, bytes([2, 0]))
    assert [nic.out for nic in (*nics.workers, *nics.servers)] == [125.0, 125.0, 125.0, 62.5, 60.0]


def test_a_servers_assumed_rate_is_logged_at_each_change(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "shoal")
    notices = Notices(0.0)
    for step, rate in ((0, 125.0), (0, 125.0), (2, 62.5), (UNKNOWN, 125.0)):
        notices.take({ONE: (rate, step)})
    same, half, unknown = lines(caplog)
    assert same.startswith(f"INFO server {ONE} ")
    assert "1000 Mbit/s" in same
    assert half.startswith(f"WARNING server {ONE} ")
    assert "500 Mbit/s, 0.5 of a worker's rate" in half
    assert "SHOAL_LINK" in half
    assert "could not be measured" in unknown
