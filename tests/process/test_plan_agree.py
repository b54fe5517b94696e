"""The ranks of a group agree on what they choose by: settings, links, tuning files."""

import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from process.ranks import run_ranks, start_ranks
from process.stage import error_of, pretend_hosts

import shoal
from shoal.errors import PeerLost
from shoal.plan import default_cluster
from shoal.plan.tuning import Tuning


def measured_links() -> tuple[object, str, str]:
    pretend_hosts(ranks_per_host=2)
    with shoal.init() as group:
        cluster = group.planner.cluster
        part = group.subgroup([r for r in range(4) if r % 2 == group.rank % 2], "odd or even")
        assert part.planner.cluster.wire == cluster.wire
        data = np.ones(100_000, np.float32)
        group.all_reduce(data)
        assert (data == 4).all()
        return cluster, *(group.planner.choose("all_reduce", 1 << p).name for p in (10, 22))


def test_the_links_between_hosts_are_measured_and_all_ranks_say_the_same() -> None:
    first, *others = run_ranks(measured_links, 4)
    assert all(other == first for other in others)
    cluster = first[0]
    assert cluster.hosts == (0, 0, 1, 1)
    # Loopback is not 10 Gbit/s Ethernet: these are not the defaults.
    assert cluster.wire != default_cluster(cluster.hosts).wire
    assert 1 <= cluster.wire.latency_us < 1e5
    assert 1e-6 < cluster.wire.us_per_byte < 1e-1


def count_the_first_call() -> str:
    pretend_hosts(ranks_per_host=1)
    with shoal.init() as group:
        return str(error_of(group.all_reduce, np.ones(3 + group.rank, np.float32)))


def test_measuring_is_none_of_the_calls_that_errors_count() -> None:
    for words in run_ranks(count_the_first_call, 3):
        assert "(call 1)" in words


def a_wrong_isa() -> str:
    return str(error_of(shoal.init))


def test_an_instruction_set_that_is_not_there_is_refused() -> None:
    (words,) = run_ranks(a_wrong_isa, 1, env={"SHOAL_ISA": "sse"})
    assert words.startswith("SHOAL_ISA='sse' cannot run here")


def assumed_links() -> object:
    pretend_hosts(ranks_per_host=1)
    with shoal.init() as group:
        return group.planner.cluster


def test_without_the_probe_the_links_are_assumed() -> None:
    clusters = run_ranks(assumed_links, 2, env={"SHOAL_PROBE": "0"})
    n_cores = len(os.sched_getaffinity(0))
    assert clusters == [default_cluster((0, 1), n_cores=n_cores)] * 2


def form_twice() -> bool:
    pretend_hosts(ranks_per_host=1)
    links = []
    for _ in range(2):
        with shoal.init() as group:
            links.append(group.planner.cluster.wire)
    return links[0] == links[1]


def test_a_process_measures_a_topology_once() -> None:
    assert run_ranks(form_twice, 2) == [True, True]


def differ(variable: str, values: list[str]) -> str:
    os.environ[variable] = values[int(os.environ["RANK"])]
    return str(error_of(shoal.init))


@pytest.mark.parametrize(
    ("variable", "values"),
    [("SHOAL_ALGO", ["ring", "ring", "tree"]), ("SHOAL_PROBE", ["1", "1", "0"])],
)
def test_ranks_that_were_told_different_things_are_named(variable: str, values: list[str]) -> None:
    for text in run_ranks(differ, 3, variable, values):
        assert f"{variable} is not the same on all ranks: rank 2 differs from rank 0" in text


def choose_by_file(path: str) -> tuple[str, str]:
    os.environ["SHOAL_TUNING"] = path
    with shoal.init() as group:
        data = np.full(256, group.rank + 1, np.float32)
        group.all_reduce(data)
        assert (data == sum(range(1, group.size + 1))).all()
        choice = group.planner.choose("all_reduce", 1024)
        return choice.name, choice.why


