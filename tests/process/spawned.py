"""A program that starts its ranks by torch.multiprocessing, as notebooks do.

    python spawned.py START_METHOD ACTION

Prints "ended well", or the error that the parent gets.
"""

import os
import signal
import socket
import sys
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

SIZE = 2
TIMEOUT = timedelta(seconds=300)


def meet(rank: int, folder: str, ports: list[int]) -> None:
    """Form a group by each of torch's three init methods, and sum in it."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(ports[0]))
    for where in (f"tcp://127.0.0.1:{ports[1]}", f"file://{folder}/store", "env://"):
        how = {"rank": rank, "world_size": SIZE, "timeout": TIMEOUT}
        dist.init_process_group("shoal", init_method=where, **how)
        tensor = torch.full((1000,), rank + 1.0)
        dist.all_reduce(tensor)
        assert tensor.tolist() == [3.0] * 1000
        dist.destroy_process_group()


def fail(rank: int, folder: str, action: str) -> None:
    """Rank 1 fails once the group is formed, while the others wait for it."""
    where = f"file://{folder}/store"
    dist.init_process_group("shoal", init_method=where, rank=rank, world_size=SIZE, timeout=TIMEOUT)
    dist.barrier()
    if rank == 1 and action == "raise":
        raise ValueError("what rank 1 lacks")
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1_000_000))


def main(method: str, action: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        if action == "meet":
            held = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
            ports = [one.getsockname()[1] for one in held]
            for one in held:
                one.close()
            mp.start_processes(meet, (folder, ports), SIZE, start_method=method)
        else:
            mp.start_processes(fail, (folder, action), SIZE, start_method=method)
    sys.stdout.write("ended well\n")


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
        sys.stdout.write(f"{type(error).__name__}: {error}\n")
