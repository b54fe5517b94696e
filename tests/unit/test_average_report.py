"""What reports of averaging can be made into: tables, pictures, traces, and records of calls."""

from __future__ import annotations

import gc
import gzip
import importlib.util
import io
import itertools
import json
import logging
import pickle
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from unit.averages import SHAPES, fill
from unit.in_process import run_in_threads, run_well

from shoal.average import Averager, AveragingReport
from shoal.errors import TimedOut, UsageError

if TYPE_CHECKING:
    import shoal


def needs(module: str) -> Any:
    return pytest.mark.skipif(
        importlib.util.find_spec(module) is None, reason=f"NOT TESTED: {module} is not installed"
    )


def take_steps(averager: Averager, n_steps: int) -> None:
    names = list(SHAPES)
    for step in range(n_steps):
        averager.begin()
        fill(averager, step, names if averager.group.rank == 0 else names[::-1])
        averager.wait()


def take_and_report(group: shoal.Group, n_steps: int, alone: bool) -> AveragingReport:
    averager = Averager(group, SHAPES, fusion_bytes=2048)
    take_steps(averager, n_steps)
    return averager.report(alone=alone)


def one_report(n_steps: int = 4) -> AveragingReport:
    report: AveragingReport = run_well(take_and_report, 1, n_steps, True)[0]
    return report


def test_every_rank_reports_the_same_of_all_ranks_and_its_own_steps() -> None:
    reports = run_well(take_and_report, 3, 6, False)
    assert all(report.ranks == reports[0].ranks for report in reports)
    assert [one.rank for one in reports[0].ranks] == [0, 1, 2]
    assert reports[0].n_compared == 4  # not the first, which follows none, and not the last
    assert sum(one.n_slowest for one in reports[0].ranks) == 4
    for rank, report in enumerate(reports):
        assert report.rank == rank
        assert [step.number for step in report.steps] == [0, 1, 2, 3, 4]
        for step in report.steps:
            parts = step.forward + step.backward + step.exposed + step.other
            assert step.total == pytest.approx(parts)
            assert min(step[1:7]) >= 0
        assert 0 <= report.hidden_share <= 1
        for buffer in report.buffers:
            assert buffer.full <= buffer.posted <= buffer.done
        held = [name for buffer in report.buffers for name in buffer.arrays]
        assert set(held) <= set(SHAPES)
        assert reports[0].slowest is not None
        assert f"Rank {reports[0].slowest.rank} was the slowest in" in str(report)


def report_before_any_step(group: shoal.Group) -> AveragingReport:
    return Averager(group, SHAPES).report()


def test_a_report_before_the_first_step_says_so() -> None:
    for report in run_well(report_before_any_step, 2):
        assert "No step has ended yet" in str(report)
        assert json.loads(report.to_json())["steps"] == []
        with pytest.raises(UsageError, match="no step has ended"):
            report.plot("never written.png")


def report_in_mid_step(group: shoal.Group) -> AveragingReport:
    averager = Averager(group, {"a": ((8,), "float32"), "b": ((8,), "float32")}, fusion_bytes=64)
    averager.begin()
    averager.ready("b")
    report = averager.report(alone=True)
    averager.ready("a")
    averager.wait()
    return report


def test_a_report_in_mid_step_names_what_has_not_come() -> None:
    for rank, report in enumerate(run_well(report_in_mid_step, 2)):
        assert report.missing == ("a",)
        assert report.rank == rank
        assert "Step 0 has not ended; not ready on this rank: 'a'" in str(report)


def test_json_has_what_the_report_has() -> None:
    report = one_report()
    told = json.loads(report.to_json())
    assert told["steps"][0] == report.steps[0]._asdict()
    assert [one["number"] for one in told["buffers"]] == list(range(len(report.buffers)))
    assert told["slowest"] is None


@needs("rich")
def test_rich_shows_the_words_of_the_plain_tables() -> None:
    from rich.console import Console

    report = one_report()
    shown = io.StringIO()
    Console(file=shown, width=200).print(report)
    words = set(shown.getvalue().split())
    assert set(str(report).split()) <= words


