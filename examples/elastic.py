"""Keep training while a chaos script with a seed kills workers and starts others.

Four workers train a small network with `shoal.torch`. At random moments the script kills one (as by
`kill -9`) or starts another, which joins the running job. At the end it prints the loss, the loss
of an undisturbed run in one process, and the longest time without a step.

    python examples/elastic.py                       # a minute
    python examples/elastic.py --seconds 600 --seed 3

NOT under torchrun: it ends all workers of a host when one of them dies.
"""

from __future__ import annotations

import argparse
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import shoal.torch

N_EXAMPLES = 1024
FEWEST, MOST = 2, 5  # workers left in the job; workers in all
TIMEOUT = timedelta(seconds=60)
STEP_S = 0.02  # shortest step, as if the network were larger


# ---- a worker ----


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return the network and its optimizer, the same in every process."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    return net, torch.optim.AdamW(net.parameters(), lr=0.001)


def examples(step: int) -> torch.Tensor:
    """Return the examples of all workers in a step."""
    return torch.randn(N_EXAMPLES, 8, generator=torch.Generator().manual_seed(step))


def loss_of(model: nn.Module, given: torch.Tensor) -> torch.Tensor:
    """Return the mean loss."""
    return nn.functional.mse_loss(model(given), given.sin().sum(1, keepdim=True))


class Worker:
    """One process of the job.

    Args:
        place: a folder for files, such as "stop", which ends the job.
    """

    def __init__(self, place: Path) -> None:
        self.place = place
        self.net, self.optimizer = make()
        self.model: shoal.torch.DistributedDataParallel | None = None
        self.step = 0
        self.last, self.longest_s = 0.0, 0.0

    def run(self) -> None:
        """Train until the job ends."""
        if os.environ.get("SHOAL_JOIN"):
            shoal.torch.join_group(timeout=TIMEOUT)
        else:
            dist.init_process_group("shoal", timeout=TIMEOUT)
        self.write("address", shoal.torch.join_address())
        group, is_new, goes_on = None, True, True
        while goes_on:
            try:
                if not is_new:  # adds newcomers, removes lost workers
                    shoal.torch.grow_group()
                is_new = False
                if dist.group.WORLD is not group:
                    group = dist.group.WORLD
                    self.regroup()
                goes_on = self.take_step()
            except RuntimeError:  # noqa: PERF203 - PeerLost, or C++'s error for it
                if shoal.torch.peer_lost() is None:
                    raise
        dist.destroy_process_group()

    def regroup(self) -> None:
        """Continue in another group, with the state of rank 0 on all workers."""
        if self.model is None:  # this worker is new; regroup() makes the same calls on the others
            self.model = shoal.torch.DistributedDataParallel(self.net, weighted=True)
        else:
            self.model.regroup()
        shoal.torch.sync_state(self.net, self.optimizer)
        step = torch.tensor(self.step)
        dist.broadcast(step, 0)
        self.step = int(step)
        if dist.get_rank() == 0:
            print(f"step {self.step}: {dist.get_world_size()} workers", flush=True)

    def take_step(self) -> bool:
        """Train on this worker's share of the examples; return False when the job ends."""
        mine = examples(self.step)[dist.get_rank() :: dist.get_world_size()]
        self.optimizer.zero_grad()
        self.model.weigh(len(mine))  # shares are unequal
        loss = loss_of(self.model, mine)
        loss.backward()
        ends = torch.tensor([float((self.place / "stop").exists())])
        sums = torch.cat([loss.detach().reshape(1) * len(mine) / N_EXAMPLES, ends])
        dist.all_reduce(sums)
        self.optimizer.step()
        self.step += 1
        self.note_time()
        if sums[1]:
            self.write("end", f"{self.step} {sums[0].item()}")
        return not sums[1]

    def note_time(self) -> None:
        """Record the longest time between two steps, and sleep until a step has taken STEP_S."""
        now = time.monotonic()
        if self.last and now - self.last > self.longest_s:
            self.longest_s = now - self.last
            self.write("longest", str(self.longest_s))
        time.sleep(max(0.0, self.last + STEP_S - now))
        self.last = now

    def write(self, name: str, text: str) -> None:
        """Replace a file that the chaos script reads, atomically."""
        unfinished = self.place / f"unfinished {os.getpid()}"
        unfinished.write_text(text)
        unfinished.replace(self.place / f"{name} {os.getpid()}")


