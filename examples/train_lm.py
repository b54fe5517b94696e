"""Train a byte-level language model on the Python standard library, data-parallel.

An ordinary DistributedDataParallel script; only `init_process_group` names shoal.

    torchrun --standalone --nproc-per-node 2 examples/train_lm.py --backend shoal

"Waiting for gradients" is the time that averaging adds to `backward()`: every few steps one batch
is used twice, first under DDP's `no_sync()`, without averaging, then with it, and the wait is the
difference of the two backward passes. A timer started at the last gradient would miss averaging
that runs earlier, or on a core that backward needs. No other figure includes the extra pass.
"""

import argparse
import json
import math
import statistics
import sys
import sysconfig
import zlib
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

RECENT = 50  # steps in the running mean of the training loss
MEASURE_EVERY = 5  # steps; a measured one costs an extra forward and backward
HELD_OUT_WINDOWS = 512  # 64 KiB of text at the default context: well under a second on two cores


def parse_args() -> argparse.Namespace:
    """Parse the command line; the defaults are the demo's."""
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--backend", default="shoal", help="any torch.distributed backend")
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--batch", type=int, default=8, help="sequences per worker and step")
    parser.add_argument("--context", type=int, default=128, help="bytes per sequence")
    parser.add_argument("--width", type=int, default=128, help="a multiple of 32")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--rows", type=int, default=32768, help="rows of each n-gram table")
    parser.add_argument("--lr", type=float, default=4e-3, help="learning rate at its peak")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--result", type=Path, help="write the figures to this JSON file")
    return parser.parse_args()


def read_corpus() -> list[Tensor]:
    """Return the standard library's source as bytes: training text, and held-out text."""
    root = Path(sysconfig.get_path("stdlib"))
    left_out = {"site-packages", "dist-packages", "test", "tests"}  # differ between machines
    texts = bytearray(), bytearray()
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if left_out.isdisjoint(name.parts):
            texts[zlib.crc32(name.as_posix().encode()) % 10 == 0].extend(path.read_bytes())
    if min(map(len, texts)) < 100_000:
        sys.exit(f"train_lm: {root} holds too little Python source to train on")
    return [torch.frombuffer(text, dtype=torch.uint8) for text in texts]


def windows(text: Tensor, starts: Tensor, context: int) -> Tensor:
    """Return `context` bytes from every start to read, and one more to predict."""
    return text[starts[:, None] + torch.arange(context + 1)].long()


def random_batches(text: Tensor, args: argparse.Namespace, seed: int) -> Iterator[Tensor]:
    """Yield batches of `args.batch` windows of `text` without end, at places that `seed` fixes."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(text) - args.context, (args.batch,), generator=generator)
        yield windows(text, starts, args.context)


class ByteModel(nn.Module):
    """A small Transformer over bytes, their places, and hashed pairs and triples of bytes.

    The n-gram tables (as in Pagnoni et al., Byte Latent Transformer, 2024) hold most parameters and
    cost little arithmetic, so the model learns quickly on a CPU, and has much to average in a step.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        width, self.n_rows = args.width, args.rows
        self.byte, self.place = nn.Embedding(256, width), nn.Embedding(args.context, width)
        self.pair, self.triple = nn.Embedding(args.rows, width), nn.Embedding(args.rows, width)
        for table in (self.byte, self.place, self.pair, self.triple):
            nn.init.normal_(table.weight, std=0.02)
        layer = nn.TransformerEncoderLayer(
            width, width // 32, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, args.layers, enable_nested_tensor=False)
        self.out = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 256))

    def forward(self, text: Tensor) -> Tensor:
        """Return the mean loss, in bits, of predicting each byte of `text` from earlier bytes."""
        seen, wanted = text[:, :-1], text[:, 1:]
        pair = 256 * F.pad(seen, (1, 0))[:, :-1] + seen
        triple = 65536 * F.pad(seen, (2, 0))[:, :-2] + pair
        pair, triple = ((0x9E3779B1 * gram >> 12) % self.n_rows for gram in (pair, triple))
        x = self.byte(seen) + self.place.weight + self.pair(pair) + self.triple(triple)
        mask = nn.Transformer.generate_square_subsequent_mask(seen.shape[1])
        logits = self.out(self.layers(x, mask, is_causal=True))
        return F.cross_entropy(logits.flatten(0, 1), wanted.flatten()) / math.log(2)


