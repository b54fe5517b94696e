"""Train the demo's model with every way to send less, and compare the final losses.

    python -m bench.convergence --results losses.jsonl                   # all ways, three seeds
    python -m bench.convergence --results losses.jsonl --ways bf16 "mxfp4 + EF" --seeds 0
    python -m bench.convergence --results losses.jsonl --ways            # only the table

Workers are processes that count as separate hosts, so that gradients travel in the codec, over
loopback. All ways start from the same weights and see the same text in the same order: the source
of Python's standard library, as examples/train_lm.py reads it. Each run appends a line to the
results file, and the table shows all lines of that file.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn

import shoal
from bench.scoreboard.training_models import demo_script
from shoal.lab.job import private_key
from shoal.rendezvous.listener import hold_port

_REFERENCE: Final = "float32"
_RECENT: Final = 50  # steps in the mean of the training loss
_EVERY: Final = 100  # steps between averages of models

Made = tuple[nn.Module, "AbstractContextManager[Any]"]


def _compressed(make: Callable[[int], Any]) -> Callable[..., Made]:
    """Return a way that wraps a model with `compress=`; `make` gets the number of steps."""

    def wrapped(module: nn.Module, _inner: torch.optim.Optimizer, n_steps: int) -> Made:
        import shoal.torch

        return shoal.torch.DistributedDataParallel(module, compress=make(n_steps)), nullcontext()

    return wrapped


def _error_feedback(codec: str) -> Callable[..., Made]:
    return _compressed(lambda _n_steps: shoal.average.ErrorFeedback(codec))


def _top_k(share: float, bits: int) -> Callable[..., Made]:
    return _compressed(lambda n_steps: shoal.average.ChunkTopK(share, bits, warm_up=n_steps // 10))


def _diloco(every: int, compress: str | None = None) -> Callable[..., Made]:
    def averaged(module: nn.Module, inner: torch.optim.Optimizer, _n_steps: int) -> Made:
        import shoal.torch

        outer = torch.optim.SGD(module.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        return module, shoal.torch.DiLoCo(module, inner, outer, every=every, compress=compress)

    return averaged


def _local_sgd(module: nn.Module, inner: torch.optim.Optimizer, _n_steps: int) -> Made:
    import shoal.torch

    return module, shoal.torch.LocalSGD(module, inner, every=_EVERY)


WAYS: Final[Mapping[str, Callable[..., Made]]] = {
    _REFERENCE: _compressed(lambda _n: None),
    "bf16": _compressed(lambda _n: "bf16"),
    "bf16 + EF": _error_feedback("bf16"),
    "mxfp8 + EF": _error_feedback("mxfp8"),
    "mxfp4": _compressed(lambda _n: "mxfp4"),
    "mxfp4 + EF": _error_feedback("mxfp4"),
    "top-k 1 %, 8 bits": _top_k(0.01, 8),
    "top-k 3 %, 8 bits": _top_k(0.03, 8),
    "top-k 10 %, 8 bits": _top_k(0.1, 8),
    "top-k 1 %, 2 bits": _top_k(0.01, 2),
    f"DiLoCo, H = {_EVERY}": _diloco(_EVERY),
    f"DiLoCo, H = {_EVERY}, mxfp4": _diloco(_EVERY, "mxfp4"),
    "DiLoCo, H = 10": _diloco(10),
    f"LocalSGD, H = {_EVERY}": _local_sgd,
}


def main() -> int:
    """Train, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--results", type=Path, required=True, metavar="FILE", help="JSON lines to append to")
    add("--ways", nargs="*", choices=[*WAYS, []], default=list(WAYS), metavar="WAY")
    add("--seeds", type=int, nargs="+", default=[0, 1, 2])
    add("--workers", type=int, default=4)
    add("--steps", type=int, default=1000)
    add("--batch", type=int, default=8, help="sequences per worker and step")
    add("--context", type=int, default=64, help="bytes per sequence")
    add("--width", type=int, default=64)
    add("--layers", type=int, default=2)
    add("--rows", type=int, default=4096, help="rows of each n-gram table")
    add("--optimizer", choices=["adamw", "sgd"], default="adamw", help="sgd has momentum 0.9")
    add("--lr", type=float, default=4e-3)
    args = parser.parse_args()
    if args.ways:
        jobs = [(way, seed) for seed in args.seeds for way in args.ways]
        _run(args, jobs)
    print(_table([json.loads(line) for line in args.results.read_text().splitlines()]))
    return 0


