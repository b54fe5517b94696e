"""`shoal plan`, also with servers, `shoal simulate`, and the table of `shoal tune`."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from shoal.cli import main
from shoal.cli.tune import sizes_between, table
from shoal.plan import default_cluster
from shoal.plan.choose import choose
from shoal.plan.tuning import Tuning
from shoal.schedule import COLLECTIVES

if TYPE_CHECKING:
    import pytest


def plan(capsys: pytest.CaptureFixture[str], words: str) -> str:
    assert main(["plan", *words.split()]) == 0
    return capsys.readouterr().out


def rows(out: str) -> list[list[str]]:
    return [line.split() for line in out.splitlines() if re.match(r"  +\d+  ", line)]


def test_plan_prints_choices_with_reasons(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--hosts 8 --ranks-per-host 4 --link 25Gb --collective all_reduce"
    *lines, channels = plan(capsys, words).splitlines()
    assert channels.startswith("1 channel ")
    assert lines[0] == "all_reduce"
    assert len([line for line in lines[1:] if not line.startswith("      ")]) > 1
    assert "32 ranks on 8 hosts" in " ".join(lines)
    out = plan(capsys, "--hosts 1 --ranks-per-host 4")
    assert all(f"\n{collective}\n" in f"\n{out}" for collective in COLLECTIVES)
    words = "--hosts 4 --link 1Gb --wire bf16 --collective all_reduce --collective broadcast"
    out = plan(capsys, words)
    assert out.startswith("all_reduce, in bf16 between hosts\n")
    assert "\nbroadcast\n" in out
    assert "256 MiB in bf16 over 4 ranks on 4 hosts: sharded takes" in " ".join(out.split())


def test_the_table_of_tune_shows_the_models_distance_from_the_fastest() -> None:
    cluster = default_cluster((0, 0, 0, 0))
    chosen = choose("all_gather", 1 << 20, cluster).name
    other = next(name for name in ("ring", "direct") if name != chosen)
    times = {"all_gather": {1 << 20: {chosen: 150.0, other: 100.0}}}
    text = table(Tuning((0,) * 4, 2, times), cluster)
    assert f"model {chosen} 1.50  {other} 100 us, {chosen} 150 us" in text
    assert "within 10 % of the fastest at 0 of 1" in text
    assert sizes_between(4, 1024) == [4, 16, 64, 256, 1024]
    assert sizes_between(5, 64) == [16, 64]


def test_plan_prints_a_time_for_each_number_of_servers(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--workers 8 --servers 4 --link 1Gb"
    out = plan(capsys, words)
    assert out.startswith("all_reduce of 100 MiB, 8 workers, by servers\n")
    assert [row[0] for row in rows(out)] == ["0", "1", "2", "3", "4"]
    speeds = [float(row[3].rstrip("x")) for row in rows(out)]
    assert speeds[0] == 1
    assert speeds == sorted(speeds)
    sentence = " ".join(out.split())
    time = " ".join(rows(out)[-1][1:3])
    assert f"100 MiB over 8 workers and 4 servers take {time} where sharded" in sentence
    assert sentence.endswith("bottleneck: the NICs of workers and servers")
    slow, mixed = (
        float(rows(plan(capsys, f"{words} --server-link {link}"))[-1][3].rstrip("x"))
        for link in ("500Mb", "2x1Gb,2x500Mb")
    )
    assert slow < mixed < speeds[-1]
    out = plan(capsys, "--workers 8 --servers 2 --size 4KiB")
    assert [row[4:] for row in rows(out)] == [[], ["unused"], ["unused"]]


def test_workers_on_shared_hosts_are_planned_along_rails(
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = plan(capsys, "--workers 16 --workers-per-host 2 --servers 8 --link 1Gb")
    assert out.startswith("all_reduce of 100 MiB, 16 workers on 8 hosts, by servers\n")
    sentence = " ".join(out.split())
    assert "along each of 2 rails 50 MiB over 8 workers and 8 servers take 872 ms" in sentence
    assert sentence.endswith("3.15 ms more pass inside hosts")
    out = " ".join(plan(capsys, "--workers 8 --workers-per-host 4 --servers 2").split())
    assert "not by servers, since along each of 4 rails fewer than 3 workers" in out


# `shoal simulate`.

CLUSTER = ["--hosts", "8", "--ranks-per-host", "4", "--link", "25Gb"]


def test_a_ring_shows_its_time_and_its_busiest_part(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "ring", *CLUSTER[:4], "--bytes", "100MiB"]) == 0
    title, _, row = capsys.readouterr().out.splitlines()
    assert title == "all_reduce of 100 MiB, 32 ranks on 8 hosts"
    # 2 * 31/32 * 100 MiB at 10 Gbit/s take 163 ms.
    cells = [*("ring", "163 ms", "615 MiB/s", "62"), "the NIC out of host 0, 100% of the time"]
    assert re.split(" {2,}", row.strip()) == cells
    argv = ["simulate", "sharded", "--hosts", "128", "--ranks-per-host", "4", "--bytes", "9MB"]
    assert main(argv) == 0
    assert "note: 4 of 512 ranks stand for all" in capsys.readouterr().out


def test_all_algorithms_of_a_collective_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["simulate", "--all", "--collective", "broadcast", *CLUSTER, "--bytes", "1MiB"]
    assert main(argv) == 0
    lines = capsys.readouterr().out.splitlines()[2:]
    assert {line.split()[0] for line in lines} == {"direct", "binomial", "chain", "scatter_gather"}
    # Direct sends the buffer over one NIC to 28 ranks elsewhere.
    assert lines[-1].split()[0] == "direct"
