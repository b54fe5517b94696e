"""Layers that torch builds on its collectives work over shoal as over Gloo.

Meshes, DTensor, gradients through functional collectives, FSDP2, tensor parallelism, checkpoints,
sharded optimizers, uneven inputs, hooks.
Every `case_` runs on each of four ranks and returns plain numbers and tensors: once with a default
group of shoal, once with one of Gloo. Cases of torch's DistributedDataParallel run a third time,
with shoal's in its place.
"""

import itertools
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from process.shared_ranks import Case, SharedRanks, cases_in, shared_ranks
from process.stage import leave_at_once
from torch import nn
from torch.distributed import checkpoint, fsdp
from torch.distributed.algorithms.ddp_comm_hooks import (
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
)
from torch.distributed.algorithms.join import Join
from torch.distributed.algorithms.model_averaging import averagers
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

SIZE = 4


def given(*shape: int, seed: int = 0) -> torch.Tensor:
    """Return a tensor that is equal on every rank."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def own(*shape: int) -> torch.Tensor:
    """Return a tensor that differs by rank."""
    return given(*shape, seed=100 + dist.get_rank())


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def whole(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return tensor.detach().clone()


def own_rows(step: int) -> torch.Tensor:
    return own(5, 8) + step


def train(
    wrapped: nn.Module,
    optimizer: Any = None,
    n_steps: int = 3,
    rows: Callable[[int], torch.Tensor] = own_rows,
) -> list[torch.Tensor]:
    """Return the parameters after a few steps."""
    optimizer = optimizer or torch.optim.SGD(wrapped.parameters(), lr=0.1)
    for step in range(n_steps):
        optimizer.zero_grad()
        wrapped(rows(step)).square().mean().backward()
        optimizer.step()
    return [whole(parameter) for parameter in wrapped.parameters()]


def ddp(module: nn.Module | None = None, **options: Any) -> nn.parallel.DistributedDataParallel:
    module = net() if module is None else module
    return nn.parallel.DistributedDataParallel(module, bucket_cap_mb=0.0005, **options)


def case_meshes() -> Any:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    tensors = [own(3), own(3), own(3)]
    dist.all_reduce(tensors[0], group=mesh["outer"].get_group())
    dist.all_reduce(tensors[1], group=mesh.get_group("inner"))
    flat = mesh["outer", "inner"]._flatten("both")
    dist.all_reduce(tensors[2], group=flat.get_group())
    return [
        *tensors,
        mesh.get_coordinate(),
        mesh["inner"].get_local_rank(),
        dist.get_process_group_ranks(mesh["outer"].get_group()),
        flat.size(),
    ]


def case_dtensor() -> Any:
    mesh = init_device_mesh("cpu", (SIZE,))
    table = given(SIZE * 2 + 1, 6)  # does not divide evenly
    rows = distribute_tensor(table, mesh, [Shard(0)])
    columns = rows.redistribute(mesh, [Shard(1)])
    everywhere = columns.redistribute(mesh, [Replicate()])
    summed = DTensor.from_local(own(SIZE, 3), mesh, [Partial()])
    product = distribute_tensor(given(6, 5, seed=1), mesh, [Shard(0)])
    return [
        rows.to_local(),
        columns.to_local(),
        everywhere.to_local(),
        rows.full_tensor(),
        summed.full_tensor(),
        summed.redistribute(mesh, [Shard(0)]).to_local(),
        (columns @ product).full_tensor(),
        rows.sum().full_tensor(),
        rows.max(dim=1).values.full_tensor(),
    ]


def case_dtensor_on_two_dimensions() -> Any:
    mesh = init_device_mesh("cpu", (2, 2))
    table = given(6, 8)
    both = distribute_tensor(table, mesh, [Shard(0), Shard(1)])
    mixed = both.redistribute(mesh, [Replicate(), Shard(0)])
    same = distribute_tensor(table, mesh, [Shard(0), Shard(0)])
    return [both.to_local(), mixed.to_local(), same.to_local(), both.full_tensor()]


def case_tensor_parallel() -> Any:
    mesh = init_device_mesh("cpu", (SIZE,))
    data = given(5, 8)
    expected = net()(data)
    module = parallelize_module(net(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    output = module(data)
    torch.testing.assert_close(output, expected)
    output.square().sum().backward()
    return [output.detach(), *(whole(each.grad) for each in module.parameters())]


ROWS = [[0, 1, 3, 4], [2, 2, 2, 2], [5, 0, 1, 2], [1, 4, 0, 3]]  # sent by each rank to each rank


def case_gradients_through_functional_collectives() -> Any:
    """Compare with the gradient of the sum of all ranks' losses, computed on this rank alone."""
    rank, world = dist.get_rank(), dist.group.WORLD
    taken = [row[rank] for row in ROWS]
    every = [given(8, 6, seed=seed).requires_grad_() for seed in range(SIZE)]
    ways = [
        (
            lambda mine: functional.all_gather_tensor_autograd(mine, 0, world),
            lambda _at: torch.cat(every),
        ),
        (
            lambda mine: functional.reduce_scatter_tensor_autograd(mine, "sum", 0, world),
            lambda at: sum(every).chunk(SIZE)[at],
        ),
        (
            lambda mine: functional.all_to_all_single_autograd(mine, taken, ROWS[rank], world),
            lambda at: torch.cat(
                [one.split(rows)[at] for one, rows in zip(every, ROWS, strict=True)]
            ),
        ),
    ]
    gradients = []
    for among_ranks, alone in ways:
        mine = every[rank].detach().requires_grad_()
        loss = (rank + 1) * among_ranks(mine).square().sum()
        loss.backward()
        losses = [(at + 1) * alone(at).square().sum() for at in range(SIZE)]
        torch.testing.assert_close(mine.grad, torch.autograd.grad(sum(losses), every[rank])[0])
        gradients.append(mine.grad)
    return gradients


