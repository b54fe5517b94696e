"""Train a small network in JAX on two workers, and compare with one worker that has all samples.

    python examples/jax_train.py                    # two workers on this machine
    mpirun -n 2 python examples/jax_train.py

It needs JAX: pip install jax. The training step is one function under jit, with the averages in it.
"""

import math
import os
import socket
import subprocess
import sys

import jax
import jax.flatten_util
import jax.numpy as jnp

import shoal
import shoal.jax

WIDTHS = [(8, 64), (64, 64), (64, 1)]
N_STEPS, BATCH, RATE = 200, 64, 0.1


def init(seed: int) -> list[dict[str, jax.Array]]:
    """Return the first parameters."""
    keys = jax.random.split(jax.random.key(seed), len(WIDTHS))
    return [
        {"weight": jax.random.normal(key, shape) / shape[0] ** 0.5, "bias": jnp.zeros(shape[1])}
        for key, shape in zip(keys, WIDTHS, strict=True)
    ]


def batch(step: int) -> tuple[jax.Array, jax.Array]:
    """Return the samples of a step: points, and the values of the function to learn."""
    points = jax.random.normal(jax.random.fold_in(jax.random.key(1), step), (BATCH, 8))
    return points, jnp.sin(points[:, :1] + points[:, 1:2])


def loss(parameters, points, wanted):
    """Return the mean squared error of the network."""
    *hidden, last = parameters
    for layer in hidden:
        points = jax.nn.relu(points @ layer["weight"] + layer["bias"])
    return jnp.mean((points @ last["weight"] + last["bias"] - wanted) ** 2)


def descend(parameters, gradients):
    """Return the parameters after a step of gradient descent."""
    return jax.tree.map(lambda value, slope: value - RATE * slope, parameters, gradients)


def main() -> None:
    """Train as one worker."""
    with shoal.init() as group:

        @jax.jit
        def step(parameters, points, wanted):
            mine = slice(group.rank * BATCH // group.size, (group.rank + 1) * BATCH // group.size)
            gradients = jax.grad(loss)(parameters, points[mine], wanted[mine])
            return descend(parameters, shoal.jax.average(gradients, group))

        parameters = shoal.jax.broadcast(init(seed=group.rank), group)  # rank 0's, on all
        for number in range(N_STEPS):
            parameters = step(parameters, *batch(number))
        jax.block_until_ready(parameters)  # NOT after the group is closed
        if group.rank == 0:
            compare(parameters, group.size)


def compare(parameters, size: int) -> None:
    """Train alone with all samples, and print the number of equal digits of the parameters."""
    alone = init(seed=0)
    step = jax.jit(lambda values, *batch: descend(values, jax.grad(loss)(values, *batch)))
    for number in range(N_STEPS):
        alone = step(alone, *batch(number))
    ours, whole = (jax.flatten_util.ravel_pytree(tree)[0] for tree in (parameters, alone))
    error = float(jnp.linalg.norm(ours - whole) / jnp.linalg.norm(whole))
    digits = -math.log10(max(error, 1e-16))
    losses = [float(loss(tree, *batch(N_STEPS))) for tree in (parameters, alone)]
    print(f"loss {losses[0]:.6f} on {size} ranks, {losses[1]:.6f} on one with all samples")
    print(f"the parameters are equal in {digits:.1f} digits")


def launch(n_workers: int) -> int:
    """Start workers on this machine; return 0 if all succeed."""
    held = socket.socket()  # open until the workers end, so that no connection gets its port
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    port = held.getsockname()[1]
    env = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    env |= {"WORLD_SIZE": str(n_workers), "JAX_PLATFORMS": "cpu"}
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
