"""A report of averaging: the parts of a step, the slowest rank, and its output forms."""

import gzip
import itertools
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from unit.averages import SHAPES, average_filled
from unit.in_process import in_ranks, run_well

from shoal import Group
from shoal.average import ArraySpec, Averager, AveragingReport, Layout, StepTimes
from shoal.average.report.breakdown import StepBreakdown, break_down, compare
from shoal.average.report.report import gather
from shoal.average.step_times import StepLog
from shoal.dtypes import DType


def take_steps(averager: Averager, n_steps: int) -> None:
    for step in range(n_steps):
        average_filled(averager, step, list(SHAPES)[:: -1 if averager.group.rank else 1])


def take_and_report(group: Group, n_steps: int, alone: bool) -> AveragingReport:
    averager = Averager(group, SHAPES, fusion_bytes=2048)
    take_steps(averager, n_steps)
    return averager.report(alone=alone)


def test_every_rank_reports_the_same_summary_and_its_own_steps() -> None:
    reports = run_well(take_and_report, 3, 6, False)
    assert all(report.ranks == reports[0].ranks for report in reports)
    assert [one.rank for one in reports[0].ranks] == [0, 1, 2]
    assert reports[0].n_compared == 4  # neither the first, which follows none, nor the last
    assert sum(one.n_slowest for one in reports[0].ranks) == 4
    for rank, report in enumerate(reports):
        assert report.rank == rank
        assert [step.number for step in report.steps] == [0, 1, 2, 3, 4]
        for step in report.steps:
            parts = step.forward + step.backward + step.exposed + step.other
            assert step.total == pytest.approx(parts)
            assert min(step[1:7]) >= 0
        assert 0 <= report.hidden_share <= 1
        assert f"Rank {reports[0].slowest.rank} was the slowest in" in str(report)
        # The table leaves out the first step, which no step precedes; this share does not.
        assert f"Over all 5 steps of rank {rank}, {report.hidden_share:.1%} of its" in str(report)
        written = json.loads(report.to_json())
        assert written["steps"] == [step._asdict() for step in report.steps]
        assert written["ranks"] == [one._asdict() for one in report.ranks]
        assert written["slowest"] == reports[0].slowest.rank


@in_ranks(2)
def test_an_early_report_is_marked_empty_and_names_missing_arrays(group: Group) -> None:
    averager = Averager(group, {"a": ((8,), "float32"), "b": ((8,), "float32")}, fusion_bytes=64)
    report = averager.report()
    assert "no step has ended yet" in str(report)
    assert json.loads(report.to_json())["steps"] == []
    averager.begin()
    averager.ready("b")
    report = averager.report(alone=True)
    averager.ready("a")
    averager.wait()
    assert report.missing == ("a",)
    assert report.rank == group.rank
    assert "Step 0 has not ended; not ready on this rank: 'a'" in str(report)


def rows_of(trace: dict[str, Any]) -> dict[int, list[dict[str, Any]]]:
    rows: dict[int, list[dict[str, Any]]] = {}
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            rows.setdefault(event["tid"], []).append(event)
    return rows


def test_a_trace_has_all_buffers_and_rows_do_not_overlap(tmp_path: Path) -> None:
    before = time.time_ns()
    (report,) = run_well(take_and_report, 1, 5, True)
    report.chrome_trace(tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())
    rows = rows_of(trace)
    events = [event for row in rows.values() for event in row]
    n_buffers = sum(event["name"].startswith("buffer ") for event in events)
    assert n_buffers == sum(len(times.posted) for times in report.times)
    for row in rows.values():
        row.sort(key=lambda event: event["ts"])
        for one, other in itertools.pairwise(row):
            assert one["ts"] + one["dur"] <= other["ts"] + 0.01
    for event in events:
        assert before - 10**9 < trace["baseTimeNanoseconds"] + event["ts"] * 1e3 < time.time_ns()
    assert {event["pid"] for event in trace["traceEvents"]} == {0}


def test_a_trace_uses_the_clock_of_torchs_profiler(tmp_path: Path) -> None:
    def step_in_profile(group: Group) -> None:
        averager = Averager(group, SHAPES, fusion_bytes=2048)
        cpu = torch.profiler.ProfilerActivity.CPU
        whole = torch.profiler.record_function("the whole step")
        with torch.profiler.profile(activities=[cpu]) as profile, whole:
            take_steps(averager, 1)
        profile.export_chrome_trace(str(tmp_path / "torch.json.gz"))
        averager.report(alone=True).chrome_trace(tmp_path / "ours.json.gz")

    run_well(step_in_profile, 1)
    torchs = json.loads(gzip.decompress((tmp_path / "torch.json.gz").read_bytes()))
    ours = json.loads(gzip.decompress((tmp_path / "ours.json.gz").read_bytes()))
    assert ours["baseTimeNanoseconds"] == torchs["baseTimeNanoseconds"]
    (whole,) = (event for event in torchs["traceEvents"] if event["name"] == "the whole step")
    events = [event for row in rows_of(ours).values() for event in row]
    assert events
    for event in events:
        # The profiler reads another clock and converts it, and this is one of many threads.
        assert whole["ts"] - 5e3 < event["ts"]
        assert event["ts"] + event["dur"] < whole["ts"] + whole["dur"] + 5e3