def case_fsdp1() -> Any:
    results = []
    how = {"auto_wrap_policy": ModuleWrapPolicy({nn.Linear}), "device_id": torch.device("cpu")}
    for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP):
        module = FullyShardedDataParallel(net(), sharding_strategy=strategy, **how)
        train(module)
        with FullyShardedDataParallel.summon_full_params(module):
            results += [whole(parameter) for parameter in module.parameters()]
    return results


def case_fsdp2() -> Any:
    results = []
    plain = init_device_mesh("cpu", (SIZE,))
    replicated = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for mesh in (plain, replicated):
        module = net()
        for layer in (module[0], module[2], module):
            fully_shard(layer, mesh=mesh)
        results += train(module)
    return results


def case_fsdp2_in_16_bits() -> Any:
    half = fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    return train(fully_shard(net(), mesh=init_device_mesh("cpu", (SIZE,)), mp_policy=half))


def case_fsdp2_beside_tensor_parallelism() -> Any:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    module = parallelize_module(net(), mesh["tensor"], plan)
    fully_shard(module, mesh=mesh["data"])
    data = given(5, 8, seed=mesh["data"].get_local_rank())
    return train(module, n_steps=2, rows=lambda _step: data)


class Branches(nn.Module):
    """A model with a buffer and two layers, one of which the rank chooses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(8, 4), nn.Linear(8, 4)])
        self.register_buffer("seen", torch.tensor([float(dist.get_rank())]))

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        return self.layers[dist.get_rank() % 2](data) + self.seen


def case_ddp() -> Any:
    results = [
        *train(ddp()),
        *train(ddp(static_graph=True)),
        *train(ddp(gradient_as_bucket_view=True)),
        *train(ddp(Branches(), find_unused_parameters=True)),
        *train(ddp(nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 4)))),
    ]
    module = ddp()
    with module.no_sync():
        module(own(5, 8)).sum().backward()
    alone = [whole(each.grad) for each in module.parameters()]
    module(own(5, 8)).sum().backward()
    together = [whole(each.grad) for each in module.parameters()]
    return [*results, *alone, *together]


def case_embeddings_with_sparse_gradients() -> Any:
    torch.manual_seed(0)
    module = ddp(nn.EmbeddingBag(20, 3, mode="sum", sparse=True))

    def words(step: int) -> torch.Tensor:
        return torch.tensor([[dist.get_rank(), 7, 7 + step], [1, 2 * dist.get_rank(), 19]])

    return train(module, n_steps=2, rows=words)


def case_uneven_inputs() -> Any:
    results = []
    for divides in (True, False):
        module = ddp()
        with Join([module], divide_by_initial_world_size=divides):
            train(module, n_steps=2 + dist.get_rank())
        results += [whole(parameter) for parameter in module.parameters()]
    return results


def case_zero_redundancy_optimizer() -> Any:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    module = ddp()
    optimizer = ZeroRedundancyOptimizer(module.parameters(), torch.optim.Adam, lr=0.05)
    trained = train(module, optimizer)
    optimizer.consolidate_state_dict(to=1)
    if dist.get_rank() != 1:
        return trained
    state = optimizer.state_dict()["state"]
    return [*trained, *(entry["exp_avg"] for _, entry in sorted(state.items()))]


def case_hooks() -> Any:
    from torch.distributed.optim import PostLocalSGDOptimizer

    world = dist.group.WORLD
    module = ddp()
    module.register_comm_hook(world, default_hooks.allreduce_hook)
    results = train(module)

    module = nn.parallel.DistributedDataParallel(net())  # one bucket: more hang over Gloo
    torch.manual_seed(3)
    power = powerSGD_hook.PowerSGDState(world, matrix_approximation_rank=2, start_powerSGD_iter=2)
    module.register_comm_hook(power, powerSGD_hook.powerSGD_hook)
    results += train(module, n_steps=4)

    halves, _ = dist.new_subgroups(group_size=2)
    module = ddp()
    local = post_localSGD_hook.PostLocalSGDState(world, halves, start_localSGD_iter=2)
    module.register_comm_hook(local, post_localSGD_hook.post_localSGD_hook)
    optimizer = PostLocalSGDOptimizer(
        torch.optim.SGD(module.parameters(), lr=0.1),
        averagers.PeriodicModelAverager(period=2, warmup_steps=2),
    )
    return [*results, *train(module, optimizer, n_steps=5)]


def case_a_hook_in_16_bits() -> Any:
    module = ddp()
    module.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return train(module)


def new_folder() -> Path:
    """Return a new folder, the same on every rank."""
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder, 0)
    return Path(folder[0])


def case_checkpoints() -> Any:
    folder = new_folder()

    def sharded(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        module = fully_shard(net(seed), mesh=init_device_mesh("cpu", (SIZE,)))
        return module, torch.optim.Adam(module.parameters(), lr=0.1)

    results = []
    module, optimizer = sharded(0)
    expected = train(module, optimizer)
    state = dict(zip(("model", "optimizer"), get_state_dict(module, optimizer), strict=True))
    for how in ("at once", "meanwhile"):
        place = folder / how
        if how == "at once":
            checkpoint.save(state, checkpoint_id=place)
        else:
            checkpoint.async_save(state, checkpoint_id=place).result()
        other, its_optimizer = sharded(1)
        found = dict(zip(("model", "optimizer"), get_state_dict(other, its_optimizer), strict=True))
        checkpoint.load(found, checkpoint_id=place)
        states = {"model_state_dict": found["model"], "optim_state_dict": found["optimizer"]}
        set_state_dict(other, its_optimizer, **states)
        results += [whole(parameter) for parameter in other.parameters()]
    for one, other in zip(results, expected * 2, strict=True):
        assert torch.equal(one, other)
    return results


def case_checkpoints_are_loaded_into_other_shards() -> Any:
    mesh, folder, numbers = init_device_mesh("cpu", (SIZE,)), new_folder(), itertools.count()
    table, none = given(12, 20), torch.zeros(12, 20)

    def reloaded(saved: Any, into: Any) -> Any:
        place, state = folder / str(next(numbers)), {"table": into, "words": "others"}
        checkpoint.save({"table": saved, "words": "one and two"}, checkpoint_id=place)
        checkpoint.load(state, checkpoint_id=place)
        assert state["words"] == "one and two"
        return state["table"]

    for one, other in itertools.pairwise((Shard(0), Shard(1), Replicate(), Shard(0))):
        saved, into = distribute_tensor(table, mesh, [one]), distribute_tensor(none, mesh, [other])
        assert torch.equal(reloaded(saved, into).full_tensor(), table)
    specs = sharding_specs()
    for one, other in itertools.pairwise([*specs, specs[0]]):
        found = reloaded(shared_out(one, table), shared_out(other, none))
        assert torch.equal(gathered(found, table), table)
    assert torch.equal(reloaded(shared_out(specs[-1], table), none.clone()), table)
    assert torch.equal(gathered(reloaded(table, shared_out(specs[-1], none)), table), table)
    return []


def sharding_specs() -> list[Any]:
    """Return ways to shard a table of 12 rows and 20 columns: two even ones, and others."""
    from torch.distributed._shard import sharding_spec as specs

    def chunks(axis: int, *ranks: int) -> Any:
        return specs.ChunkShardingSpec(axis, [f"rank:{rank}/cpu" for rank in ranks])

    parts = [(0, 2, 0), (2, 1, 1), (3, 5, 3), (8, 3, 2), (11, 1, 0)]
    uneven = [specs.ShardMetadata([at, 0], [n, 20], f"rank:{rank}/cpu") for at, n, rank in parts]
    return [
        chunks(0, 0, 1, 2, 3),
        chunks(1, 3, 2, 1, 0),
        chunks(0, 0, 1, 1, 0, 2, 3),
        specs.EnumerableShardingSpec(uneven),
    ]


def shared_out(layout: Any, table: torch.Tensor) -> Any:
    from torch.distributed._shard import sharded_tensor

    made = sharded_tensor.zeros(layout, *table.shape)
    for shard in made.local_shards():
        (top, left), (height, width) = shard.metadata.shard_offsets, shard.metadata.shard_sizes
        shard.tensor.copy_(table[top : top + height, left : left + width])
    return made


def gathered(sharded: Any, table: torch.Tensor) -> torch.Tensor:
    """Gather a sharded tensor on rank 0; other ranks return the table."""
    out = torch.zeros_like(table) if dist.get_rank() == 0 else None
    sharded.gather(dst=0, out=out)
    return table if out is None else out


def case_sharded_tensors_are_gathered_and_sharded_anew() -> Any:
    table = given(12, 20)
    for layout in sharding_specs():
        assert torch.equal(gathered(shared_out(layout, table), table), table)
    for one, other in itertools.permutations(sharding_specs()[:2], 2):
        sharded = shared_out(one, table)
        sharded.reshard(other)
        assert torch.equal(gathered(sharded, table), table)
    return []


def in_rank(case: str, with_ours: bool = False) -> Any:
    warnings.simplefilter("ignore")  # torch's own, about its own
    leave_at_once()
    with pytest.MonkeyPatch.context() as patch:
        if with_ours:
            import shoal.torch

            ours = shoal.torch.DistributedDataParallel
            patch.setattr(nn.parallel, "DistributedDataParallel", ours)
        return globals()[case]()


four_ranks = shared_ranks(SIZE)


@pytest.mark.parametrize("case", cases_in(globals()))
def test_layers_give_the_same_results_over_shoal_and_gloo(
    four_ranks: SharedRanks, case: Case
) -> None:
    expected = four_ranks.run(in_rank, case.__name__, backend="gloo")
    tolerance = 1e-3 if "16_bits" in case.__name__ else 1e-5
    for with_ours in (False, True) if "ddp" in case.__code__.co_names else (False,):
        found = four_ranks.run(in_rank, case.__name__, with_ours, backend="shoal")
        torch.testing.assert_close(found, expected, rtol=10 * tolerance, atol=tolerance)
