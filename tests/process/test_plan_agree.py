"""Ranks of a group agree on the inputs of the planner: settings, links, tuning files."""

import itertools
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
from process.ranks import on_ranks
from process.stage import pretend_hosts

import shoal
from shoal.plan import default_cluster
from shoal.plan.wire import link_of


def tune(out: Path, ranks_per_host: int, *words: str) -> None:
    from shoal.cli import main

    pretend_hosts(ranks_per_host)
    assert main(["tune", "--out", str(out), *words]) == 0
    with shoal.init() as group:
        group.barrier()  # rank 0 has written the file
    os.environ["SHOAL_TUNING"] = str(out)


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@on_ranks(3)
def test_shoal_tuning_loads_the_file_of_shoal_tune(tmp_path: Path) -> None:
    path = tmp_path / "tuned.jsonl"
    words = ["--from", "1KiB", "--to", "4KiB", "--rounds", "2", "--collective", "all_reduce"]
    tune(path, 3, *words, "--collective", "scatter")
    with shoal.init() as group:
        head, *lines = lines_of(path)
        data = np.full(256, group.rank + 1, np.float32)
        group.all_reduce(data)
        assert (data == 6).all()
        choice = group.planner.choose("all_reduce", 1024)
    assert head == {"shoal_tuning": 1, "hosts": [0, 0, 0], "n_cores": head["n_cores"]}
    measured = [*itertools.product(("all_reduce", "scatter"), (1024, 4096))]
    assert [(line["collective"], line["n_bytes"]) for line in lines] == measured
    assert all(us > 0 for line in lines for us in line["us"].values())
    assert choice.name == min(lines[0]["us"], key=lines[0]["us"].__getitem__)
    assert choice.why.startswith("measured at 1 KiB over 3 ranks: ")


@on_ranks(4)
def test_a_tuning_file_keeps_link_costs_and_every_job_that_loads_it_uses_them(
    tmp_path: Path,
) -> None:
    path = tmp_path / "links.jsonl"
    tune(path, 2, "--links")
    for _ in range(2):
        with shoal.init() as group:
            (head,) = lines_of(path)
            link = link_of(head["link"])
            assert group.planner.cluster.hosts == (0, 0, 1, 1)
            assert group.planner.cluster.wire == link
    # The costs of loopback differ from the defaults, and are plausible.
    assert link != default_cluster((0, 1)).wire
    assert 1 <= link.latency_us < 1e5
    assert 1e-6 < link.us_per_byte < 10  # 0.16 was measured on a busy machine
