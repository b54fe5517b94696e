"""`shoal plan --model-bytes`: the steps of a training, by the format of gradients."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shoal.cli import main
from shoal.plan import Cluster, LinkCost, Nic, Nics, default_cluster
from shoal.plan.defaults import wire_of
from shoal.plan.training import StepCost, Training, advice, cost_of_step, ways

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
        'ErrorFeedback("mxfp8")': 8.25,
        'ErrorFeedback("mxint8")': 8.25,
        'ErrorFeedback("mxfp4")': 4.25,
        "ChunkTopK(0.01, 8)": 8 * (chunk + 0.5) / 4096,
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
    free = replace(
        default_cluster(range(2), wire=LinkCost(0.0, 8 / 1000, 0.0)),
        memory_us_per_byte=0.0,
        fresh_us_per_byte=0.0,
        network_us_per_byte=0.0,
    )
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


def test_servers_and_codecs_shorten_a_step() -> None:
    hosts = default_cluster(range(8), wire=wire_of(1000))
    (alone, _), (served, _) = (planned(hosts, 500, 300e3, n) for n in (0, 8))
    names = ["float32", "bf16", 'ErrorFeedback("mxfp8")', 'ErrorFeedback("mxfp4")']
    for costs in (alone, served):
        steps = [costs[name].step_us for name in names]
        assert steps == sorted(steps, reverse=True)
    assert all(served[name].step_us < alone[name].step_us for name in names)


def test_a_table_has_a_row_for_each_way(capsys: pytest.CaptureFixture[str]) -> None:
    words = "plan --workers 8 --workers-per-host 4 --link 25Gb --model-bytes 500MB --step 300ms"
    assert main(words.split()) == 0
    out = capsys.readouterr().out
    whole = "10,000 steps of 8 workers: 500MB (477 MiB) of gradients, 300 ms of computing"
    assert out.startswith(whole)
    # Each of two hosts sends the 500 MB once: a quarter for each of its workers.
    row = next(line for line in out.splitlines() if line.strip().startswith("float32"))
    assert row.split()[1:3] == ["119", "MiB"]
    assert row.split()[8:] == ["0.851", "h", "1.14", "TiB", "below", "computing"]
    assert "below computing" in row
    assert "do not compress" in out


def test_a_size_is_printed_as_given_and_in_the_unit_of_the_table(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for given, printed in (
        ("477MiB", "477 MiB"),
        ("1GB", "1GB (954 MiB)"),
        ("1000000", "1000000 (977 KiB)"),
    ):
        assert main(f"plan --workers 4 --model-bytes {given} --step 1s".split()) == 0
        assert capsys.readouterr().out.startswith(f"10,000 steps of 4 workers: {printed} of")
