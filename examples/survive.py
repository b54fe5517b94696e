"""Keep training after a worker is killed: the others shrink the group, in the same processes.

Starts several workers of `train_on.py`; one of them is killed (as by `kill -9`) half-way.

    python examples/survive.py                        # four workers; number 2 is killed
    python examples/survive.py --workers 3 --kill 0   # rank 0, which served the store, is killed

NOT under torchrun: it ends all workers of a host when one of them dies.
"""

import argparse
import os
import socket
import subprocess
import sys
from pathlib import Path

TRAIN = Path(__file__).with_name("train_on.py")


def parse_args() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--kill", type=int, default=2, metavar="RANK", help="victim; -1: none")
    parser.add_argument("--steps", type=int, default=100)
    return parser.parse_args()


def main() -> int:
    """Start the workers; return 0 if all except the killed one exit with 0."""
    args = parse_args()
    held = socket.socket()  # open until the workers end, so that no connection gets its port
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    port = held.getsockname()[1]
    environ = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    environ |= {"WORLD_SIZE": str(args.workers), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(TRAIN), f"--steps={args.steps}", f"--kill={args.kill}"]
    workers = [
        subprocess.Popen(command, env=environ | {"RANK": str(rank)}) for rank in range(args.workers)
    ]
    try:
        codes = [worker.wait() for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    return int(any(code for rank, code in enumerate(codes) if rank != args.kill))


if __name__ == "__main__":
    sys.exit(main())