@needs("rich")
def test_rich_breaks_no_head_of_a_column_on_a_terminal_of_80_letters() -> None:
    from rich.console import Console

    shown = io.StringIO()
    Console(file=shown, width=80).print(run_well(take_and_report, 2, 3, False)[0])
    heads = {"forward", "backward", "exposed", "slowest", "hidden", "posted", "waited", "holds"}
    assert heads <= set(shown.getvalue().split())


@needs("matplotlib")
def test_a_report_is_drawn_as_a_png(tmp_path: Path) -> None:
    for number, report in enumerate([*run_well(take_and_report, 2, 3, False), one_report()]):
        report.plot(tmp_path / f"{number}.png")
        assert (tmp_path / f"{number}.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("flight", "pieces"),
    [
        ((0, 9), [((0, 9), False)]),
        ((5, 15), [((5, 10), False), ((10, 15), True)]),
        ((12, 18), [((12, 18), True)]),
        (
            (0, 50),
            [
                ((0, 10), False),
                ((10, 20), True),
                ((20, 30), False),
                ((30, 40), True),
                ((40, 50), False),
            ],
        ),
        ((20, 30), [((20, 30), False)]),
    ],
)
def test_of_a_buffers_way_that_is_drawn_as_exposed_for_which_the_rank_waited(
    flight: tuple[int, int], pieces: list[Any]
) -> None:
    from shoal.average.report.plot import parted

    assert parted(flight, [(10, 20), (30, 40)]) == pieces


def rows_of(trace: dict[str, Any]) -> dict[int, list[dict[str, Any]]]:
    rows: dict[int, list[dict[str, Any]]] = {}
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            rows.setdefault(event["tid"], []).append(event)
    return rows


def test_a_trace_has_all_buffers_and_no_two_of_a_row_at_once(tmp_path: Path) -> None:
    before = time.time_ns()
    report = one_report(5)
    report.chrome_trace(tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())
    rows = rows_of(trace)
    events = [event for row in rows.values() for event in row]
    n_buffers = sum(event["name"].startswith("buffer ") for event in events)
    assert n_buffers == 5 * len(report.buffers)
    for row in rows.values():
        row.sort(key=lambda event: event["ts"])
        for one, other in itertools.pairwise(row):
            assert one["ts"] + one["dur"] <= other["ts"] + 0.01
    for event in events:
        assert before - 10**9 < trace["baseTimeNanoseconds"] + event["ts"] * 1e3 < time.time_ns()
    assert {event["pid"] for event in trace["traceEvents"]} == {0}


@needs("torch")
def test_a_trace_beside_torchs_is_on_its_clock(tmp_path: Path) -> None:
    import torch

    def step_in_profile(group: shoal.Group) -> None:
        averager = Averager(group, SHAPES, fusion_bytes=2048)
        cpu = torch.profiler.ProfilerActivity.CPU
        whole = torch.profiler.record_function("the whole step")
        with torch.profiler.profile(activities=[cpu]) as profile, whole:
            take_steps(averager, 1)
        profile.export_chrome_trace(str(tmp_path / "torch.json.gz"))
        report = averager.report(alone=True)
        report.chrome_trace(tmp_path / "both.json", beside=tmp_path / "torch.json.gz")
        report.chrome_trace(tmp_path / "ours.json.gz")

    run_well(step_in_profile, 1)
    torchs = json.loads(gzip.decompress((tmp_path / "torch.json.gz").read_bytes()))
    ours = json.loads(gzip.decompress((tmp_path / "ours.json.gz").read_bytes()))
    assert ours["baseTimeNanoseconds"] == torchs["baseTimeNanoseconds"]
    both = json.loads((tmp_path / "both.json").read_text())
    assert both["traceEvents"][: len(torchs["traceEvents"])] == torchs["traceEvents"]
    (whole,) = (event for event in both["traceEvents"] if event["name"] == "the whole step")
    added = [event for event in both["traceEvents"] if event.get("cat") == "shoal"]
    assert len(added) == sum(map(len, rows_of(ours).values()))
    rows = {event["tid"] for event in added}
    assert len(rows) == len(rows_of(ours))
    assert rows.isdisjoint(rows_of(torchs))
    for event in added:
        assert event["pid"] == whole["pid"]
        # The profiler reads another clock and converts it, and this is a thread of many.
        assert whole["ts"] - 5e3 < event["ts"]
        assert event["ts"] + event["dur"] < whole["ts"] + whole["dur"] + 5e3
    (tmp_path / "none.json").write_text("{}")
    report = one_report()
    with pytest.raises(ValueError, match="no traceEvents"):
        report.chrome_trace(tmp_path / "x.json", beside=tmp_path / "none.json")