def _run(args: argparse.Namespace, jobs: list[tuple[str, int]]) -> None:
    """Start workers, which train in every way in turn; raise SystemExit if one fails."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": str(args.workers)}
    torch.set_num_threads(1)
    fork = multiprocessing.get_context("fork")
    workers = [fork.Process(target=_worker, args=(n, args, jobs)) for n in range(args.workers)]
    with hold_port() as held, private_key() as key_file:
        port = held.getsockname()[1]
        os.environ |= {"MASTER_PORT": str(port), "SHOAL_KEY_FILE": key_file}
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    if any(worker.exitcode for worker in workers):
        sys.exit("convergence: a worker failed; its error is above")


def _worker(rank: int, args: argparse.Namespace, jobs: list[tuple[str, int]]) -> None:
    os.environ |= {"RANK": str(rank), "SHOAL_HOST_ID": f"host{rank}"}
    dist.init_process_group("shoal")
    script = demo_script()
    texts = script.read_corpus()
    for way, seed in jobs:
        found = _train(args, script, texts, way, seed)
        if rank == 0:
            with args.results.open("a") as file:
                file.write(json.dumps(found) + "\n")
    dist.barrier()
    dist.destroy_process_group()


def _train(
    args: argparse.Namespace, script: Any, texts: Sequence[torch.Tensor], way: str, seed: int
) -> dict[str, Any]:
    """Train once, and return the run: its losses, in bits per byte, are means over all workers."""
    training, held_out = texts
    rank, size, n = dist.get_rank(), dist.get_world_size(), args.steps
    torch.manual_seed(seed)
    module = script.ByteModel(args)
    inner: torch.optim.Optimizer
    if args.optimizer == "sgd":
        inner = torch.optim.SGD(module.parameters(), args.lr, momentum=0.9)
    else:
        inner = torch.optim.AdamW(module.parameters(), args.lr, betas=(0.9, 0.95), fused=True)
    rates = torch.optim.lr_scheduler.LambdaLR(
        inner, lambda step: min(1.0, 10 * (step + 1) / n) * (1 - step / n)
    )
    model, until_end = WAYS[way](module, inner, n)
    losses, begin_s, begin_cpu_s = [], time.monotonic(), time.process_time()
    with until_end as local:
        batches = script.random_batches(training, args, seed * size + rank)
        for _step, text in zip(range(n), batches, strict=False):
            inner.zero_grad()
            loss = model(text)
            loss.backward()
            inner.step()
            rates.step()
            losses.append(loss.item())
        if local is not None:
            local.sync()
    times = time.monotonic() - begin_s, time.process_time() - begin_cpu_s
    held = script.evaluate(module, held_out, args.context)
    numbers = torch.tensor([*losses, held, times[1]], dtype=torch.float64)
    dist.all_reduce(numbers)
    *losses, held, cpu_s = (numbers / size).tolist()
    how = {
        name: value for name, value in vars(args).items() if isinstance(value, (int, float, str))
    }
    n_parameters = sum(one.numel() for one in module.parameters())
    run = {"way": way, "seed": seed, **how, "n_parameters": n_parameters}
    found = {"held_out": held, "training": statistics.fmean(losses[-_RECENT:])}
    rounded = [round(one, 4) for one in losses]
    return {**run, **found, "wall_s": times[0], "cpu_s": cpu_s, "losses": rounded}


def _table(runs: list[dict[str, Any]]) -> str:
    """Return a row for each way: held-out losses, and their excess over float32's, by seed."""
    found = {(run["way"], run["seed"]): run for run in runs}
    seeds = sorted({seed for _, seed in found})
    heads = [f"{'held out, bits per byte':24}", *(f"{f'seed {seed}':>9}" for seed in seeds)]
    lines = ["".join([*heads, "   above float32, by seed and mean; training loss above it, mean"])]
    for way in dict.fromkeys(way for way, _ in found):
        cells = [
            f"{found[way, s]['held_out']:9.4f}" if (way, s) in found else 9 * " " for s in seeds
        ]
        both = [s for s in seeds if (way, s) in found and (_REFERENCE, s) in found]
        above = {
            loss: [found[way, s][loss] / found[_REFERENCE, s][loss] - 1 for s in both]
            for loss in ("held_out", "training")
        }
        shown = [f"{one:+9.2%}" for one in above["held_out"]]
        if both:
            shown += [f"{statistics.fmean(one):+9.2%}" for one in above.values()]
        lines.append("".join([f"{way:24}", *cells, *shown]))
    one = runs[0]
    what = f"{one['workers']} workers, {one['n_parameters']:,} parameters, {one['steps']} steps"
    lines.append(f"{what} of {one['batch']} x {one['context']} bytes each")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
