"""Horovod's MNIST example for PyTorch, ported to shoal, for any number of workers.

    torchrun --nproc-per-node 2 examples/mnist.py                  # or mpirun -n 2 python ...
    torchrun --nproc-per-node 2 examples/mnist.py --data ~/mnist   # MNIST's own four files

Without `--data` it draws digits itself and downloads nothing. docs/horovod.md shows the calls of
both libraries side by side.
"""

import argparse
import gzip
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import shoal.torch

# Five rows of three dots for each digit.
DIGITS = (
    *("111 101 101 101 111", "010 110 010 010 111", "111 001 111 100 111"),
    *("111 001 111 001 111", "101 101 111 001 001", "111 100 111 001 111"),
    *("111 100 111 101 111", "111 001 001 001 001", "111 101 111 101 111"),
    "111 101 111 001 111",
)
SCALE, SIDE = 4, 28  # pixels of a dot, and of an image


def network() -> nn.Module:
    """Return the network of Horovod's example, without dropout."""
    return nn.Sequential(
        *(nn.Conv2d(1, 10, kernel_size=5), nn.MaxPool2d(2), nn.ReLU()),
        *(nn.Conv2d(10, 20, kernel_size=5), nn.MaxPool2d(2), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(320, 50), nn.ReLU(), nn.Linear(50, 10)),
    )


def drawn(n_images: int, seed: int) -> TensorDataset:
    """Return noisy images of the digits, each a few pixels off the centre of its image."""
    random = np.random.default_rng(seed)
    labels = random.integers(10, size=n_images)
    images = random.normal(0.1, 0.2, (n_images, SIDE, SIDE)).astype(np.float32)
    for image, label in zip(images, labels, strict=True):
        dots = np.array([[dot == "1" for dot in row] for row in DIGITS[label].split()])
        digit = np.kron(dots, np.ones((SCALE, SCALE)))
        top, left = ((SIDE - n) // 2 + random.integers(-3, 4) for n in digit.shape)
        image[top : top + digit.shape[0], left : left + digit.shape[1]] += digit
    return TensorDataset(torch.from_numpy(images)[:, None], torch.from_numpy(labels))


def read(path: Path) -> torch.Tensor:
    """Return the bytes of one of MNIST's files, compressed or not, in their shape."""
    with path.open("rb") if path.exists() else gzip.open(f"{path}.gz") as file:
        data = file.read()
    n_axes = data[3]
    shape = np.frombuffer(data, ">u4", n_axes, offset=4)
    values = np.frombuffer(data, np.uint8, offset=4 + 4 * n_axes)
    return torch.tensor(values.reshape(shape.tolist()))


def mnist(folder: Path, part: str) -> TensorDataset:
    """Return the "train" or the "t10k" images and labels of MNIST."""
    images = read(folder / f"{part}-images-idx3-ubyte")[:, None] / 255
    return TensorDataset(images, read(folder / f"{part}-labels-idx1-ubyte").long())


def train(model: nn.Module, optimizer: optim.Optimizer, batches: DataLoader) -> None:
    """Train for one epoch on this worker's share."""
    model.train()
    for images, labels in batches:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()


@torch.no_grad()
def accuracy(model: nn.Module, batches: DataLoader) -> float:
    """Return the share of all workers' images that the model classifies correctly."""
    model.eval()
    right = torch.zeros(2)
    for images, labels in batches:
        n_right = (model(images).argmax(1) == labels).sum()
        right += torch.tensor([n_right, len(labels)])
    dist.all_reduce(right)
    return float(right[0] / right[1])


def parse_args() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--data", type=Path, help="the folder with MNIST's files")
    parser.add_argument("--images", type=int, default=6000, help="number of images to draw")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch", type=int, default=64, help="images of a step on each worker")
    parser.add_argument("--lr", type=float, default=0.03, help="learning rate per worker")
    return parser.parse_args()


def main() -> None:
    """Train as one worker."""
    args = parse_args()
    shoal.torch.init_process_group()  # hvd.init()
    rank, size = dist.get_rank(), dist.get_world_size()
    if args.data:
        training, test = mnist(args.data, "train"), mnist(args.data, "t10k")
    else:
        training, test = drawn(args.images, seed=1), drawn(args.images // 6, seed=2)
    sampler = DistributedSampler(training)
    batches = DataLoader(training, args.batch, sampler=sampler)
    test_batches = DataLoader(test, args.batch, sampler=DistributedSampler(test, shuffle=False))
    torch.manual_seed(rank)
    # Also gives all workers the weights of rank 0, as hvd.broadcast_parameters does.
    model = shoal.torch.DistributedDataParallel(network())
    optimizer = optim.SGD(model.parameters(), args.lr * size, momentum=0.9)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        train(model, optimizer, batches)
        reached = accuracy(model, test_batches)
        if rank == 0:
            print(f"epoch {epoch + 1}: accuracy {reached:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
