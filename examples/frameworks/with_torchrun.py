"""Plain torch over shoal under torchrun, with checkpoints for its restarts.

    torchrun --nproc-per-node 4 --max-restarts 1 examples/frameworks/with_torchrun.py --kill 2

After each epoch rank 0 saves a checkpoint; a restarted job goes on from it. `--kill 2` kills rank 2
in the middle of the second epoch, once.
"""

import os
import signal
import tempfile
from pathlib import Path

import task
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    """Train as one rank."""
    args = task.arguments()
    dist.init_process_group(args.backend)
    net = task.network()
    model = DistributedDataParallel(net)
    optimizer = optim.SGD(net.parameters(), task.LEARNING_RATE, task.MOMENTUM)
    checkpoint = Path(tempfile.gettempdir()) / f"{os.environ['TORCHELASTIC_RUN_ID']}.pt"
    first_epoch = 0
    if checkpoint.exists():
        saved = torch.load(checkpoint)
        net.load_state_dict(saved["net"])
        optimizer.load_state_dict(saved["optimizer"])
        first_epoch = saved["epochs"]
    is_first_try = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    report = task.Report(args.backend)
    for epoch in range(first_epoch, task.EPOCHS):
        for step, (inputs, labels) in enumerate(task.batches()):
            if is_first_try and dist.get_rank() == args.kill and (epoch, step) == (1, 16):
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
        if dist.get_rank() == 0:
            save(
                checkpoint, net=net.state_dict(), optimizer=optimizer.state_dict(), epochs=epoch + 1
            )
    report.show(net)
    if dist.get_rank() == 0:
        checkpoint.unlink()
    dist.destroy_process_group()


def save(checkpoint: Path, **state: object) -> None:
    """Write the checkpoint atomically."""
    unfinished = checkpoint.with_suffix(".unfinished")
    torch.save(state, unfinished)
    unfinished.rename(checkpoint)


if __name__ == "__main__":
    main()
