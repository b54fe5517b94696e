"""The screens of `shoal top`, and statistics of links that a thread holds."""

import json
import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from unit.test_remote_top import document

from shoal.cli import main
from shoal.state.prometheus import text_of
from shoal.state.stats import stats_of
from shoal.state.tally import Tally

DASHBOARD = Path(__file__).parents[2] / "deploy" / "grafana.json"

LINK = {
    "rank": 1,
    "host": "b",
    "address": "10.0.0.2",
    "kind": "tcp",
    "state": "alive",
    "n_paths_lost": 1,
    "rtt_us": 1500.0,
    "n_retransmits": 3,
    "bytes_out": 2048,
    "bytes_in": 4096,
    "bytes_out_per_s": 1024.0,
    "bytes_in_per_s": 0.0,
}
WAIT = {"rank": 1, "host": "b", "why": "no data", "since_s": 2.0, "in_call": False}
CALL = {"group": "world", "what": "barrier", "n_bytes": 1, "age_s": 2.5, "waits": [WAIT]}


def answer(counted_s: float, busy_s: float) -> dict[str, Any]:
    shown = {"in_flight": [CALL], "links": [LINK], "stalls": {"no_grant": 2}, "n_calls": 9}
    times = {"counted_s": counted_s, "busy_s": busy_s, "ended": {"barrier": (8, 8)}}
    return json.loads(document(0, size=2, pid=7, **shown, **times))


def test_each_screen_counts_from_the_previous_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = [[answer(10.0, 2.0)], [answer(12.0, 3.0)]]
    monkeypatch.setattr("shoal.state.monitor.read_all", lambda: answers.pop(0))

    def pause(_seconds: float) -> None:
        if not answers:
            raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", pause)
    assert main(["top"]) == 130
    shown = capsys.readouterr().out
    shares = [line for line in shown.splitlines() if line.startswith("rank 0, process 7: ")]
    numbers = "of the time in calls, 1 of 9 in flight; out 1 KiB/s, in 0 B/s"
    assert shares == [f"rank 0, process 7: {share}% {numbers}" for share in (20, 50)]
    for fact in ("round trip 1.5 ms, 3 retransmitted, 1 path lost", "stalls: 2 no_grant"):
        assert fact in shown


def test_a_process_in_two_worlds_counts_as_one_rank(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    worlds = [(77, "world"), (77, "with servers"), (78, "world")]
    found = [json.loads(document(0, pid=pid, world=world)) for pid, world in worlds]
    monkeypatch.setattr("shoal.state.monitor.read_all", lambda: found)
    assert main(["top", "--once"]) == 0
    title, *lines = capsys.readouterr().out.splitlines()
    assert title.endswith(": 2 ranks here")
    assert sum(line.startswith("rank 0, process 77: ") for line in lines) == 2


def test_links_that_a_thread_holds_are_not_waited_for() -> None:
    patience: list[float] = []
    tally = Tally()
    mesh = SimpleNamespace(state=patience.append)  # returns None
    what = {"mesh": mesh, "names": [SimpleNamespace(host="a", host_id="1")] * 2}
    stats = stats_of(SimpleNamespace(**what, epoch=255, rank=1, groups=(), count=lambda: tally))
    assert patience == [0.25]
    assert (stats.world, stats.rank, stats.size, stats.n_hosts) == ("00000000000000ff", 1, 2, 1)
    assert (stats.is_readable, stats.in_flight, stats.links, stats.stalls) == (False, (), (), {})


def test_the_dashboard_shows_every_metric_by_its_labels() -> None:
    families = text_string_to_metric_families(text_of([answer(10.0, 2.0)]))
    labels = {one.name: set(one.labels) for family in families for one in family.samples}
    dashboard = json.loads(DASHBOARD.read_text())
    panels, variables = dashboard["panels"], dashboard["templating"]["list"]
    used = set()
    for panel in panels:
        for target in panel["targets"]:
            names = re.findall(r"shoal_\w+", target["expr"])
            used |= {*names}
            asked = re.findall(r"(\w+)=~?\"", target["expr"])
            asked += re.findall(r"{{(\w+)}}", target["legendFormat"])
            by = re.findall(r"by \(([^)]*)\)", target["expr"])
            asked += [label for some in by for label in some.split(", ")]
            assert all({*asked} <= labels[name] for name in names), target
    assert used == {*labels}
    for one in variables[1:]:
        name, label = re.fullmatch(r"label_values\((\w+).*, (\w+)\)", one["query"]).groups()
        assert label in labels[name]
        assert one["name"] == label
    assert len({panel["id"] for panel in panels}) == len(panels)
    places = [tuple(panel["gridPos"].values()) for panel in panels]
    cells = [(x + i, y + j) for x, y, w, h in places for i in range(w) for j in range(h)]
    assert len({*cells}) == len(cells), "panels overlap"
    assert max(x for x, _ in cells) < 24
