"""The task of all examples in this folder: ten classes, a small network, two epochs.

Every framework divides the same data among the ranks, in the order of the examples, so that a
step averages over the same samples under each framework, and losses can be compared.
"""

import argparse
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

BATCH = 32  # samples of each rank
EPOCHS = 2
LEARNING_RATE = 0.1
MOMENTUM = 0.9


def arguments() -> argparse.Namespace:
    """Return the command line's arguments, the same for all examples."""
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--backend", choices=["shoal", "gloo"], default="shoal")
    parser.add_argument("--ranks", type=int, default=4, help="if the example starts them")
    parser.add_argument("--kill", type=int, default=-1, metavar="RANK", help="if supported")
    return parser.parse_args()


def dataset(n_samples: int = 4096) -> TensorDataset:
    """Return noisy points around ten centres, with the number of the centre as label."""
    source = torch.Generator().manual_seed(1)
    centres = torch.randn(10, 64, generator=source)
    labels = torch.randint(10, (n_samples,), generator=source)
    noise = 4 * torch.randn(n_samples, 64, generator=source)
    return TensorDataset(centres[labels] + noise, labels)


def batches(
    n_ranks: int | None = None, rank: int | None = None
) -> DataLoader[tuple[torch.Tensor, ...]]:
    """Return a rank's batches in order; by default this rank's in the default group."""
    samples = dataset()
    sampler = DistributedSampler(samples, n_ranks, rank, shuffle=False)
    return DataLoader(samples, BATCH, sampler=sampler)


def network() -> nn.Module:
    """Return the network with the weights from which all ranks start."""
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 10))
    )


class Report:
    """Measures a training from its construction on, and prints the result on rank 0.

    Args:
        rank: this rank, if there is no default process group.
    """

    def __init__(self, backend: str, rank: int | None = None) -> None:
        if rank is None and dist.get_backend() != backend:
            raise RuntimeError(f"the process group uses {dist.get_backend()}, not {backend}")
        self.backend = backend
        self.rank = dist.get_rank() if rank is None else rank
        self.started_s = time.perf_counter()

    def show(self, net: nn.Module) -> None:
        """Print the seconds since construction and the loss on all samples, in float64."""
        seconds = time.perf_counter() - self.started_s
        inputs, labels = dataset().tensors
        with torch.no_grad():
            loss = nn.functional.cross_entropy(net.double()(inputs.double()), labels)
        if self.rank == 0:
            print(f"{self.backend}: loss {loss.item():.15f} after {seconds:.3f} s", flush=True)