# Flight records, as torch's analyzer reads them.


def analyze(folder: Path) -> tuple[Any, str]:
    """torch's database of the dumps, and what its analyzer said."""
    from torch.distributed.flight_recorder.fr_trace import main

    said = io.StringIO()
    handler = logging.StreamHandler(said)
    logging.getLogger("Flight Recorder").addHandler(handler)
    try:
        main([str(folder), "--prefix", "rank_", "-o", str(folder.parent / "db")])
    finally:
        logging.getLogger("Flight Recorder").removeHandler(handler)
        gc.enable()  # it turns that off
    _, database = pickle.loads((folder.parent / "db").read_bytes())
    return database, said.getvalue()


def take_and_record(group: shoal.Group, folder: Path) -> int:
    averager = Averager(group, SHAPES, fusion_bytes=2048)
    take_steps(averager, 5)
    assert averager.report().flight_record(folder / "rank_").name == f"rank_{group.rank}"
    return len(averager.layout.buffers)


@needs("torch")
def test_torchs_analyzer_finds_all_calls_of_all_ranks_matched(tmp_path: Path) -> None:
    n_buffers = run_well(take_and_record, 3, tmp_path / "dumps")[0]
    database, said = analyze(tmp_path / "dumps")
    assert len(database.collectives) == 5 * n_buffers
    assert all(one.pass_check for one in database.collectives)
    assert all(one.collective_name == "gloo:all_reduce" for one in database.collectives)
    assert all(one.collective_state == "completed" for one in database.collectives)
    assert {one.global_rank for one in database.memberships} == {0, 1, 2}
    assert "Not all ranks" not in said


def average_some(group: shoal.Group) -> Averager:
    """Of eight arrays; "0" is in the last buffers, and "7" is not."""
    arrays = {str(number): ((1000,), "float32") for number in range(8)}
    averager = Averager(group, arrays, fusion_bytes=4096)
    last = set(averager.layout.buffers_of[0])
    assert last.isdisjoint(averager.layout.buffers_of[7])
    return averager


def ready(averager: Averager, *, but_0_on: int) -> None:
    """All that is averaged without "0" is an average, and "0" is ready but on one rank."""
    averager.begin()
    for name in "7654321":
        averager.ready(name)
    if averager.group.rank != but_0_on:
        averager.ready("0")
    averager.wait_for("7")


def record_in_mid_step(group: shoal.Group, folder: Path) -> list[int]:
    averager = average_some(group)
    kept = averager.log.kept
    averager.log.kept = type(kept)(maxlen=3 + group.rank)  # as where ranks began to log at times
    for _ in range(6):
        ready(averager, but_0_on=-1)
        averager.wait()
    ready(averager, but_0_on=1)
    group.barrier()  # all that can leave has left
    for array in range(1, 8):
        if not set(averager.layout.buffers_of[array]) & set(averager.layout.buffers_of[0]):
            averager.wait_for(array)
    report = averager.report(alone=True)
    report.flight_record(folder / "rank_")
    if group.rank == 1:
        averager.ready("0")
    averager.wait()
    return [n for n, at in enumerate(report.times[-1].posted) if not at]


