"""torchft's Manager over shoal, on CPUs: a replica is killed and returns while others train.

    python examples/frameworks/with_torchft.py --kill 2

Each process is a replica group of one rank. The process that starts them runs torchft's lighthouse,
trains alone what they train together, and compares the weights of all. The samples of a step do not
depend on the number of replicas that share them, so neither do the weights.
`--kill 2` kills replica 2 three times in the middle of a step, and starts it again.
"""

import argparse
import multiprocessing as mp
import os
import signal
from datetime import timedelta
from multiprocessing.synchronize import Barrier
from typing import Any

import numpy as np
import task
import torch
import torch.distributed as dist
import torchft
from torch import nn, optim
from torchft.coordination import LighthouseServer
from torchft.process_group import ProcessGroup, ProcessGroupGloo

from shoal.torch.torchft import ProcessGroupShoal

TIMEOUT = timedelta(seconds=30)
KILLED_AT = (12, 28, 44)  # steps
N_AWAY = 6  # steps of the others before it returns
N_SAMPLES = 4 * task.BATCH  # in a step
N_STEPS = task.EPOCHS * len(task.dataset()) // N_SAMPLES


def samples(step: int) -> tuple[torch.Tensor, ...]:
    """Return all samples of a step, as the other examples' ranks share them."""
    first = step * N_SAMPLES % len(task.dataset())
    return task.dataset()[first : first + N_SAMPLES]


def optimizer_of(net: nn.Module) -> optim.Optimizer:
    """Return the optimizer."""
    return optim.SGD(net.parameters(), task.LEARNING_RATE, task.MOMENTUM)


def weights_of(net: nn.Module) -> Any:
    """Return all weights in one NumPy array."""
    return nn.utils.parameters_to_vector(net.parameters()).detach().numpy()


class Replica:
    """One replica: its network, its optimizer, and the Manager that heals both."""

    def __init__(self, rank: int, args: argparse.Namespace) -> None:
        self.net = task.network()
        self.inner = optimizer_of(self.net)
        self._store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        group: ProcessGroup = {"shoal": ProcessGroupShoal, "gloo": ProcessGroupGloo}[args.backend](
            TIMEOUT
        )
        self.manager = torchft.Manager(
            pg=group,
            load_state_dict=self._load,
            state_dict=self._state,
            min_replica_size=1,
            init_sync=False,  # all begin with the same weights
            timeout=TIMEOUT,
            replica_id=f"replica_{rank}",
            lighthouse_addr=args.lighthouse,
            store_addr="localhost",
            store_port=self._store.port,
            rank=0,
            world_size=1,
        )
        self.optimizer = torchft.Optimizer(self.manager, self.inner)

    def _state(self) -> dict[str, Any]:
        return {"net": self.net.state_dict(), "optimizer": self.inner.state_dict()}

    def _load(self, state: dict[str, Any]) -> None:
        self.net.load_state_dict(state["net"])
        self.inner.load_state_dict(state["optimizer"])

    def average_gradients(self, step: int) -> None:
        """Compute the gradients of this replica's share of the samples, and average over all.

        NOT with torchft's DistributedDataParallel: in torchft 0.2.0 it ends a replica with an
        AssertionError if another one is lost, over any process group.
        """
        n_replicas, share = self.manager.num_participants(), self.manager.participating_rank()
        # The Manager uses zeros for a replica that is being healed, which has no share yet.
        inputs, labels = (each[share or 0 :: n_replicas] for each in samples(step))
        # A sum, since shares may be unequal; the Manager divides by the number of replicas.
        loss = nn.functional.cross_entropy(self.net(inputs), labels, reduction="sum")
        (loss * n_replicas / N_SAMPLES).backward()
        works = [self.manager.allreduce(each.grad) for each in self.net.parameters()]
        for work in works:
            work.wait()


def train(rank: int, n_deaths: int, back: Barrier, results: Any, args: argparse.Namespace) -> None:
    """Train one replica, and put its rank and weights into `results`.

    Args:
        n_deaths: how often it was killed.
        back: where the others wait for the killed replica after N_AWAY steps, twice: before it
            begins, and until it has asked the lighthouse for its first quorum.
    """
    if n_deaths:
        back.wait()
    replica = Replica(rank, args)
    manager, report = replica.manager, task.Report(args.backend, rank)
    returns_at = [step + N_AWAY for step in KILLED_AT if args.kill >= 0]
    is_new = n_deaths > 0
    while manager.current_step() < N_STEPS:  # a step that was not committed is repeated
        replica.optimizer.zero_grad()  # requests a quorum
        if is_new:
            back.wait()
            is_new = False
        manager.wait_quorum()
        step = manager.current_step()
        if rank != args.kill and step in returns_at:
            returns_at.remove(step)
            back.wait(), back.wait()
        elif rank == args.kill and [*KILLED_AT, N_STEPS][n_deaths] <= step:
            os.kill(os.getpid(), signal.SIGKILL)
        replica.average_gradients(step)
        replica.optimizer.step()
    results.put((rank, weights_of(replica.net)))
    report.show(replica.net)
    manager.shutdown()


def train_alone() -> Any:
    """Return the weights after the same steps in one process."""
    net = task.network()
    optimizer = optimizer_of(net)
    for step in range(N_STEPS):
        inputs, labels = samples(step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(inputs), labels).backward()
        optimizer.step()
    return weights_of(net)


def main() -> None:
    """Start the lighthouse and the replicas, and compare their weights."""
    args = task.arguments()
    spawn = mp.get_context("forkserver")
    spawn.set_forkserver_preload(["torchft", "shoal.torch.torchft"])
    # By default it waits 0.1 s for a slow replica, and leaves it out of the step.
    lighthouse = LighthouseServer(
        "[::]:0", args.ranks - 1, join_timeout_ms=30_000, heartbeat_timeout_ms=1000
    )
    args.lighthouse = lighthouse.address()
    back, results = spawn.Barrier(args.ranks, timeout=TIMEOUT.total_seconds()), spawn.Queue()

    def start(rank: int, n_deaths: int) -> mp.process.BaseProcess:
        process = spawn.Process(target=train, args=(rank, n_deaths, back, results, args))
        process.start()
        return process

    replicas = [start(rank, 0) for rank in range(args.ranks)]
    for n_deaths in range(1, len(KILLED_AT) + 1) if args.kill >= 0 else ():
        replicas[args.kill].join()
        replicas[args.kill] = start(args.kill, n_deaths)
    weights = dict(results.get(timeout=120) for _ in replicas)
    for replica in replicas:
        replica.join()
    lighthouse.shutdown()
    assert all(np.array_equal(each, weights[0]) for each in weights.values())
    np.testing.assert_allclose(weights[0], train_alone(), rtol=0, atol=1e-5)


if __name__ == "__main__":
    main()
