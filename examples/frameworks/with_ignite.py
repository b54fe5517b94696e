"""PyTorch-Ignite over shoal, on CPUs.

torchrun --nproc-per-node 4 examples/frameworks/with_ignite.py
"""

import ignite.distributed as idist
import task
import torch
import torch.distributed as dist
from ignite.engine import Engine
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    """Train as one rank."""
    backend = task.arguments().backend
    dist.init_process_group(
        backend
    )  # Ignite uses this group: idist.initialize only accepts a list of names
    # NOT idist.auto_model, which wraps only if the backend is nccl, gloo or mpi.
    net = DistributedDataParallel(task.network())
    optimizer = idist.auto_optim(optim.SGD(net.parameters(), task.LEARNING_RATE, task.MOMENTUM))

    def step(_: Engine, batch: list[torch.Tensor]) -> float:
        inputs, labels = batch
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(inputs), labels)
        loss.backward()
        optimizer.step()
        return loss.item()

    report = task.Report(backend)
    Engine(step).run(task.batches(), max_epochs=task.EPOCHS)
    report.show(net.module)
    idist.finalize()


if __name__ == "__main__":
    main()
