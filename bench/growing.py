"""Time the pause of a group that admits one newcomer: `python bench/growing.py`.

Ranks on two simulated hosts of this machine call `grow` once the newcomer waits, and sum 4 KiB with
it. The pause is the slowest member's, from before `grow` until after that sum.

With `--state MB` the hosts are network namespaces with links of 1 Gbit/s (needs root), the ranks
call `shoal.torch.grow_group`, and `sync_state` sends the newcomer a model of this size.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import statistics
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import numpy as np

import shoal
from shoal.lab import Lab
from shoal.rendezvous.listener import hold_port

if TYPE_CHECKING:
    from collections.abc import Mapping

MBIT = 1000
N_TENSORS = 20


def main() -> None:
    """Print the pause of each round and its median, and the parts of the pause."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=8, help="ranks before the newcomer joins")
    parser.add_argument("--rounds", type=int, default=7, help="rounds, each in new processes")
    parser.add_argument("--state", type=float, default=0, metavar="MB", help="size of the model")
    parser.add_argument("--be", choices=["member", "newcomer"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.be and options.state:
        _pause_with_state(options.state)
    elif options.be == "member":
        _be_member()
    elif options.be == "newcomer":
        with shoal.init(join=os.environ["SHOAL_JOIN"]) as group:
            _sum(group)
            group.all_reduce(np.zeros(1), "max")
    else:
        found = np.array([_round(options.ranks, options.state) for _ in range(options.rounds)])
        print(f"{options.ranks} ranks, ms with a newcomer:", *np.round(found[:, 0], 1))
        print(f"median {statistics.median(found[:, 0]):.1f}", end=", ")
        if options.state:
            parts = np.round(np.median(found[:, 1:], axis=0), 1)
            print("medians of grow_group, sync_state, the first sum:", *parts)
        else:
            print(f"without a newcomer {statistics.median(found[:, 1]):.2f}")


class _Starter:
    """Starts the processes of a round."""

    def __init__(self, lab: Lab | None, state: float) -> None:
        self.lab, self.state = lab, state
        self.common = {"SHOAL_KEY": secrets.token_hex(16), "MASTER_ADDR": "127.0.0.1"}
        if lab is None:
            self.common["SHOAL_SOCKET_IFNAME"] = "lo"
        else:
            self.common["MASTER_ADDR"] = lab.hosts[0].address

    def start(self, kind: str, host: int, environ: Mapping[str, str]) -> subprocess.Popen[str]:
        """Start a process on one of two hosts."""
        command = [sys.executable, __file__, "--be", kind, "--state", str(self.state)]
        environ = {**os.environ, "OMP_NUM_THREADS": "1", **self.common, **environ}
        environ["SHOAL_HOST_ID"] = "ab"[host]
        if self.lab is not None:
            environ |= self.lab.environment_of(host)
            command = self.lab.command(host, command)
        return subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True)


def _round(n_ranks: int, state: float) -> list[float]:
    """Return the numbers that rank 0 prints, in ms, the pause with a newcomer first."""
    with hold_port() as held, Lab(2, MBIT) if state else contextlib.nullcontext() as lab:
        port = str(held.getsockname()[1])
        starter = _Starter(lab, state)
        place = {"MASTER_PORT": port, "WORLD_SIZE": str(n_ranks)}
        members = [
            starter.start("member", rank % 2, place | {"RANK": str(rank)})
            for rank in range(n_ranks)
        ]
        assert members[0].stdout is not None
        address = members[0].stdout.readline().strip()
        newcomer = starter.start("newcomer", 1, {"SHOAL_JOIN": address})
        printed = [one.communicate()[0] for one in (*members, newcomer)]
    return [float(one) for one in printed[0].split()]


def _be_member() -> None:
    with shoal.init() as group:
        group.grow()  # The first call opens this rank's door; the next one is timed without that.
        begin_s = time.perf_counter()
        group.grow()
        without = 1e3 * (time.perf_counter() - begin_s)
        if group.rank == 0:
            print(group.address, flush=True)
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


def _sum(group: shoal.Group) -> None:
    data = np.ones(1024, np.float32)
    group.all_reduce(data)
    assert (data == group.size).all()


def _pause_with_state(mbytes: float) -> None:
    """Run a member or a newcomer under torch."""
    import torch
    import torch.distributed as dist

    import shoal.torch

    is_newcomer = "SHOAL_JOIN" in os.environ
    torch.manual_seed(int(is_newcomer))
    numbers = [torch.randn(int(mbytes * 1e6 / 4 / N_TENSORS)) for _ in range(N_TENSORS)]
    model = torch.nn.ParameterList(map(torch.nn.Parameter, numbers))
    if is_newcomer:
        shoal.torch.join_group()
        times = [time.perf_counter()] * 2
    else:
        dist.init_process_group("shoal")
        n_before = dist.get_world_size()
        shoal.torch.grow_group()
        if dist.get_rank() == 0:
            print(shoal.torch.join_address(), flush=True)
        while dist.get_world_size() == n_before:
            dist.barrier()
            times = [time.perf_counter()]
            shoal.torch.grow_group()
        times.append(time.perf_counter())
    shoal.torch.sync_state(model)
    times.append(time.perf_counter())
    dist.all_reduce(torch.ones(1024))
    times.append(time.perf_counter())
    parts = 1e3 * torch.tensor([times[3] - times[0], *np.diff(times)])
    dist.all_reduce(parts, dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        print(*parts.tolist())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
