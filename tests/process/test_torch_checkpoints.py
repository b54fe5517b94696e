"""Sharded tensors, and checkpoints of them that are loaded into other shards.

The cases are taken from PyTorch's test_file_system_checkpoint.py; each of them runs on both
ranks. Every rank knows the full table, and each case must restore all of it.
"""

from __future__ import annotations

import itertools
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from process.shared_ranks import Case, SharedRanks, cases_in

SIZE = 2
ROWS, COLUMNS = 10, 20


def table() -> torch.Tensor:
    return torch.arange(float(ROWS * COLUMNS)).view(ROWS, COLUMNS)


def layouts() -> dict[str, Any]:
    """Ways to shard the table over the ranks."""
    from torch.distributed._shard.sharding_spec import (
        ChunkShardingSpec,
        EnumerableShardingSpec,
        ShardMetadata,
    )

    def part(begin: int, n_rows: int, rank: int) -> Any:
        return ShardMetadata([begin, 0], [n_rows, COLUMNS], f"rank:{rank}/cpu")

    return {
        "rows": ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"]),
        "rows, the other way round": ChunkShardingSpec(0, ["rank:1/cpu", "rank:0/cpu"]),
        "rows in four": ChunkShardingSpec(0, [f"rank:{r}/cpu" for r in (0, 1, 1, 0)]),
        "columns": ChunkShardingSpec(1, ["rank:0/cpu", "rank:1/cpu"]),
        "uneven rows": EnumerableShardingSpec([part(0, 8, 1), part(8, 2, 0)]),
        "rows in five": EnumerableShardingSpec(
            [part(0, 2, 0), part(2, 1, 1), part(3, 3, 0), part(6, 3, 1), part(9, 1, 0)]
        ),
    }


def shared_out(layout: Any, whole: torch.Tensor) -> Any:
    from torch.distributed._shard import sharded_tensor

    made = sharded_tensor.zeros(layout, ROWS, COLUMNS)
    for shard in made.local_shards():
        (top, left), (height, width) = shard.metadata.shard_offsets, shard.metadata.shard_sizes
        shard.tensor.copy_(whole[top : top + height, left : left + width])
    return made


def gathered(sharded: Any) -> torch.Tensor:
    """Gather a sharded tensor on rank 0; other ranks return the table."""
    out = torch.zeros(ROWS, COLUMNS) if dist.get_rank() == 0 else None
    sharded.gather(dst=0, out=out)
    return table() if out is None else out


NUMBERS = itertools.count()


def new_folder() -> str:
    """Return a new folder on each call, the same on every rank."""
    return f"{os.environ['CHECKPOINTS']}/{next(NUMBERS)}"


def reloaded(saved: Any, into: Any) -> Any:
    from torch.distributed import checkpoint

    folder = new_folder()
    checkpoint.save({"table": saved}, checkpoint_id=folder)
    state = {"table": into}
    checkpoint.load(state, checkpoint_id=folder)
    return state["table"]


def case_gather() -> None:
    for name, layout in layouts().items():
        assert torch.equal(gathered(shared_out(layout, table())), table()), name


def case_reshard() -> None:
    names = ("rows", "rows, the other way round", "columns")  # torch does it with one shard a rank
    chunked = {name: layouts()[name] for name in names}
    for one, other in itertools.permutations(chunked, 2):
        sharded = shared_out(chunked[one], table())
        sharded.reshard(chunked[other])
        assert torch.equal(gathered(sharded), table()), f"{one} to {other}"


def case_load_into_other_shards() -> None:
    every = layouts()
    for one, other in itertools.permutations(every, 2):
        empty = shared_out(every[other], torch.zeros(ROWS, COLUMNS))
        found = reloaded(shared_out(every[one], table()), empty)
        assert torch.equal(gathered(found), table()), f"{one} to {other}"


def case_load_a_full_tensor_from_shards_and_shards_from_a_full_tensor() -> None:
    for name, layout in layouts().items():
        found = reloaded(shared_out(layout, table()), torch.zeros(ROWS, COLUMNS))
        assert torch.equal(found, table()), name
        empty = shared_out(layout, torch.zeros(ROWS, COLUMNS))
        assert torch.equal(gathered(reloaded(table(), empty)), table()), name


def case_load_bytes_beside_shards() -> None:
    from torch.distributed import checkpoint

    folder = new_folder()
    rows = layouts()["rows"]
    saved = {"words": "one and two", "table": shared_out(rows, table())}
    checkpoint.save(saved, checkpoint_id=folder)
    state = {"words": "something else", "table": shared_out(rows, torch.zeros(ROWS, COLUMNS))}
    checkpoint.load(state, checkpoint_id=folder)
    assert state["words"] == "one and two"
    assert torch.equal(gathered(state["table"]), table())


def case_load_into_another_mesh() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (SIZE,))
    for one, other in itertools.permutations((Shard(0), Shard(1), Replicate()), 2):
        saved = distribute_tensor(table(), mesh, [one])
        into = distribute_tensor(torch.zeros(ROWS, COLUMNS), mesh, [other])
        assert torch.equal(reloaded(saved, into).full_tensor(), table())


def in_rank(case: str, folders: str) -> None:
    warnings.simplefilter("ignore")  # torch's own, about its own
    os.environ["CHECKPOINTS"] = folders
    globals()[case]()


@pytest.mark.parametrize("case", cases_in(globals()))
def test_sharded_tensors_are_restored(case: Case, ranks: SharedRanks, tmp_path: Path) -> None:
    ranks.run(in_rank, case.__name__, str(tmp_path))
