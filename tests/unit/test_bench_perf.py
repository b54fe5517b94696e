"""`shoal bench` without ranks: sizes, statistics, the table of nccl-tests and the file."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shoal.bench.collectives import COLLECTIVES
from shoal.bench.elements import ELEMENTS, elements_of, operations_of
from shoal.bench.measured import call_times
from shoal.bench.perf import run_sweep
from shoal.bench.sweep import ALL_RANKS, BenchPlace, CallKind, SizeRange, Sweep
from shoal.cli import main


class FixedPool:
    """Ranks with scripted answers: for each round the seconds of its calls, by rank."""

    def __init__(self, times_s: Sequence[Sequence[float]], n_wrong: int = 0, hosts: str = "aa"):
        self._times_s, self._n_wrong, self._hosts = times_s, n_wrong, hosts
        self.asked: list[tuple[str, Mapping[str, Any]]] = []

    def ask(self, task: str, **arguments: Any) -> list[dict[str, Any]]:
        self.asked.append((task, arguments))
        ranks = range(len(self._hosts))
        if task == "who":
            return [{"pid": 7 + r, "host": self._hosts[r], "net": "n"} for r in ranks]
        if task == "check":
            return [{"n_wrong": self._n_wrong * (rank == 1)} for rank in ranks]
        if task == "forget":
            return [{} for _ in ranks]
        n = arguments["n_samples"]
        rest = {"cpu_s": [1e-3] * n, "sent": 800.0, "received": 600.0}
        return [{"times_s": list(self._times_s[rank][:n]), **rest} for rank in ranks]


def run_fixed(sweep: Sweep, out: Path | None = None, argv: Any = (), **pools: FixedPool) -> int:
    return run_sweep(
        sweep, argv, out, lambda library, *what, **how: pools[library].ask(*what, **how)
    )


TWO = BenchPlace(2, is_joined=True)


def test_percentiles_and_bus_bandwidths_equal_those_of_nccl_tests() -> None:
    # For 1 to 20 the median is the upper of the middle two; 95 % of 20 are 19 calls.
    times = call_times([float(n) for n in range(20, 0, -1)])
    assert times == (10.5, 11, 19, 20)
    assert call_times([float(n) for n in range(1, 101)]).p99 == 99
    assert set(call_times([2.0])) == {2.0}
    factors = {"all_reduce": 1.5, "broadcast": 1.0, "reduce": 1.0, "send_recv": 2.0, "barrier": 0.0}
    blocks = ("reduce_scatter", "all_gather", "all_to_all", "gather", "scatter")
    wanted = factors | dict.fromkeys(blocks, 0.75)
    assert {name: one.bus(4) for name, one in COLLECTIVES.items()} == wanted


def test_sizes_grow_by_a_factor_or_a_step() -> None:
    assert SizeRange(8, 100, factor=4).sizes() == [8, 32]
    assert SizeRange(8, 20, step=4).sizes() == [8, 12, 16, 20]
    assert SizeRange(8, 8).sizes() == [8]


def test_blocks_are_multiples_of_elements_and_smaller_sizes_are_left_out() -> None:
    kind = CallKind("all_gather", ELEMENTS["float32"], "", -1)
    assert kind.fitting([4, 8, 13, 100], 3) == [12, 96]
    assert kind.count(96, 3) == 8
    whole = CallKind("all_reduce", ELEMENTS["float64"], "sum", -1)
    assert whole.fitting([4, 20], 3) == [16]
    assert whole.count(16, 3) == 2
    barrier = CallKind("barrier", ELEMENTS["float32"], "", -1)
    assert barrier.fitting([4, 8], 2) == [0]  # once for all sizes


def test_types_operations_and_roots_vary_in_nccl_tests_order() -> None:
    vary = {"elements": elements_of("half,float"), "operations": operations_of("prod,max")}
    sweep = Sweep(BenchPlace(2), ("reduce", "broadcast"), roots=(ALL_RANKS,), **vary)
    kinds = [(k.collective, k.element.nccl, k.redop, k.root) for k in sweep.kinds()]
    assert kinds[:4] == [("reduce", "half", op, r) for op in ("prod", "max") for r in (0, 1)]
    assert kinds[8:] == [("broadcast", t, "none", r) for t in ("half", "float") for r in (0, 1)]
    # Names of shoal and of nccl-tests are equivalent.
    assert elements_of("float32,double") == [ELEMENTS["float32"], ELEMENTS["float64"]]
    assert operations_of("product") == operations_of("prod") == ["product"]
    assert len(elements_of("all")) == len(ELEMENTS)


def test_the_bytes_that_must_cross_a_nic_depend_on_hosts_and_not_on_ranks() -> None:
    def least_s(collective: str, n_ranks: int, n_hosts: int) -> float | None:
        return BenchPlace(n_ranks, n_hosts, 8.0).least_time_s(collective, 1448)

    def frames(n: float) -> object:
        return pytest.approx(n * 1514e-6)  # of 1448 bytes of payload, at 1 byte per microsecond

    assert least_s("broadcast", 4, 4) == frames(1)
    assert least_s("all_reduce", 4, 4) == frames(1.5)
    assert least_s("all_reduce", 8, 4) == frames(1.5)
    assert least_s("all_to_all", 4, 4) == frames(0.75)
    assert least_s("all_to_all", 8, 4) == frames(1.5)  # two ranks contribute a size each
    assert least_s("send_recv", 4, 4) == frames(2)  # there and back
    assert least_s("send_recv", 8, 4) is None  # pairs share a host
    assert least_s("all_reduce", 4, 0) is None
    assert BenchPlace(4, 4).least_time_s("all_reduce", 1448) is None


def test_a_row_has_the_format_of_nccl_tests(capsys: pytest.CaptureFixture[str]) -> None:
    # 8 MB in 1 ms (slowest ranks: 0.5 and 1.5) are 8 GB/s; two ranks: bus bandwidth is the same.
    sweep = Sweep(TWO, sizes=SizeRange(8_000_000, 8_000_000), n_calls=2, n_rounds=1)
    pool = FixedPool([[0.5e-3, 1e-3], [0.1e-3, 1.5e-3]])
    assert run_fixed(sweep, shoal=pool) == 0
    lines = capsys.readouterr().out.splitlines()
    (row,) = (line for line in lines if not line.startswith("#"))
    assert row == (
        "     8000000       2000000     float     sum      -1"
        "      N/A     N/A     N/A     N/A  1000.00    8.00    8.00       0"
    )
    assert "# Avg bus bandwidth    : 8 " in lines
    assert "# Out of bounds values : 0 OK" in lines
    (beside,) = (line for line in lines if "in place    shoal" in line)
    assert beside.split()[5:] == ["1500.00", "1500.00", "1500.00", "1000.00", "-", "-", "0"]


def test_calls_are_spread_over_rounds_and_the_first_round_warms_up() -> None:
    pool = FixedPool([[1e-3] * 9] * 2)
    sweep = Sweep(TWO, sizes=SizeRange(64, 64), n_calls=8, n_rounds=3, n_warmup=4, is_apart=True)
    run_fixed(sweep, shoal=pool)
    turns = [asked for task, asked in pool.asked if task == "measure"]
    assert [(turn["n_samples"], turn["n_warmup"]) for turn in turns] == [(3, 4), (3, 1), (2, 1)]
    assert all(turn["is_apart"] and turn["n_calls"] == 1 for turn in turns)
    assert [task for task, _ in pool.asked].count("check") == 1


def test_peers_are_compared_by_round(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run.json"
    pools = {"shoal": FixedPool([[1e-3] * 5] * 2), "gloo": FixedPool([[2.5e-3] * 5] * 2)}
    sweep = Sweep(TWO, sizes=SizeRange(64, 64), peers=("gloo",), n_calls=5, n_rounds=5)
    assert run_fixed(sweep, out, **pools) == 0
    points = json.loads(out.read_text())["points"]
    assert [(one["library"], one["ratio"]) for one in points] == [("shoal", None), ("gloo", 2.5)]
    assert capsys.readouterr().out.count("2.50") == 1


def test_wrong_results_are_only_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run.json"
    pools = {"shoal": FixedPool([[1e-3]] * 2, n_wrong=3), "gloo": FixedPool([[2e-3]] * 2)}
    sweep = Sweep(TWO, sizes=SizeRange(64, 64), peers=("gloo",), n_calls=1, n_rounds=1, n_checks=2)
    assert run_fixed(sweep, out, **pools) == 1
    ours, theirs = json.loads(out.read_text())["points"]
    assert ours["n_wrong"] == 6  # of two calls
    assert ours["ratio"] is theirs["ratio"] is None
    assert "# Out of bounds values : 1 FAILED" in capsys.readouterr().out
    assert run_fixed(replace(sweep, n_checks=0), **pools) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("#")]
    assert [row.endswith("N/A") for row in rows] == [True]


def test_the_file_has_the_command_and_the_slowest_rank_of_every_call(tmp_path: Path) -> None:
    out = tmp_path / "run.json"
    sweep = Sweep(TWO, ("all_gather",), SizeRange(64, 64), n_calls=2, n_rounds=1)
    run_fixed(sweep, out, ["all_gather"], shoal=FixedPool([[1e-3, 1e-3], [1e-3, 3e-3]]))
    document = json.loads(out.read_text())
    assert document["run"]["command"] == "shoal bench all_gather"
    first = document["points"][0]
    assert (first["type"], first["root"]) == ("float", -1)
    assert (first["times_us"], first["p50_us"]) == ([1000.0, 3000.0], 3000.0)
    # Bytes over NICs are per rank, and only where there are several hosts.
    sweep = Sweep(BenchPlace(4, is_joined=True), sizes=SizeRange(64, 64), n_calls=1, n_rounds=1)
    for hosts, sent in (("aabb", 400.0), ("aaaa", None)):
        run_fixed(sweep, out, shoal=FixedPool([[1e-3]] * 4, hosts=hosts))
        (point,) = json.loads(out.read_text())["points"]
        assert point["sent_bytes"] == sent


def test_a_launched_rank_starts_no_other_ranks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "0")
    assert main(["bench", "--ranks", "2"]) == 2
    assert "a launcher has started these ranks" in capsys.readouterr().err


def test_calls_that_do_not_fit_are_left_out_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    place, sizes = BenchPlace(3, is_joined=True), SizeRange(8, 8)
    sweep = Sweep(place, ("send_recv", "all_gather", "reduce"), sizes, n_calls=1, n_rounds=1)
    assert run_fixed(sweep, shoal=FixedPool([[1e-3]] * 3, hosts="aaa")) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "# send_recv: not measured, 3 ranks cannot be paired" in lines
    assert "# all_gather: an element of each rank takes 12 B" in lines
    assert len([line for line in lines if not line.startswith("#")]) == 1
