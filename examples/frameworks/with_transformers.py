"""The Trainer of Hugging Face's Transformers over shoal, on CPUs.

torchrun --nproc-per-node 4 examples/frameworks/with_transformers.py
"""

import tempfile
from typing import Any

import task
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import SequentialSampler
from transformers import Trainer, TrainingArguments

import shoal.accelerate  # noqa: F401 - makes Accelerate accept the name


class Classifier(nn.Module):
    """The network in the Trainer's form: it computes its own loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = task.network()

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the loss of a batch and the logits."""
        logits = self.net(inputs)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class InOrder(Trainer):
    """A Trainer that does not shuffle."""

    def _get_train_sampler(self, *_: Any) -> SequentialSampler:
        return SequentialSampler(self.train_dataset)


def main() -> None:
    """Train as one rank."""
    backend = task.arguments().backend
    with tempfile.TemporaryDirectory() as folder:
        training = TrainingArguments(
            folder,
            use_cpu=True,
            ddp_backend=backend,
            per_device_train_batch_size=task.BATCH,
            num_train_epochs=task.EPOCHS,
            optim="sgd",
            optim_args=f"momentum={task.MOMENTUM}",
            learning_rate=task.LEARNING_RATE,
            lr_scheduler_type="constant",
            max_grad_norm=0,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        samples = [{"inputs": x, "labels": y} for x, y in task.dataset()]
        model = Classifier()
        report = task.Report(backend)
        InOrder(model, training, train_dataset=samples).train()
        report.show(model.net)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
