"""How long a group pauses to let one newcomer in: `python bench/growing.py`.

Ranks on two pretended hosts of this machine call `grow` once the newcomer waits, and sum 4 KiB with
it. The pause is the slowest member's, from before `grow` until after that sum.
"""

from __future__ import annotations

import argparse
import os
import secrets
import socket
import statistics
import subprocess
import sys
import time

import numpy as np

import shoal


def main() -> None:
    """Print the pause of each round and their median, and a `grow` without newcomers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=8, help="before the newcomer")
    parser.add_argument("--rounds", type=int, default=7, help="each in processes of its own")
    parser.add_argument("--be", choices=["member", "newcomer"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.be == "member":
        _be_member()
    elif options.be == "newcomer":
        with shoal.init(join=os.environ["JOIN"]) as group:
            _sum(group)
            group.all_reduce(np.zeros(1), "max")
    else:
        found = np.array([_round(options.ranks) for _ in range(options.rounds)])
        print(f"{options.ranks} ranks, ms with a newcomer:", *np.round(found[:, 0], 1))
        print(f"median {statistics.median(found[:, 0]):.1f}", end=", ")
        print(f"without a newcomer {statistics.median(found[:, 1]):.2f}")


def _round(n_ranks: int) -> tuple[float, float]:
    """The pauses with and without a newcomer, in ms."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(n_ranks)}
    common |= {"SHOAL_KEY": secrets.token_hex(16), "SHOAL_SOCKET_IFNAME": "lo"}
    members = [
        subprocess.Popen(
            [sys.executable, __file__, "--be", "member"],
            env=os.environ | common | {"RANK": str(rank), "SHOAL_HOST_ID": "ab"[rank % 2]},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(n_ranks)
    ]
    said = [member.communicate()[0] for member in members]
    with_one, without = map(float, said[0].split())
    return with_one, without


def _be_member() -> None:
    with shoal.init() as group:
        newcomer = None
        group.grow()  # the first one opens the door
        begin_s = time.perf_counter()
        group.grow()
        without = 1e3 * (time.perf_counter() - begin_s)
        if group.rank == 0:
            here = os.environ | {"JOIN": group.address, "SHOAL_HOST_ID": "b"}
            newcomer = subprocess.Popen([sys.executable, __file__, "--be", "newcomer"], env=here)
            while not group.newcomers:
                time.sleep(0.01)
        group.barrier()
        begin_s = time.perf_counter()
        larger = group.grow()
        _sum(larger)
        pause = np.array([1e3 * (time.perf_counter() - begin_s)])
        larger.all_reduce(pause, "max")
        if larger.rank == 0:
            print(pause[0], without)
        if newcomer is not None:
            newcomer.wait()


def _sum(group: shoal.Group) -> None:
    data = np.ones(1024, np.float32)
    group.all_reduce(data)
    assert (data == group.size).all()


if __name__ == "__main__":
    main()