TWO = Layout.of([ArraySpec(name, (16,), DType.FLOAT32) for name in "ab"], [1, 0], 64)


def step(number: int, **times: Any) -> StepTimes:
    """Return a step of two buffers; times in microseconds."""
    plain: dict[str, Any] = dict.fromkeys(("forward", "begin", "backward", "first"), 0)
    plain |= dict.fromkeys(("full", "posted", "done"), (0, 0))
    plain |= {"waits": ((0, 0), (0, 0)), "sent": 0, "wait": 0, "end": 0}
    in_ns = {name: in_nanoseconds(value) for name, value in (plain | times).items()}
    return StepTimes(number=number, layout=TWO, to_unix=0, **in_ns)


def in_nanoseconds(value: Any) -> Any:
    return tuple(map(in_nanoseconds, value)) if isinstance(value, tuple) else value * 1000


def waited_for(number: int, at: int) -> StepTimes:
    """Return a step of 10 us before, 100 of forward, 5 of loss, 200 of backward, 50 of waiting."""
    passes = {"forward": at, "begin": at + 100, "backward": at + 105, "first": at + 150}
    sent, done = (at + 200, at + 305), (at + 280, at + 350)
    waits = ((at + 305, at + 306), (at + 306, at + 354))
    ends = {"sent": at + 305, "wait": at + 305, "end": at + 355}
    return step(number, full=sent, posted=sent, done=done, waits=waits, **passes, **ends)


def test_a_step_is_forward_backward_exposed_communication_and_the_rest() -> None:
    first, second = break_down([waited_for(n, 1000 + 365 * n) for n in range(3)])
    assert (first.number, second.number) == (0, 1)
    assert first[1:-1] == second[1:-1]
    assert (second.total, second.forward, second.backward, second.exposed) == (365, 100, 200, 50)
    assert second.other == 365 - 100 - 200 - 50
    assert second.hidden == 80  # of the first buffer; the second was fully exposed
    assert first.own == -1
    assert second.own == 305 + 365 - 350
    (only,) = break_down([waited_for(0, 1000)])  # it lasts until its end
    assert (only.total, only.other) == (355, 5)


def test_without_recorded_passes_the_first_ready_array_divides_a_step() -> None:
    buffers = {"posted": (50, 60), "done": (55, 75), "waits": ((60, 60), (60, 75))}
    times = step(0, begin=10, first=40, **buffers, sent=60, wait=60, end=76)
    found, *_ = break_down([times, step(1, begin=100)])
    assert found[1:6] == (90, 30, 20, 16, 24)
    assert found.hidden == 5


def brief(number: int, own: float, exposed: float, **others: float) -> StepBreakdown:
    plain = dict.fromkeys(("total", "forward", "backward", "other", "hidden"), 1.0)
    return StepBreakdown(number=number, own=own, exposed=exposed, **{**plain, **others})


def test_the_slowest_rank_sends_its_last_buffer_longest_after_the_last_average() -> None:
    by_rank = [
        [brief(0, -1, 1), brief(1, 100, 60), brief(2, 100, 60), brief(3, 130, 7)],
        [brief(0, -1, 1), brief(1, 150, 3), brief(2, 140, 8), brief(3, 120, 15)],
        [brief(1, 90, 20), brief(2, 120, 25), brief(3, 80, 51), brief(4, 1, 1)],
    ]
    ranks, n_compared = compare(dict(enumerate(by_rank)))
    assert n_compared == 3
    assert [one.n_slowest for one in ranks] == [1, 2, 0]
    assert ranks[0].waited == pytest.approx((50 + 40 + 0) / 3)
    assert ranks[2].waited == pytest.approx((20 + 20 + 50) / 3)  # the wait never exceeds the total
    assert ranks[1].held_up == pytest.approx((50 + 20) / 3)
    assert ranks[0].held_up == pytest.approx(10 / 3)


def test_a_single_rank_and_ranks_without_a_common_step_are_not_compared() -> None:
    assert compare({0: [brief(0, 1, 1)], 1: [brief(1, 1, 1)]}) == ([], 0)
    (rank,), n_compared = compare({3: [brief(0, 5, 1), brief(1, 5, 1)]})
    assert n_compared == 0
    assert (rank.rank, rank.n_slowest, rank.exposed) == (3, 0, 1)


@in_ranks(3)
def test_ranks_exchange_their_last_steps(group: Group) -> None:
    mine = [brief(n, 10.5 * group.rank, n) for n in range(100 if group.rank else 3)]
    by_rank = gather(group, "steps", mine)
    assert by_rank[0] == [brief(n, 0, n) for n in range(3)]
    assert by_rank[2] == [brief(n, 21, n) for n in range(36, 100)]


@pytest.mark.parametrize(("n_buffers", "n_kept"), [(1, 128), (128, 128), (1024, 16), (10**6, 8)])
def test_fewer_steps_are_kept_if_they_have_many_buffers(n_buffers: int, n_kept: int) -> None:
    log = StepLog()
    log.lay_out(n_buffers)
    assert log.kept.maxlen == n_kept
