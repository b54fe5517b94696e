"""Ranks of a group agree on the inputs of the planner: settings, links, tuning files."""

import itertools
import json
import os
from pathlib import Path

import numpy as np
from process.ranks import FileRanks
from process.stage import pretend_hosts

import shoal
from shoal.plan import default_cluster
from shoal.plan.wire import link_of


def choose_by_file(path: str) -> tuple[str, str]:
    os.environ["SHOAL_TUNING"] = path
    with shoal.init() as group:
        data = np.full(256, group.rank + 1, np.float32)
        group.all_reduce(data)
        assert (data == sum(range(1, group.size + 1))).all()
        choice = group.planner.choose("all_reduce", 1024)
        return choice.name, choice.why


def tune(out: str, ranks_per_host: int, *words: str) -> int:
    from shoal.cli import main

    pretend_hosts(ranks_per_host)
    return main(["tune", "--out", out, *words])


def test_shoal_tuning_loads_the_file_of_shoal_tune(tmp_path: Path, forked: FileRanks) -> None:
    path = tmp_path / "tuned.jsonl"
    words = ["--from", "1KiB", "--to", "4KiB", "--rounds", "2", "--collective", "all_reduce"]
    assert forked.run(tune, 3, str(path), 3, *words, "--collective", "scatter") == [0, 0, 0]
    head, *lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert head == {"shoal_tuning": 1, "hosts": [0, 0, 0], "n_cores": head["n_cores"]}
    measured = [*itertools.product(("all_reduce", "scatter"), (1024, 4096))]
    assert [(line["collective"], line["n_bytes"]) for line in lines] == measured
    assert all(us > 0 for line in lines for us in line["us"].values())
    fastest = min(lines[0]["us"], key=lines[0]["us"].__getitem__)
    for name, why in forked.run(choose_by_file, 3, str(path)):
        assert name == fastest
        assert why.startswith("measured at 1 KiB over 3 ranks: ")


def load_links(path: str) -> tuple[tuple[int, ...], object]:
    os.environ["SHOAL_TUNING"] = path
    pretend_hosts(ranks_per_host=2)
    with shoal.init() as group:
        return group.planner.cluster.hosts, group.planner.cluster.wire


def test_a_tuning_file_keeps_link_costs_and_every_job_that_loads_it_uses_them(
    tmp_path: Path, forked: FileRanks
) -> None:
    path = tmp_path / "links.jsonl"
    assert forked.run(tune, 4, str(path), 2, "--links") == [0] * 4
    (head,) = [json.loads(line) for line in path.read_text().splitlines()]
    link = link_of(head["link"])
    # The costs of loopback differ from the defaults, and are plausible.
    assert link != default_cluster((0, 1)).wire
    assert 1 <= link.latency_us < 1e5
    assert 1e-6 < link.us_per_byte < 10  # 0.16 was measured on a busy machine
    for _ in range(2):
        assert forked.run(load_links, 4, str(path)) == [((0, 0, 1, 1), link)] * 4
