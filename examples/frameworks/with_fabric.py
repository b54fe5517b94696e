"""Lightning Fabric over shoal, on CPUs. Fabric starts the ranks itself, as the Trainer also can.

python examples/frameworks/with_fabric.py
"""

import task
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy
from torch import nn, optim


def main() -> None:
    """Train as one rank."""
    args = task.arguments()
    fabric = Fabric(
        accelerator="cpu",
        devices=args.ranks,
        strategy=DDPStrategy(process_group_backend=args.backend),
    )
    fabric.launch()
    net = task.network()
    net, optimizer = fabric.setup(
        net, optim.SGD(net.parameters(), task.LEARNING_RATE, task.MOMENTUM)
    )
    batches = fabric.setup_dataloaders(task.batches(), use_distributed_sampler=False)
    report = task.Report(args.backend)
    for _ in range(task.EPOCHS):
        for inputs, labels in batches:
            optimizer.zero_grad()
            fabric.backward(nn.functional.cross_entropy(net(inputs), labels))
            optimizer.step()
    report.show(net.module)


if __name__ == "__main__":
    main()
