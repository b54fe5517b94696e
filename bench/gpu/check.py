"""Test and measure CUDA tensors on a machine with a GPU: `make gpu-check`.

Several processes share the first GPU. If there are several GPUs, the part `local` gives each GPU
its own process. Without a GPU the exit status is 77, which means skipped; 1 means that a check or a
measurement failed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import ranks
import torch
from report import in_words

HERE = Path(__file__).parent
SKIPPED = 77
PARTS = ("correct", "speed", "overlap", "local")


def main() -> int:
    """Run the selected parts, print their report, and return the exit status."""
    options = _options()
    if options.device == "cuda" and not torch.cuda.is_available():
        print(f"gpu-check: SKIPPED, no GPU here: torch {torch.__version__} finds no CUDA device")
        return SKIPPED
    report: dict[str, Any] = {"machine": _machine(options.device)}
    if "correct" in options.only:
        how = {"device": options.device, "longest": options.longest}
        report["correct"] = {str(size): _failures("correct", size, how) for size in options.ranks}
        how["apart"] = True
        report["correct"] |= {
            f"{size} on as many hosts": _failures("correct", size, how) for size in options.hosts
        }
    if "speed" in options.only:
        sizes = [n for n in options.bytes if n]
        how = {"device": options.device, "sizes": sizes, "seconds": options.seconds}
        report["speed"] = {
            str(size): _slowest(ranks.run("speed", "speeds", size, 600, **how))
            for size in options.ranks
            if size in (2, 4, 8)
        }
    if "overlap" in options.only:
        how = {"device": options.device, "width": 2048, "batch": 4096, "n_steps": 10}
        report["overlap"] = {
            str(size): _slowest(ranks.run("overlap", "steps", size, 300, **how))
            for size in options.ranks
            if size in (2, 4)
        }
    if "local" in options.only:
        report["local"] = _local(options)
    words = in_words(report)
    print(words)
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "report.json").write_text(json.dumps(report, indent=1) + "\n")
        (options.out / "report.md").write_text(words)
    return int(_is_wrong(report))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    listed = lambda text: [int(each) for each in text.split(",")]  # noqa: E731
    sharing = "numbers of ranks that share the GPU, such as 2,4"
    parser.add_argument("--ranks", type=listed, default=[2, 3, 4, 5, 6, 7, 8], help=sharing)
    apart = "numbers of ranks that each count as a separate host"
    parser.add_argument("--hosts", type=listed, default=[2, 4], help=apart)
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(PARTS))
    parser.add_argument("--device", default="cuda", help="cpu tests this program without a GPU")
    parser.add_argument("--out", type=Path, help="a folder for report.json and report.md")
    longest = (4 << 20) + 17  # four whole pieces, and a part of one
    parser.add_argument("--longest", type=int, default=longest, help="elements of long tensors")
    parser.add_argument("--seconds", type=float, default=0.3, help="time for each row of speeds")
    parser.add_argument("--gpus", type=int, help="GPUs with one process each; default all")
    kib = [4, 64, 1 << 10, 16 << 10, 64 << 10, 256 << 10]
    parser.add_argument("--bytes", type=listed, default=[n << 10 for n in kib])
    return parser.parse_args()


def _local(options: argparse.Namespace) -> dict[str, Any]:
    """Check and time NCCL inside hosts, and return the results by numbers of hosts and GPUs.

    All hosts are this machine under several names. A shape that needs more GPUs is skipped.
    """
    n_gpus = torch.cuda.device_count() if options.gpus is None else options.gpus
    found: dict[str, Any] = {}
    for n_hosts, n_each in ((1, 2), (2, 2), (2, 4), (1, 8)):
        name = f"{n_hosts} x {n_each}"
        if n_hosts * n_each > n_gpus:
            found[name] = {"skipped": f"it takes {n_hosts * n_each} GPUs, and here are {n_gpus}"}
            continue
        how = {"device": options.device, "n_hosts": n_hosts, "longest": options.longest}
        sizes = [n for n in options.bytes if n >= 4 << 20]
        size = n_hosts * n_each
        failed = _failures("local", size, how)
        how |= {"sizes": sizes, "seconds": options.seconds}
        speeds = ranks.run("local", "speeds", size, 300, **how)
        found[name] = {"checks": failed, "speeds": _slowest(speeds)}
    return found


def _failures(module: str, size: int, how: dict[str, Any]) -> dict[str, str]:
    """Run a module's checks; return the errors of all ranks for each check, or "" if it passed."""
    found = ranks.run(module, "checks", size, 240, **how)
    found += ranks.run(module, "lost_peer", size, 60, **how)[:-1]
    failed: dict[str, str] = {}
    for at, each in enumerate(found):
        for name, why in each.items():
            failed[name] = failed.get(name, "") + (f"rank {at % size}: {why}\n" if why else "")
    return failed


def _slowest(found: list[Any]) -> list[dict[str, Any]]:
    """Return each row with its largest times over the ranks, or the errors of ranks that failed."""
    wrong = [each for each in found if isinstance(each, dict)]
    if wrong:
        return wrong
    return [
        {
            key: max(row[key] for row in rows) if isinstance(value, float) else value
            for key, value in rows[0].items()
        }
        for rows in zip(*found, strict=True)
    ]


def _is_wrong(report: dict[str, Any]) -> bool:
    failed = any(why for each in report.get("correct", {}).values() for why in each.values())
    rows = [*report.get("speed", {}).values(), *report.get("overlap", {}).values()]
    local = [each for each in report.get("local", {}).values() if "skipped" not in each]
    failed |= any(why for each in local for why in each["checks"].values())
    rows += [each["speeds"] for each in local]
    return failed or any("error" in row for each in rows for row in each)


def _machine(device: str) -> dict[str, Any]:
    import shoal

    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=HERE,
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()
    return {
        "device": torch.cuda.get_device_name(0) if device == "cuda" else device,
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "shoal": shoal.__version__,
        "commit": commit,
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "command": " ".join([Path(sys.executable).name, *sys.argv]),
    }


if __name__ == "__main__":
    sys.exit(main())