def write_tuning(path: Path, n_ranks: int, n_cores: int | None = None) -> Tuning:
    tuning = Tuning(
        hosts=(0,) * n_ranks,
        n_cores=n_cores or len(os.sched_getaffinity(0)),
        times={"all_reduce": {1024: {"direct": 90.0, "tree": 12.5, "ring": 40.0}}},
    )
    tuning.write(path)
    return tuning


def test_choices_come_from_the_tuning_file_and_say_so(tmp_path: Path) -> None:
    write_tuning(tmp_path / "tuned", 2)
    why = "measured at 1 KiB over 2 ranks: tree 12.5 us, ring 40 us, direct 90 us"
    assert run_ranks(choose_by_file, 2, str(tmp_path / "tuned")) == [("tree", why)] * 2


def refuse_file(paths: list[str], mismatch: str = "") -> str:
    os.environ["SHOAL_TUNING"] = paths[int(os.environ["RANK"])]
    if mismatch:
        os.environ["SHOAL_TUNING_MISMATCH"] = mismatch
    error = error_of(choose_by_file, os.environ["SHOAL_TUNING"])
    return "" if error is None else f"{type(error).__name__}: {error}"


def test_a_tuning_file_of_another_cluster_is_refused_or_ignored_as_asked(tmp_path: Path) -> None:
    write_tuning(tmp_path / "other", 4)
    paths = [str(tmp_path / "other")] * 2
    for text in run_ranks(refuse_file, 2, paths):
        assert text.startswith(f"UsageError: the tuning file {paths[0]} is of another cluster: ")
        assert "it is of 4 ranks in one host, this group is 2 ranks in one host" in text
        assert "shoal tune" in text
    assert run_ranks(refuse_file, 2, paths, "ignore") == ["", ""]


def test_ranks_with_different_tuning_files_are_named(tmp_path: Path) -> None:
    paths = [str(tmp_path / name) for name in ("a", "b")]
    write_tuning(Path(paths[0]), 2)
    write_tuning(Path(paths[1]), 2, n_cores=97)
    for text in run_ranks(refuse_file, 2, paths):
        assert "the content of SHOAL_TUNING is not the same on all ranks: rank 1 differs" in text


def die_while_measuring() -> object:
    """Rank 1 leaves once everybody has joined, before the links are measured."""
    pretend_hosts(ranks_per_host=1)
    if os.environ["RANK"] == "1":
        from shoal.plan import agree

        def die(*_: Any) -> None:
            os._exit(7)

        agree.measure = die  # type: ignore[assignment]
    start = time.monotonic()
    error = error_of(shoal.init)
    return error, time.monotonic() - start


def test_a_rank_that_dies_while_links_are_measured_is_lost_like_any_other() -> None:
    with start_ranks(die_while_measuring, 3) as ranks:
        outcomes = ranks.wait(30.0)
    for rank in (0, 2):
        error, took_s = outcomes[rank].value
        assert isinstance(error, PeerLost)
        assert error.rank == 1
        assert took_s < 10


def tune(out: str) -> int:
    from shoal.cli import main

    words = ["--from", "1KiB", "--to", "4KiB", "--rounds", "2", "--collective", "all_reduce"]
    return main(["tune", "--out", out, *words, "--collective", "scatter"])


def test_shoal_tune_writes_what_shoal_tuning_loads(tmp_path: Path) -> None:
    path = tmp_path / "tuned.jsonl"
    assert run_ranks(tune, 3, str(path)) == [0, 0, 0]
    head, *lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert head == {"shoal_tuning": 1, "hosts": [0, 0, 0], "n_cores": head["n_cores"]}
    assert [(line["collective"], line["n_bytes"]) for line in lines] == [
        *(("all_reduce", 1024), ("all_reduce", 4096), ("scatter", 1024), ("scatter", 4096)),
    ]
    assert all(us > 0 for line in lines for us in line["us"].values())
    fastest = min(lines[0]["us"], key=lines[0]["us"].__getitem__)
    for name, why in run_ranks(choose_by_file, 3, str(path)):
        assert name == fastest
        assert why.startswith("measured at 1 KiB over 3 ranks: ")
