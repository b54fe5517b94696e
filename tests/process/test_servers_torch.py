"""DDP with a reduction server trains the same bits as without."""

import hashlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from process.ranks import free_port
from process.serving import N_WORKERS, ServerProcess, await_servers, job_env, new_key
from process.stage import Stage, on_stage, pretend_hosts
from torch import nn

N_STEPS = 4
WIDTH = 1500  # 9 MB of weights in one layer, so that a server helps with a bucket


def weights_after_training(rank: int) -> str:
    torch.manual_seed(1)
    model = nn.parallel.DistributedDataParallel(
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(N_STEPS):
        optimizer.zero_grad()
        model(torch.randn(4, WIDTH, generator=generator)).square().mean().backward()
        optimizer.step()
    digest = hashlib.blake2b(digest_size=8)
    for parameter in model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    return digest.hexdigest()


def train_alone_and_with_a_server() -> tuple[str, str, bool]:
    """Return both digests, and True if the server took part in the second run."""
    pretend_hosts(1)
    stage = Stage.from_environment()
    torch.set_num_threads(1)
    dist.init_process_group("shoal")
    from shoal.frontend.torch import default_group

    group: Any = default_group()
    alone = weights_after_training(group.rank)
    stage.cue(f"rank {group.rank}: has trained alone")
    await_servers(group, 1)
    shared = weights_after_training(group.rank)
    was_shared = group.pool.view.n_shared > 0
    dist.destroy_process_group()
    return alone, shared, was_shared


def test_a_model_trained_with_a_server_has_the_bits_of_one_trained_without(tmp_path: Path) -> None:
    key, port = new_key(tmp_path), free_port()
    env = job_env(key, f"127.0.0.1:{port}")
    with on_stage(train_alone_and_with_a_server, N_WORKERS, env=env) as (stage, ranks):
        stage.await_all(N_WORKERS, "has trained alone")
        with ServerProcess(key, port=port):
            found = ranks.values()
    alone, shared, was_shared = zip(*found, strict=True)
    assert alone == shared
    assert len(set(alone)) == 1
    assert all(was_shared)
