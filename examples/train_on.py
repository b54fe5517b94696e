"""Train a small network, data-parallel, and continue when a worker is lost.

Each worker trains on its share of the examples; after a loss the survivors share all examples.
`survive.py` starts several of these workers.
"""

import argparse
import os
import signal

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import shoal.torch

N_EXAMPLES = 1024


def train(n_steps: int, victim: int) -> None:
    """Train until all steps are done, also without lost workers; kill the victim half-way."""
    dist.init_process_group("shoal")
    first_rank = dist.get_rank()
    name = f"worker {first_rank}"
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    model, step = DistributedDataParallel(net), 0
    while step < n_steps:
        if first_rank == victim and step == n_steps // 2:
            os.kill(os.getpid(), signal.SIGKILL)
        loss = try_step(model, optimizer)
        if loss is not None:
            step += 1
            if step * 10 % n_steps < 10:
                print(f"{name}, step {step} of {n_steps}: loss {loss:.4f}", flush=True)
            continue
        lost = shoal.torch.peer_lost()
        shoal.torch.shrink_group()
        # A worker that finished its last step is one step ahead of a worker that did not.
        step = same_state(net, optimizer, step)
        model = DistributedDataParallel(net)
        rank, size = dist.get_rank(), dist.get_world_size()
        print(f"{name} continues as rank {rank} of {size}: {lost}", flush=True)
    checksum = sum(weight.double().sum() for weight in net.parameters())
    print(f"{name} ends with loss {loss:.4f}, weights {checksum:.9f}", flush=True)
    dist.destroy_process_group()


def try_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> float | None:
    """Return the mean loss of a step; None if a worker was lost in it, which may be incomplete."""
    try:
        return train_step(model, optimizer)
    except RuntimeError:  # PeerLost, or C++'s error for it
        if shoal.torch.peer_lost() is None:
            raise
        return None


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    """Make one step on all examples; return the mean loss of all workers' shares."""
    everything = torch.randn(N_EXAMPLES, 8, generator=torch.Generator().manual_seed(1))
    mine = everything[dist.get_rank() :: dist.get_world_size()]
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(mine), mine.sin().sum(1, keepdim=True))
    loss.backward()
    mean = loss.detach().clone()
    dist.all_reduce(mean, dist.ReduceOp.AVG)
    optimizer.step()
    return mean.item()


def same_state(net: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> int:
    """Send rank 0's weights, optimizer state and step to all workers; return that step."""
    state = [net.state_dict(), optimizer.state_dict(), step]
    dist.broadcast_object_list(state, src=0)
    net.load_state_dict(state[0])
    optimizer.load_state_dict(state[1])
    return state[2]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--kill", type=int, default=-1, metavar="RANK", help="victim; -1: none")
    args = parser.parse_args()
    train(args.steps, args.kill)
