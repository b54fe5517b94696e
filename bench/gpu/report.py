"""The report of `make gpu-check` in words and tables."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def in_words(report: dict[str, Any]) -> str:
    """Return the report as Markdown."""
    machine = report["machine"]
    lines = ["# CUDA tensors over shoal", ""]
    lines += [f"- {name}: {value}" for name, value in machine.items()]
    lines += _correct(report.get("correct", {}))
    lines += _speed(report.get("speed", {}))
    lines += _overlap(report.get("overlap", {}))
    lines += _local(report.get("local", {}))
    return "\n".join(lines) + "\n"


def _correct(by_size: dict[str, dict[str, str]]) -> Iterable[str]:
    if not by_size:
        return
    yield from ("", "## Is it right?", "", "| ranks, on one host unless said | passed | failed |")
    yield "|---|---|---|"
    for size, checks in by_size.items():
        failed = [name for name, why in checks.items() if why]
        yield f"| {size} | {len(checks) - len(failed)} | {', '.join(failed) or 'none'} |"
    for size, checks in by_size.items():
        for name, why in checks.items():
            if why:
                yield from ("", f"{name}, {size} ranks:", "", "```", why.strip(), "```")


def _speed(by_size: dict[str, list[dict[str, Any]]]) -> Iterable[str]:
    for size, rows in by_size.items():
        yield from ("", f"## How fast is it? {size} ranks share the device", "")
        if errors := _errors(rows):
            yield from errors
            continue
        yield "| collective | bytes | shoal, us | Gloo, us | Gloo / shoal | caller is held, us |"
        yield "|---|---|---|---|---|---|"
        for ours, theirs in zip(rows[::2], rows[1::2], strict=True):
            beside = f"{theirs['us']:.0f}" if "us" in theirs else theirs["refused"]
            have_both = "us" in theirs and "us" in ours
            times = f"{theirs['us'] / ours['us']:.2f}" if have_both else ""
            own = f"{ours['us']:.0f}" if "us" in ours else ours["refused"]
            held = f"{ours['start_us']:.0f}" if "us" in ours else ""
            name = f"{ours['collective']} | {ours['bytes']}"
            yield f"| {name} | {own} | {beside} | {times} | {held} |"


def _errors(rows: list[dict[str, Any]]) -> list[str]:
    if not any("error" in row for row in rows):
        return []
    return ["```", *(str(row.get("error", "")) for row in rows), "```"]


def _overlap(by_size: dict[str, list[dict[str, Any]]]) -> Iterable[str]:
    if not by_size:
        return
    yield from ("", "## A step of DDP: what hides behind backward?", "")
    yield "| ranks | backend | gradients, MiB | compute, ms | communicate, ms | step, ms | hidden |"
    yield "|---|---|---|---|---|---|---|"
    for size, rows in by_size.items():
        for row in rows:
            if "error" in row:
                yield f"| {size} | {row['error'].splitlines()[-1]} | | | | | |"
                continue
            times = f"{row['compute_ms']:.1f} | {row['communicate_ms']:.1f} | {row['step_ms']:.1f}"
            name = f"{size} | {row['backend']} | {row['gradient_bytes'] / 2**20:.0f}"
            yield f"| {name} | {times} | {row['hidden_of_what_could_be']:.0%} |"


def _local(by_hosts: dict[str, dict[str, Any]]) -> Iterable[str]:
    for name, found in by_hosts.items():
        yield from ("", f"## GPUs of a host among themselves: hosts x GPUs of each, {name}", "")
        if "skipped" in found:
            yield f"SKIPPED: {found['skipped']}. NCCL in a host was not run in this shape."
            continue
        failed = {check: why for check, why in found["checks"].items() if why}
        yield f"{len(found['checks']) - len(failed)} checks passed; failed: {len(failed)}"
        for check, why in failed.items():
            yield from ("", f"{check}:", "", "```", why.strip(), "```")
        if errors := _errors(found["speeds"]):
            yield from errors
            continue
        yield from (
            "",
            "| all_reduce, bytes | with NCCL in the host, us | without, us | without / with |",
        )
        yield "|---|---|---|---|"
        for row in found["speeds"]:
            times = f"{row['with_us']:.0f} | {row['without_us']:.0f}"
            yield f"| {row['bytes']} | {times} | {row['without_us'] / row['with_us']:.2f} |"
