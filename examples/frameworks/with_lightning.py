"""Lightning's Trainer over shoal, on CPUs.

torchrun --nproc-per-node 4 examples/frameworks/with_lightning.py
"""

import lightning
import task
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import nn, optim
from torch.utils.data import DataLoader


class Classifier(lightning.LightningModule):
    """The network with its loss and its optimizer."""

    def __init__(self, backend: str) -> None:
        super().__init__()
        self.net = task.network()
        self.backend = backend

    def train_dataloader(self) -> DataLoader[tuple[torch.Tensor, ...]]:
        """Return this rank's batches."""
        return task.batches()

    def on_train_start(self) -> None:
        """Begin to measure, once the process group exists."""
        self.report = task.Report(self.backend)

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        """Return the loss of a batch."""
        inputs, labels = batch
        return nn.functional.cross_entropy(self.net(inputs), labels)

    def on_train_end(self) -> None:
        """Print the result."""
        self.report.show(self.net)

    def configure_optimizers(self) -> optim.Optimizer:
        """Return the optimizer."""
        return optim.SGD(self.parameters(), task.LEARNING_RATE, task.MOMENTUM)


def main() -> None:
    """Train as one rank."""
    args = task.arguments()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=args.ranks,
        strategy=DDPStrategy(process_group_backend=args.backend),
        use_distributed_sampler=False,  # Lightning's sampler would shuffle
        max_epochs=task.EPOCHS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Classifier(args.backend))


if __name__ == "__main__":
    main()
