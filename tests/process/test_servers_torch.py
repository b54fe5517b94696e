"""DDP with a reduction server: the model of a run without, bit for bit."""

import hashlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from process.ranks import run_ranks
from process.serving import N_WORKERS, ServerProcess, await_servers, job_env, new_key
from process.stage import pretend_hosts
from torch import nn

N_STEPS = 4
WIDTH = 1500  # 9 MB of weights in one layer, so that a bucket is worth sharing


def train(with_servers: bool) -> tuple[str, bool]:
    """A digest of the weights, and whether servers took part."""
    pretend_hosts(1)
    torch.set_num_threads(1)
    dist.init_process_group("shoal")
    from shoal.frontend.torch import default_group

    group: Any = default_group()
    if with_servers:
        await_servers(group, 1)
    torch.manual_seed(1)
    model = nn.parallel.DistributedDataParallel(
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(group.rank)
    for _ in range(N_STEPS):
        optimizer.zero_grad()
        model(torch.randn(4, WIDTH, generator=generator)).square().mean().backward()
        optimizer.step()
    shared = with_servers and group.pool.view.n_shared > 0
    digest = hashlib.blake2b(digest_size=8)
    for parameter in model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    dist.destroy_process_group()
    return digest.hexdigest(), shared


def test_a_model_trained_with_a_server_is_that_trained_without_one(tmp_path: Path) -> None:
    key = new_key(tmp_path)
    with ServerProcess(key) as server:
        shared = run_ranks(train, N_WORKERS, True, env=job_env(key, server.address))
    # Nobody listens there, and the sums are sharded as they would be with servers.
    alone = run_ranks(train, N_WORKERS, False, env=job_env(key, "127.0.0.1:1"))
    assert [digest for digest, _ in shared] == [digest for digest, _ in alone]
    assert len({digest for digest, _ in shared}) == 1
    assert all(was_shared for _, was_shared in shared)
