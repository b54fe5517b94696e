"""Train a small network in NumPy on several workers; average gradients as they become ready.

    python examples/train_numpy.py                  # three workers on this machine
    torchrun --nproc-per-node 4 examples/train_numpy.py
    mpirun -n 4 python examples/train_numpy.py

It needs NumPy: pip install numpy. Each worker has its own samples. All workers end with the same
weights, to the last bit.
"""

import argparse
import hashlib
import os
import socket
import subprocess
import sys

import numpy as np

import shoal
from shoal.average import Averager

WIDTHS = [(8, 64), (64, 64), (64, 1)]


def samples(rank: int, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Return this worker's samples: points, and the values of the function to learn."""
    points = np.random.default_rng(rank).standard_normal((n, 8)).astype(np.float32)
    return points, np.sin(points.sum(axis=1, keepdims=True))


def main() -> None:
    """Train as one worker."""
    source = np.random.default_rng(0)  # the same weights on all workers
    weights = {
        f"layer {i}": (source.standard_normal(shape) / shape[0] ** 0.5).astype(np.float32)
        for i, shape in enumerate(WIDTHS)
    }
    names = list(weights)
    with shoal.init() as group:
        averager = Averager(group, weights)
        points, wanted = samples(group.rank, 256)
        for step in range(300):
            inputs = [points]  # forward
            for name in names:
                out = inputs[-1] @ weights[name]
                inputs.append(out if name == names[-1] else np.maximum(out, 0))
            error = 2 * (inputs.pop() - wanted) / len(points)

            gradients = averager.begin()  # backward: the last layer's gradient is ready first
            for name in reversed(names):
                np.matmul(inputs[-1].T, error, out=gradients[name])
                averager.ready(name)
                error = (error @ weights[name].T) * (inputs.pop() > 0)
            averager.wait()

            for name in names:
                weights[name] -= 0.1 * gradients[name]
            if step % 100 == 0 or step == 299:
                loss = np.array([np.mean((predict(weights, points) - wanted) ** 2)])
                group.all_reduce(loss, "avg")
                if group.rank == 0:
                    print(f"step {step}: loss {loss[0]:.4f}")
        bits = hashlib.sha256(b"".join(weights[name].tobytes() for name in names)).hexdigest()
        print(f"rank {group.rank}: weights {bits[:12]}")


def predict(weights: dict[str, np.ndarray], points: np.ndarray) -> np.ndarray:
    """Return the network's outputs."""
    *hidden, last = weights.values()
    for weight in hidden:
        points = np.maximum(points @ weight, 0)
    return points @ last


def launch(n_workers: int) -> int:
    """Start workers on this machine; return 0 if all succeed."""
    held = socket.socket()  # open until the workers end, so that no connection gets its port
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    port = held.getsockname()[1]
    env = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    env |= {"WORLD_SIZE": str(n_workers), "OMP_NUM_THREADS": "1"}
    workers = [
        subprocess.Popen([sys.executable, __file__], env={**env, "RANK": str(rank)})
        for rank in range(n_workers)
    ]
    return max(worker.wait() for worker in workers)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=3)
    n_asked = parser.parse_args().workers
    if {"RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"} & os.environ.keys():
        main()
    else:
        sys.exit(launch(n_asked))