@needs("torch")
def test_torchs_analyzer_names_the_rank_that_has_missed_a_call(tmp_path: Path) -> None:
    nowhere = run_well(record_in_mid_step, 3, tmp_path / "dumps")
    assert nowhere[0] == nowhere[2] == []
    assert nowhere[1]
    database, said = analyze(tmp_path / "dumps")
    dumped = pickle.loads((tmp_path / "dumps" / "rank_0").read_bytes())["entries"]
    first = dumped[-len(nowhere[1])]["collective_seq_id"]
    missed = [one for one in database.collectives if one.missing_ranks]
    assert [one.collective_seq_id for one in missed] == list(range(first, first + len(nowhere[1])))
    assert all(one.missing_ranks == {1} for one in missed)
    assert f"Not all ranks joining collective, sequence number: {first}\n" in said
    assert "missing ranks: {1}" in said


def test_a_record_is_what_torchs_recorder_writes(tmp_path: Path) -> None:
    started = time.time_ns()
    path = one_report(3).flight_record(tmp_path / "new" / "trace_")
    assert path == tmp_path / "new" / "trace_0"
    assert [one.name for one in path.parent.iterdir()] == ["trace_0"]
    dump = pickle.loads(path.read_bytes())
    assert dump["version"] == "2.10"
    assert dump["pg_config"]["average 0"]["ranks"] == "[0]"
    sequence = [entry["collective_seq_id"] for entry in dump["entries"]]
    assert sequence == list(range(1, len(sequence) + 1))
    assert dump["pg_status"]["average 0"]["last_completed_collective"] == sequence[-1]
    kinds = {entry["input_dtypes"][0] for entry in dump["entries"]}
    assert kinds == {"Float", "Double", "Half", "ComplexFloat"}
    for entry in dump["entries"]:
        assert entry["state"] == "completed"
        assert started - 10**9 < entry["time_created_ns"] < time.time_ns()
        assert entry["time_created_ns"] <= entry["time_discovered_completed_ns"]
        assert entry["input_sizes"] == entry["output_sizes"]


def leave_one_out(group: shoal.Group) -> int:
    averager = average_some(group)
    ready(averager, but_0_on=1)
    group.barrier()  # all that can leave has left
    averager.wait()
    return 0


def read_dumps(folder: Path) -> list[Any]:
    return [pickle.loads((folder / f"rank_{rank}").read_bytes()) for rank in range(2)]


def test_ranks_write_their_calls_where_an_array_never_came(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_FR_DUMP_TEMP_FILE", str(tmp_path / "rank_"))
    errors = run_in_threads(leave_one_out, 2)
    assert all(isinstance(error, UsageError) for error in errors)
    dumps = read_dumps(tmp_path)
    assert [dump["never_ready"] for dump in dumps] == [[], ["0"]]
    n_left, n_left_on_1 = (len(dump["entries"]) for dump in dumps)
    assert n_left > n_left_on_1 > 0
    assert {entry["state"] for entry in dumps[0]["entries"][n_left_on_1:]} == {"started"}


def wait_in_vain(group: shoal.Group) -> None:
    averager = average_some(group)
    group.timeout_s = 60 if group.rank else 0.2
    ready(averager, but_0_on=1)
    if group.rank == 1:  # until the other one has given up
        group.barrier(name="never")
    averager.wait()


@pytest.mark.parametrize("on_timeout", ["1", "0"])
def test_a_rank_whose_wait_times_out_writes_its_calls_if_it_is_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_timeout: str
) -> None:
    monkeypatch.setenv("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", str(tmp_path / "rank_"))
    monkeypatch.setenv("TORCH_FR_DUMP_ON_TIMEOUT", on_timeout)
    errors = run_in_threads(wait_in_vain, 2)
    assert isinstance(errors[0], TimedOut)
    assert (tmp_path / "rank_0").exists() == (on_timeout == "1")
    if on_timeout == "1":
        entries = pickle.loads((tmp_path / "rank_0").read_bytes())["entries"]
        assert entries[-1]["state"] == "started"


def test_a_folder_that_cannot_be_written_to_hides_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TORCH_FR_DUMP_TEMP_FILE", str(tmp_path / "file" / "rank_"))
    errors = run_in_threads(leave_one_out, 2)
    assert all("'0' never became ready on rank 1" in str(error) for error in errors)
    assert "the calls of rank 1 cannot be written" in caplog.text
