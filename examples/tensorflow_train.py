"""Train a small Keras model on two workers, and compare with one worker that has all samples.

    python examples/tensorflow_train.py             # two workers on this machine
    mpirun -n 2 python examples/tensorflow_train.py

It needs TensorFlow with Keras 3: pip install tensorflow.
"""

import math
import os
import socket
import subprocess
import sys

import keras
import numpy as np

import shoal
import shoal.tensorflow

N_STEPS, BATCH = 200, 64


def make_model() -> keras.Model:
    """Return an untrained network."""
    layers = keras.layers
    hidden = [layers.Dense(64, activation="relu") for _ in range(2)]
    return keras.Sequential([layers.Input((8,)), *hidden, layers.Dense(1)], name="net")


def train(model: keras.Model, optimizer, rank: int, size: int) -> None:
    """Train with one rank's part of every batch."""
    points = np.random.default_rng(1).standard_normal((N_STEPS, BATCH, 8), np.float32)
    mine = np.split(points, size, axis=1)[rank].reshape(-1, 8)
    wanted = np.sin(mine[:, :1] + mine[:, 1:2])
    model.compile(optimizer, "mse")
    model.fit(mine, wanted, batch_size=BATCH // size, shuffle=False, verbose=0)


def main() -> None:
    """Train as one worker."""
    with shoal.init() as group:
        keras.utils.set_random_seed(group.rank)
        model = make_model()
        shoal.tensorflow.broadcast_variables(model.variables, group)  # rank 0's, on all
        first = model.get_weights()
        optimizer = shoal.tensorflow.DistributedOptimizer(keras.optimizers.Adam(0.003), group)
        train(model, optimizer, group.rank, group.size)
        if group.rank == 0:
            alone = make_model()
            alone.set_weights(first)
            train(alone, keras.optimizers.Adam(0.003), 0, 1)
            compare(model, alone, group.size)


def compare(ours: keras.Model, alone: keras.Model, size: int) -> None:
    """Print the number of equal digits of the weights."""
    points = np.random.default_rng(2).standard_normal((1000, 8), np.float32)
    wanted = np.sin(points[:, :1] + points[:, 1:2])
    losses = [model.evaluate(points, wanted, verbose=0) for model in (ours, alone)]
    one, other = (
        np.concatenate([weight.ravel() for weight in model.get_weights()])
        for model in (ours, alone)
    )
    error = np.linalg.norm(one - other) / np.linalg.norm(other)
    digits = -math.log10(max(error, 1e-16))
    print(f"loss {losses[0]:.6f} on {size} ranks, {losses[1]:.6f} on one with all samples")
    print(f"the parameters are equal in {digits:.1f} digits")


def launch(n_workers: int) -> int:
    """Start workers on this machine; return 0 if all succeed."""
    held = socket.socket()  # open until the workers end, so that no connection gets its port
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    port = held.getsockname()[1]
    env = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    env |= {"WORLD_SIZE": str(n_workers), "TF_CPP_MIN_LOG_LEVEL": "2"}
    workers = [
        subprocess.Popen([sys.executable, __file__], env={**env, "RANK": str(rank)})
        for rank in range(n_workers)
    ]
    return max(worker.wait() for worker in workers)


if __name__ == "__main__":
    if {"RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"} & os.environ.keys():
        main()
    else:
        sys.exit(launch(2))
