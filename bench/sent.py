"""Measure a rank's bytes per step, its peak rate, and its share of computing time.

    shoal lab run --hosts 4 --rate 200mbit -- python bench/sent.py ddp --steps 20
    shoal lab run --hosts 4 --rate 200mbit -- python bench/sent.py diloco --steps 210
    shoal lab run --hosts 8 --servers 8 --rate 400mbit -- python bench/sent.py top-k --steps 8

A model of 16 MiB sleeps for 300 ms instead of computing. Bytes are counted at the NICs of the host
of rank 0, so each host has one rank; the peak is the largest mean over 0.3 s.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import threading
import time

import torch
import torch.distributed as dist
from torch import nn

import shoal.torch
from shoal.average import ChunkTopK
from shoal.bench.worker import nic_bytes

COMPUTE_S = 0.3
SAMPLE_S = 0.1


class Model(nn.Module):
    """A model of 16 parameters of 1 MiB each."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList([nn.Parameter(torch.zeros(1 << 18)) for _ in range(16)])

    def forward(self, scale: torch.Tensor) -> torch.Tensor:
        """Return a loss to which every parameter contributes."""
        return torch.stack([(part * scale).sum() for part in self.parts]).sum()


def main() -> None:
    """Train in one way; rank 0 prints a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("way", choices=["alone", "ddp", "diloco", "top-k"])
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("shoal")
    model: nn.Module = Model()
    inner = torch.optim.SGD(model.parameters(), lr=1e-3)
    averaging = contextlib.nullcontext()
    if args.way == "diloco":
        outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        averaging = shoal.torch.DiLoCo(
            model, inner, outer, every=100, fragments=4, delay=5, compress="mxfp4"
        )
    elif args.way != "alone":
        scheme = ChunkTopK(0.01, 8) if args.way == "top-k" else None
        model = shoal.torch.DistributedDataParallel(model, compress=scheme)
    scale = torch.ones(1) * (dist.get_rank() + 1)

    def train(n_steps: int) -> None:
        for _ in range(n_steps):
            inner.zero_grad()
            model(scale).backward()
            time.sleep(COMPUTE_S)
            inner.step()

    samples: list[tuple[float, int]] = []
    is_over = threading.Event()

    def sample() -> None:
        while not is_over.wait(SAMPLE_S):
            samples.append((time.monotonic(), nic_bytes()[0]))

    with averaging:
        train(1 if args.way == "diloco" else 5)  # not measured: servers connect meanwhile
        dist.barrier()
        sampling = threading.Thread(target=sample)
        sampling.start()
        begin_s, before = time.monotonic(), nic_bytes()[0]
        train(args.steps)
        took_s, n_bytes = time.monotonic() - begin_s, nic_bytes()[0] - before
        is_over.set()
        sampling.join()
    pairs = zip(samples, samples[3:], strict=False)
    peak = max((after[1] - first[1]) / (after[0] - first[0]) for first, after in pairs)
    if dist.get_rank() == 0:
        found = {
            "bytes_a_step": n_bytes / args.steps,
            "peak_mbit": 8e-6 * peak,
            "computing": COMPUTE_S * args.steps / took_s,
        }
        print(json.dumps({"way": args.way, "ranks": dist.get_world_size(), **found}))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