def train(
    model: DistributedDataParallel, batches: Iterator[Tensor], args: argparse.Namespace
) -> tuple[list[float], dict[str, float]]:
    """Train for `args.steps`; return this worker's losses, and median times in seconds."""
    optimizer = torch.optim.AdamW(model.parameters(), args.lr, betas=(0.9, 0.95), fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(  # up for a tenth of the steps, then down to zero
        optimizer, lambda step: min(1.0, 10 * (step + 1) / args.steps) * (1 - step / args.steps)
    )
    losses: list[float] = []
    times: dict[str, list[float]] = {"step_s": [], "wait_s": [], "backward_alone_s": []}
    for step, text in zip(range(args.steps), batches, strict=False):
        alone_s = None
        if step % MEASURE_EVERY == 0:
            with model.no_sync():
                alone_s = timed_backward(model(text))
            optimizer.zero_grad()

        started = perf_counter()
        backward_s = timed_backward(loss := model(text))
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        times["step_s"].append(perf_counter() - started)

        losses.append(loss.item())
        if alone_s is not None:
            times["wait_s"].append(backward_s - alone_s)
            times["backward_alone_s"].append(alone_s)
        medians = {name: statistics.median(values) for name, values in times.items()}
        show_progress(args, losses, medians)
    return losses, medians


def timed_backward(loss: Tensor) -> float:
    """Run backward; return its seconds. When DDP returns from it, gradients are averaged."""
    started = perf_counter()
    loss.backward()
    return perf_counter() - started


def show_progress(args: argparse.Namespace, losses: list[float], times: dict[str, float]) -> None:
    """On rank 0, redraw a bar on a terminal, or print a line per tenth of the steps elsewhere."""
    step, bar = len(losses), "#" * (24 * len(losses) // args.steps)
    rate = dist.get_world_size() * args.batch * args.context / times["step_s"]
    line = (
        f"{args.backend:6} [{bar:24}] {step:3}/{args.steps}"
        f" {statistics.fmean(losses[-RECENT:]):.3f} bits/byte, {rate:6,.0f} tokens/s,"
        f" {times['wait_s'] / times['step_s']:4.0%} waiting for gradients"
    )
    if dist.get_rank() == 0 and sys.stderr.isatty():
        print(f"\r{line}", end="\n" if step == args.steps else "", file=sys.stderr, flush=True)
    elif dist.get_rank() == 0 and step in range(args.steps, 0, -max(1, args.steps // 10)):
        print(line, file=sys.stderr, flush=True)


@torch.no_grad()
def evaluate(model: nn.Module, text: Tensor, context: int) -> float:
    """Return the mean loss over this worker's windows of `text`."""
    starts = torch.linspace(0, len(text) - context - 1, HELD_OUT_WINDOWS).long()
    mine = starts[dist.get_rank() :: dist.get_world_size()]
    losses = [model(windows(text, starts, context)) * len(starts) for starts in mine.split(16)]
    return sum(losses).item() / len(mine)


def main() -> None:
    """Train as one of the workers, and write the mean of all workers' figures."""
    args = parse_args()
    dist.init_process_group(args.backend)
    rank, size = dist.get_rank(), dist.get_world_size()
    training, held_out = read_corpus()
    torch.manual_seed(args.seed)
    model = DistributedDataParallel(ByteModel(args))
    batches = random_batches(training, args, seed=args.seed * size + rank)
    losses, figures = train(model, batches, args)
    figures["training_bits"] = statistics.fmean(losses[-RECENT:])
    figures["held_out_bits"] = evaluate(model.module, held_out, args.context)
    mean = torch.tensor(list(figures.values()), dtype=torch.float64)
    dist.all_reduce(mean)
    figures = dict(zip(figures, (mean / size).tolist(), strict=True))
    if rank == 0 and args.result:
        frequency = (torch.bincount(training, minlength=256) + 1.0) / len(training)
        figures["unigram_bits"] = -frequency.log2()[held_out.long()].mean().item()
        figures["tokens_per_s"] = size * args.batch * args.context / figures["step_s"]
        figures["n_parameters"] = sum(weight.numel() for weight in model.parameters())
        args.result.write_text(json.dumps(figures | {"backend": args.backend, "losses": losses}))
    dist.barrier()  # Gloo's threads release `mean` late: a worker that ended now could abort
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
