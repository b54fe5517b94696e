"""Hugging Face's Accelerate over shoal, on CPUs.

torchrun --nproc-per-node 4 examples/frameworks/with_accelerate.py
"""

import task
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs
from torch import nn, optim
from torch.utils.data import DataLoader

import shoal.accelerate  # noqa: F401 - makes Accelerate accept the name


def main() -> None:
    """Train as one rank."""
    backend = task.arguments().backend
    accelerator = Accelerator(cpu=True, kwargs_handlers=[InitProcessGroupKwargs(backend=backend)])
    net = task.network()
    optimizer = optim.SGD(net.parameters(), task.LEARNING_RATE, task.MOMENTUM)
    net, optimizer, batches = accelerator.prepare(
        net, optimizer, DataLoader(task.dataset(), task.BATCH)
    )
    report = task.Report(backend)
    for _ in range(task.EPOCHS):
        for inputs, labels in batches:
            optimizer.zero_grad()
            accelerator.backward(nn.functional.cross_entropy(net(inputs), labels))
            optimizer.step()
    report.show(accelerator.unwrap_model(net))
    accelerator.end_training()


if __name__ == "__main__":
    main()
