"""Train the same model over shoal and over Gloo, and compare times and losses.

Two worker processes on this machine train `train_lm.py` with the same seed, once per backend.

    python examples/demo.py                              # both: under two minutes on two cores
    python examples/demo.py --backends shoal --steps 50  # unknown options go to train_lm.py
"""

import argparse
import json
import math
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

TRAIN = Path(__file__).with_name("train_lm.py")

# Log ratio. On an idle machine, times without averaging differ by a few per cent between runs.
BUSY = 0.15

# More than the effect of another rounding order (with more than two workers), and far less than the
# effect of a gradient that was lost or counted twice.
TOLERANCE = 0.01

Result = dict[str, Any]

# Label, figure, factor to its unit, format.
ROWS = [
    ("time per step (ms)", "step_s", 1e3, ".1f"),
    ("  backward without averaging (ms)", "backward_alone_s", 1e3, ".1f"),
    ("  waiting for gradients (ms)", "wait_s", 1e3, ".1f"),
    ("  waiting, share of the step (%)", "wait_share", 1e2, ".1f"),
    ("tokens per second", "tokens_per_s", 1, ",.0f"),
    ("training loss (bits per byte)", "training_bits", 1, ".6f"),
    ("held-out loss (bits per byte)", "held_out_bits", 1, ".6f"),
]


def parse_args() -> tuple[argparse.Namespace, list[str]]:
    """Return this script's options, and the remaining options, for train_lm.py."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--backends", nargs="+", default=["shoal", "gloo"], metavar="NAME")
    parser.add_argument("--workers", type=int, default=2, help="processes (default: 2)")
    return parser.parse_known_args()


def train(backend: str, n_workers: int, options: list[str]) -> Result:
    """Return the figures of one run of train_lm.py over `backend`.

    Raises:
        ChildFailedError: a worker failed, and printed why. The others have been stopped.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "result.json")
        launch = ["--standalone", f"--nproc-per-node={n_workers}", str(TRAIN)]
        started = time.monotonic()
        torchrun.main([*launch, f"--backend={backend}", f"--result={path}", *options])
        result: Result = json.loads(path.read_text())
    result["wait_share"] = result["wait_s"] / result["step_s"]
    result["run_s"] = time.monotonic() - started
    return result


def table(results: list[Result]) -> str:
    """Return a column per run, and the ratio of the last run to the first."""
    names = [result["backend"] for result in results]
    ratio = f"{names[-1]}/{names[0]}" if len(results) > 1 else ""
    lines = ["".join([f"{'':36}", *(f"{name:>12}" for name in names), f"{ratio:>14}"]).rstrip()]
    for label, key, factor, form in ROWS:
        values = [result[key] * factor for result in results]
        last = f"{values[-1] / values[0]:.2f}" if ratio else ""
        cells = [f"{label:36}", *(f"{value:12{form}}" for value in values), f"{last:>14}"]
        lines.append("".join(cells).rstrip())
    return "\n".join(lines)


def agreement(a: Result, b: Result) -> str:
    """Compare the losses of two runs. With two workers they should be equal, as x + y is y + x."""
    steps = list(zip(a["losses"], b["losses"], strict=True))
    n_same = next((step for step, (x, y) in enumerate(steps) if x != y), len(steps))
    x, y = a["held_out_bits"], b["held_out_bits"]
    if n_same == len(steps) and x == y:
        return f"equal to the last bit, at each of {n_same} steps and held out"
    n_digits = 16 if x == y else max(0, math.floor(-math.log10(abs(x - y) / max(x, y))))
    return f"held out equal to {n_digits} digits; to the last bit in the first {n_same} steps"


def report(results: list[Result], n_workers: int) -> None:
    """Print the runs, the table and its interpretation."""
    first, last = results[0], results[-1]
    total_s = sum(result["run_s"] for result in results)
    print(
        f"\n{first['n_parameters'] / 1e6:.1f} M parameters, {n_workers} workers,"
        f" {len(first['losses'])} steps; {total_s:.0f} s in all\n\n{table(results)}"
    )
    print(f"\nBaseline bits per byte: 8 by guessing, {first['unigram_bits']:.2f} by frequency.")
    if len(results) > 1:
        print(f"Losses: {agreement(first, last)}.")
    if abs(math.log(last["backward_alone_s"] / first["backward_alone_s"])) > BUSY:
        print("Times of backward alone differ, so something else used the processor.")


def main() -> int:
    """Run, print, and return the exit status."""
    args, options = parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # per worker: they share the cores
    try:
        results = [train(backend, args.workers, options) for backend in args.backends]
    except ChildFailedError:
        print("demo: a run failed, for the reason above", file=sys.stderr)
        return 1
    except SignalException as signal:  # torchrun has stopped the workers
        print(f"\ndemo: stopped by {signal.sigval.name}", file=sys.stderr)
        return 128 + signal.sigval
    report(results, args.workers)
    learnt = [result["held_out_bits"] for result in results]
    if not math.isclose(min(learnt), max(learnt), rel_tol=TOLERANCE):
        print("demo: the runs learnt different models: one averages wrongly", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
