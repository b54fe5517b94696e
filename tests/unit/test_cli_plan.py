"""`shoal plan`, also of servers and trainings, `shoal simulate`, and the table of `shoal tune`."""

import re
from dataclasses import replace

import pytest

from shoal.cli import main
from shoal.cli.tune import sizes_between, table
from shoal.plan import Cluster, LinkCost, Nic, Nics, default_cluster
from shoal.plan.choose import choose
from shoal.plan.defaults import wire_of
from shoal.plan.training import StepCost, Training, advice, cost_of_step, ways
from shoal.plan.tuning import Tuning


def plan(capsys: pytest.CaptureFixture[str], words: str, command: str = "plan") -> str:
    assert main([command, *words.split()]) == 0
    return capsys.readouterr().out


def rows(out: str) -> list[list[str]]:
    return [line.split() for line in out.splitlines() if re.match(r"  +\d+  ", line)]


def test_plan_prints_choices_with_reasons(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--hosts 8 --ranks-per-host 4 --link 25Gb --collective all_reduce"
    *lines, channels = plan(capsys, words).splitlines()
    assert channels.startswith("1 channel ")
    assert "32 ranks on 8 hosts" in " ".join(lines)
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
    time = " ".join(rows(out)[-1][1:3])
    assert f"over 8 workers and 4 servers take {time} where sharded" in " ".join(out.split())
    slow, mixed = (
        float(rows(plan(capsys, f"{words} --server-link {link}"))[-1][3].rstrip("x"))
        for link in ("500Mb", "2x1Gb,2x500Mb")
    )
    assert slow < mixed < speeds[-1]
    out = plan(capsys, "--workers 8 --servers 2 --size 4KiB")
    assert [row[4:] for row in rows(out)] == [[], ["unused"], ["unused"]]


def test_workers_sharing_hosts_are_planned_along_rails(capsys: pytest.CaptureFixture[str]) -> None:
    out = plan(capsys, "--workers 16 --workers-per-host 2 --servers 8 --link 1Gb")
    assert out.startswith("all_reduce of 100 MiB, 16 workers on 8 hosts, by servers\n")
    sentence = " ".join(out.split())
    assert "along each of 2 rails 50 MiB over 8 workers and 8 servers take 872 ms" in sentence
    assert sentence.endswith("3.15 ms more pass inside hosts")
    out = " ".join(plan(capsys, "--workers 8 --workers-per-host 4 --servers 2").split())
    assert "not by servers, since along each of 4 rails fewer than 3 workers" in out


def test_a_ring_shows_its_time_and_its_busiest_part(capsys: pytest.CaptureFixture[str]) -> None:
    words = "ring --hosts 8 --ranks-per-host 4 --bytes 100MiB"
    title, _, row = plan(capsys, words, "simulate").splitlines()
    assert title == "all_reduce of 100 MiB, 32 ranks on 8 hosts"
    # 2 * 31/32 * 100 MiB at 10 Gbit/s take 163 ms.
    cells = ["ring", "163 ms", "615 MiB/s", "62", "the NIC out of host 0, 100% of the time"]
    assert re.split(" {2,}", row.strip()) == cells
    words = "sharded --hosts 128 --ranks-per-host 4 --bytes 9MB"
    assert "note: 4 of 512 ranks are simulated; the others" in plan(capsys, words, "simulate")


def test_all_algorithms_of_a_collective_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--all --collective broadcast --hosts 8 --ranks-per-host 4 --link 25Gb --bytes 1MiB"
    lines = plan(capsys, words, "simulate").splitlines()[2:]
    assert {line.split()[0] for line in lines} == {"direct", "binomial", "chain", "scatter_gather"}
    # Direct sends the buffer over one NIC to 28 ranks elsewhere.
    assert lines[-1].split()[0] == "direct"


# `shoal plan --model-bytes`: the steps of a training, by the format of gradients.

MB = 1_000_000


def planned(
    cluster: Cluster, n_mb: int, step_us: float, n_servers: int = 0, every: int = 100
) -> tuple[dict[str, StepCost], str]:
    """Return the cost of each way by its name, and the advice."""
    pool = Nics((Nic.of(cluster.wire),) * n_servers)
    training = Training(n_mb * MB, step_us, cluster, pool)
    costs = [cost_of_step(way, training) for way in ways(every)]
    return {cost.way.name: cost for cost in costs}, advice(costs, step_us)


def test_bytes_follow_from_the_bits_of_an_element() -> None:
    hosts = default_cluster(range(8), wire=wire_of(1000))
    (alone, _), (served, _) = (planned(hosts, 400, 300e3, n) for n in (0, 8))
    n = 100 * MB  # elements
    chunk = 1 + 41 * 12 / 8 + 41  # 1 % of 4,096, with a scale, rounded up to whole bytes
    bits = {
        "float32": 32,
        "bf16": 16,
        "fp16": 16,
        "ChunkTopK(0.01, 8)": 8 * (chunk + 0.5) / 4096,
        'ErrorFeedback("mxfp8")': 8.25,
        'ErrorFeedback("mxint8")': 8.25,
        'ErrorFeedback("mxfp4")': 4.25,
        "DiLoCo, H = 100": 0.32,
        "DiLoCo, H = 100, mxfp4": 0.0425,
    }
    for name, each in bits.items():
        n_bytes = n * each / 8
        assert alone[name].sent_bytes == pytest.approx(2 * 7 / 8 * n_bytes, rel=0.001)
        assert served[name].sent_bytes == pytest.approx(n_bytes, rel=0.001)
    assert alone["float32"].sent_bytes == pytest.approx(700 * MB, rel=1e-5)


def test_a_step_takes_the_time_of_its_bytes_on_a_slow_link() -> None:
    # Messages and memory cost nothing, so only bytes count.
    names = ("memory_us_per_byte", "fresh_us_per_byte", "network_us_per_byte")
    free = default_cluster(range(2), wire=LinkCost(0.0, 8 / 1000, 0.0))
    free = replace(free, **dict.fromkeys(names, 0.0))
    costs, _ = planned(free, 500, 300e3)
    # Two workers send 500 MB each at 125 MB/s, after the forward pass and the first buffer.
    assert costs["float32"].averaging_us == pytest.approx(4e6, rel=0.01)
    assert costs["float32"].step_us == pytest.approx(4.1e6, rel=0.03)
    assert costs["DiLoCo, H = 100"].step_us == pytest.approx(0.34e6, rel=0.01)
    seldom, _ = planned(free, 500, 300e3, every=400)
    assert seldom["DiLoCo, H = 400"].step_us == pytest.approx(0.31e6, rel=0.01)


def test_the_advice_is_to_send_no_less_than_computing_hides() -> None:
    fast, slow = (default_cluster(range(8), wire=wire_of(mbit)) for mbit in (10_000, 100))
    assert planned(fast, 100, 3e6)[1].startswith("do not compress: averaging float32")
    assert planned(fast, 100, 150e3)[1].startswith("bf16 is enough: float32 adds ")
    _, advised = planned(slow, 100, 150e3)
    assert advised.startswith("no average of gradients is hidden: float32 adds ")
    assert "DiLoCo, H = 100" in advised


def test_a_table_has_a_row_for_each_way(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--workers 8 --workers-per-host 4 --link 25Gb --model-bytes 500MB --step 300ms"
    out = plan(capsys, words)
    # Each of two hosts sends the 500 MB once: a quarter for each of its workers.
    row = next(line for line in out.splitlines() if line.strip().startswith("float32"))
    assert row.split()[1:3] == ["119", "MiB"]
    assert row.split()[8:] == ["0.851", "h", "1.14", "TiB", "below", "computing"]
    assert "do not compress" in out


def test_a_size_is_printed_as_given_and_in_binary_units(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"477MiB": "477 MiB", "1GB": "1GB (954 MiB)", "1000000": "1000000 (977 KiB)"}
    for given, printed in sizes.items():
        out = plan(capsys, f"--workers 4 --model-bytes {given} --step 1s")
        assert out.startswith(f"10,000 steps of 4 workers: {printed} of")
