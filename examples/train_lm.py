"""Train a byte-level Transformer on the Python standard library, data-parallel.

An ordinary DistributedDataParallel script: shoal is only the name in `init_process_group`.

    torchrun --standalone --nproc-per-node 2 examples/train_lm.py --backend shoal
"""

import argparse
import json
import math
import statistics
import sys
import sysconfig
import time
import zlib
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

BITS_PER_NAT = 1 / math.log(2)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--backend", default="shoal", help="any torch.distributed backend")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch", type=int, default=2, help="sequences per worker and step")
    parser.add_argument("--context", type=int, default=128, help="bytes per sequence")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--lr", type=float, default=2e-3, help="at its peak")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--measure-every", type=int, default=5, help="steps between measurements")
    parser.add_argument("--result", type=Path, help="a JSON file for the figures")
    return parser.parse_args()


def read_corpus() -> tuple[Tensor, Tensor]:
    """The standard library's source as bytes: training text, and one file in ten held out."""
    root = Path(sysconfig.get_path("stdlib"))
    left_out = {"site-packages", "dist-packages", "test", "tests"}
    training, held_out = bytearray(), bytearray()
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if left_out.isdisjoint(name.parts):
            chosen = held_out if zlib.crc32(name.as_posix().encode()) % 10 == 0 else training
            chosen += path.read_bytes()
    if not training or not held_out:
        sys.exit(f"train_lm: {root} holds too few .py files to train on")
    return tuple(torch.frombuffer(text, dtype=torch.uint8) for text in (training, held_out))


def windows(text: Tensor, starts: Tensor, context: int) -> Tensor:
    """The `context` + 1 bytes from every start: inputs, and the same shifted by one to predict."""
    return text[starts[:, None] + torch.arange(context + 1)].long()


class ByteTransformer(nn.Module):
    def __init__(self, width: int, n_layers: int, context: int) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, width)
        self.places = nn.Embedding(context, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, width // 64 or 1, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True
            )
            for _ in range(n_layers)
        )
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, 256)
        nn.init.normal_(self.bytes.weight, std=0.02)
        nn.init.normal_(self.places.weight, std=0.02)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(context))

    def forward(self, text: Tensor) -> Tensor:
        """The mean loss, in nats, of predicting each byte of `text` from those before it."""
        x = self.bytes(text[:, :-1]) + self.places.weight
        for layer in self.layers:
            x = layer(x, src_mask=self.mask, is_causal=True)
        return F.cross_entropy(self.out(self.norm(x)).flatten(0, 1), text[:, 1:].flatten())


def main():
    args = parse_args()
    dist.init_process_group(args.backend)
    rank, size = dist.get_rank(), dist.get_world_size()
    training, held_out = read_corpus()
    torch.manual_seed(args.seed)
    model = DistributedDataParallel(ByteTransformer(args.width, args.layers, args.context))
    n = sum(p.numel() for p in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, args.steps + 1, pct_start=0.1)
    pick = torch.Generator().manual_seed(args.seed * size + rank)
    losses, ts, bw, fw, waits, ot = [], [], [], [], [], []
    t00 = time.perf_counter()
    for step in range(args.steps):
        starts = torch.randint(len(training) - args.context, (args.batch,), generator=pick)
        text = windows(training, starts, args.context)
        if step % args.measure_every == 0:
            with model.no_sync():
                l = model(text)
                t = time.perf_counter()
                l.backward()
                alone = time.perf_counter() - t
                optimizer.zero_grad()
        t0 = time.perf_counter()
        loss = model(text)
        t1 = time.perf_counter()
        loss.backward()
        t2 = time.perf_counter()
        if step % args.measure_every == 0:
            waits.append(t2 - t1 - alone)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        t3 = time.perf_counter()
        losses.append(loss.item() * BITS_PER_NAT)
        ts.append(t3 - t0); fw.append(t1 - t0); bw.append(t2 - t1); ot.append(t3 - t2)
        if rank == 0 and step % (args.steps // 10) == 0:
            print(step, statistics.fmean(losses[-50:]), file=sys.stderr)
    model.eval()
    k = 128
    starts = torch.linspace(0, len(held_out) - args.context - 1, k).long()
    te = time.perf_counter()
    model.train()
    with torch.no_grad():
        h = statistics.fmean(model.module(windows(held_out, starts[i:i+8], args.context)).item() for i in range(0, k, 8)) * BITS_PER_NAT
    if rank == 0:
        med = lambda x: statistics.median(x) * 1e3
        counts = torch.bincount(held_out.long(), minlength=256).double(); p = counts[counts>0]/counts.sum()
        print(f"{n/1e6:.2f}M params train {statistics.fmean(losses[-50:]):.4f} held {h:.4f} H0 {-(p*p.log2()).sum():.3f} step {med(ts):.1f} fw {med(fw):.1f} bw {med(bw):.1f} opt {med(ot):.1f} wait {med(waits):.2f} total {time.perf_counter()-t00:.1f} eval {time.perf_counter()-te:.1f} corpus {len(training)/1e6:.1f}+{len(held_out)/1e6:.1f}MB")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
