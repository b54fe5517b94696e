"""Ray Train over shoal, on CPUs. Ray starts the ranks.

python examples/frameworks/with_ray.py --kill 2

After each epoch rank 0 reports a checkpoint. After a failure Ray starts all ranks anew, from the
last checkpoint that it had noticed, which it looks for once a second.
`--kill 2` kills rank 2 in the middle of the second epoch, once.
"""

import os
import signal
import sys
import tempfile
from pathlib import Path

import ray
import task
import torch
from ray import train
from ray.train.torch import TorchConfig, TorchTrainer
from torch import nn, optim


def train_rank(config: dict[str, object]) -> None:
    """Train as one rank."""
    net = task.network()
    model = train.torch.prepare_model(net)
    optimizer = optim.SGD(net.parameters(), task.LEARNING_RATE, task.MOMENTUM)
    rank, killed = train.get_context().get_world_rank(), Path(str(config["folder"])) / "killed"
    checkpoint = train.get_checkpoint()
    first_epoch = 0
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            saved = torch.load(Path(folder) / "state.pt")
        net.load_state_dict(saved["net"])
        optimizer.load_state_dict(saved["optimizer"])
        first_epoch = saved["epochs"]
    report = task.Report(str(config["backend"]))
    for epoch in range(first_epoch, task.EPOCHS):
        for step, (inputs, labels) in enumerate(task.batches()):
            if rank == config["kill"] and (epoch, step) == (1, 16) and not killed.exists():
                killed.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
        with tempfile.TemporaryDirectory() as folder:
            state = {"net": net.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**state, "epochs": epoch + 1}, Path(folder) / "state.pt")
            saved = train.Checkpoint.from_directory(folder) if rank == 0 else None
            train.report({"epoch": epoch}, checkpoint=saved)
    report.show(net)


def main() -> None:
    """Start the ranks."""
    args = task.arguments()
    ray.init(num_cpus=args.ranks + 1, runtime_env={"env_vars": {"PYTHONPATH": sys.path[0]}})
    with tempfile.TemporaryDirectory() as folder:
        TorchTrainer(
            train_rank,
            train_loop_config={**vars(args), "folder": folder},
            torch_config=TorchConfig(backend=args.backend),
            scaling_config=train.ScalingConfig(num_workers=args.ranks),
            run_config=train.RunConfig(
                storage_path=folder, failure_config=train.FailureConfig(max_failures=1)
            ),
        ).fit()


if __name__ == "__main__":
    main()