# ---- the chaos script ----


class Chaos:
    """Starts and kills workers."""

    def __init__(self, seed: int, place: Path) -> None:
        self.random = random.Random(seed)
        self.place = place
        self.alive: list[subprocess.Popen[bytes]] = []
        self.n_killed = self.n_joined = 0

    def start(self, **environ: str) -> None:
        """Start a worker."""
        command = [sys.executable, __file__, f"--worker={self.place}"]
        environ = os.environ | {"OMP_NUM_THREADS": "1"} | environ
        self.alive.append(subprocess.Popen(command, env=environ))

    def address(self, worker: subprocess.Popen[bytes]) -> str:
        """Return the address for newcomers at a worker; empty if it is not in the job yet."""
        path = self.place / f"address {worker.pid}"
        return path.read_text() if path.exists() else ""

    def happen(self) -> None:
        """Kill a worker or start one. The victim may be a worker that has not joined yet."""
        inside = [one for one in self.alive if self.address(one)]
        victims = self.alive if len(inside) > FEWEST else [o for o in self.alive if o not in inside]
        if victims and (len(self.alive) >= MOST or self.random.random() < 0.5):
            victim = self.random.choice(victims)
            victim.kill()
            victim.wait()
            self.alive.remove(victim)
            self.n_killed += 1
        elif len(self.alive) < MOST:
            self.start(SHOAL_JOIN=",".join(map(self.address, inside)))
            self.n_joined += 1

    def read(self, name: str) -> list[str]:
        """Return the reports of all workers under this name."""
        return [one.read_text() for one in self.place.glob(f"{name} *")]

    def await_all(self) -> None:
        """Return when all workers are in the job."""
        while not all(map(self.address, self.alive)):
            if any(one.poll() for one in self.alive):
                raise SystemExit("a worker failed before it was in the job")
            time.sleep(0.1)

    def run(self, seconds: float, every: float) -> bool:
        """Run the job; return True if all workers that were not killed exit with 0."""
        held = socket.socket()  # open until the workers end, so that no connection gets its port
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        port = str(held.getsockname()[1])
        for rank in range(4):
            place = {"RANK": str(rank), "WORLD_SIZE": "4", "MASTER_PORT": port}
            self.start(MASTER_ADDR="127.0.0.1", **place)
        try:
            self.await_all()
            for _ in range(int(seconds / every)):
                time.sleep(every * self.random.uniform(0.5, 1.5))
                self.happen()
            self.await_all()
            (self.place / "stop").touch()
            return sum(one.wait() != 0 for one in self.alive) == 0
        finally:
            for one in self.alive:
                one.kill()


def loss_alone(n_steps: int) -> float:
    """Return the loss in the last of `n_steps` steps of one process."""
    torch.set_num_threads(1)  # like the workers
    net, optimizer = make()
    for step in range(n_steps):
        optimizer.zero_grad()
        loss = loss_of(net, examples(step))
        loss.backward()
        optimizer.step()
    return loss.item()


def main() -> int:
    """Run the job; return 0 if it succeeds."""
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--every", type=float, default=4.0, help="seconds between two events")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--worker", type=Path, metavar="FOLDER", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker is not None:
        Worker(args.worker).run()
        return 0
    with tempfile.TemporaryDirectory() as folder:
        chaos = Chaos(args.seed, Path(folder))
        if not chaos.run(args.seconds, args.every):
            return 1
        step, loss = chaos.read("end")[0].split()
        longest_s = max(map(float, chaos.read("longest")))
    print(f"{chaos.n_killed} workers were killed, and {chaos.n_joined} joined")
    print(f"longest time without a step: {longest_s:.2f} s")
    print(f"loss after {step} steps: {float(loss):.6f}, undisturbed: {loss_alone(int(step)):.6f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
