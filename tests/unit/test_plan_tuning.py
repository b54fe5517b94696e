"""Tuning files: a written file can be read, and a fault is named by its line."""

from pathlib import Path

import pytest

from shoal.errors import UsageError
from shoal.plan import Planner, default_cluster
from shoal.plan.choose import choose
from shoal.plan.tuning import Tuning, read_tuning

HEAD = '{"shoal_tuning": 1, "hosts": [0, 0, 1], "n_cores": 2}'
LINE = '{"collective": "all_reduce", "n_bytes": 1024, "us": {"ring": 4.5, "direct": 9.25}}'
TIMES = {"all_reduce": {1024: {"ring": 4.5, "direct": 9.25}}}


def test_a_tuning_is_read_as_it_was_written(tmp_path: Path) -> None:
    written = Tuning((0, 0, 1), 2, TIMES)
    written.write(tmp_path / "file")
    assert (tmp_path / "file").read_text() == f"{HEAD}\n{LINE}\n"
    read = read_tuning(tmp_path / "file")
    assert (read.hosts, read.n_cores, read.times) == ((0, 0, 1), 2, TIMES)
    assert read.digest > 0


def test_a_fault_is_named_by_file_and_line(tmp_path: Path) -> None:
    for content, message in (
        ("", "line 1"),
        ("no JSON", "line 1"),
        ("[1, 2]", "line 1"),
        ('{"shoal_tuning": 2, "hosts": [0], "n_cores": 1}', "line 1: version 2"),
        ('{"hosts": [0], "n_cores": 1}', "line 1: 'shoal_tuning' is missing"),
        ('{"shoal_tuning": 1, "hosts": ["a"], "n_cores": 1}', "line 1: hosts"),
        ('{"shoal_tuning": 1, "hosts": [0], "n_cores": 0}', "line 1: n_cores 0"),
        (f"{HEAD}\n{LINE}\n{LINE[:-9]}", "line 3"),
        (f"{HEAD}\n" + LINE.replace("1024", "-1"), "line 2: n_bytes -1"),
        (f"{HEAD}\n" + LINE.replace("ring", "rign"), "line 2: no algorithm 'rign'"),
        (f"{HEAD}\n" + LINE.replace("4.5", "NaN"), "line 2: nan is not a number of microseconds"),
        (f"{HEAD}\n" + LINE.replace("4.5", '"4"'), "line 2: '4' is not a number of microseconds"),
        (f"{HEAD}\n" + LINE.replace('"ring": 4.5, "direct": 9.25', ""), "line 2: no algorithm was"),
    ):
        path = tmp_path / "tuned"
        path.write_text(content)
        with pytest.raises(UsageError) as caught:
            read_tuning(path)
        assert f"{path} is wrong in {message}" in str(caught.value)
        assert "shoal tune" in str(caught.value)
        with pytest.raises(UsageError, match="nowhere: No such file"):
            read_tuning(tmp_path / "nowhere")


def test_only_a_near_measured_size_decides() -> None:
    times = {"all_reduce": {1024: {"tree": 1.0, "ring": 2.0}, 4096: {"tree": 2.0, "ring": 1.0}}}
    tuning = Tuning((0, 0), 2, times)
    chosen = [tuning.choose("all_reduce", n) for n in (128, 256, 1024, 2048, 4096, 16384, 32768)]
    names = [choice and choice.name for choice in chosen]
    assert names == [None, "tree", "tree", "tree", "ring", "ring", None]
    assert tuning.choose("broadcast", 1024) is None


def test_planners_use_measurements_of_the_same_hosts_where_possible() -> None:
    cluster = default_cluster((0, 0))
    times = {"reduce_scatter": {1024: {"ring": 1.0}}}
    planner = Planner(cluster, tuning=Tuning((0, 0), 2, times))
    assert planner.choose("reduce_scatter", 1024).why.startswith("measured at 1 KiB over 2 ranks")
    assert planner.choose("reduce_scatter", 1024, uneven=True).name == "direct"
    other = Planner(cluster, tuning=Tuning((0, 0, 0), 2, times))
    assert other.choose("reduce_scatter", 1024) == choose("reduce_scatter", 1024, cluster)


def test_different_clusters_have_different_names() -> None:
    tuning = Tuning((0, 0, 1), 2, TIMES)
    assert tuning.differs_from((0, 0, 1), 2) == ""
    for hosts, n_cores, difference in (
        ((0, 1, 1), 2, "it is for 3 ranks on 2 hosts (2, 1), this group is 3 ranks on 2 hosts"),
        ((0,), 2, "this group is 1 rank in one host"),
        ((0, 0, 1), 4, "it is for hosts with 2 cores, these have 4"),
    ):
        assert difference in tuning.differs_from(hosts, n_cores)
