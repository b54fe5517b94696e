"""`shoal status`: show what a server does for a job.

Show what a server does for the job whose key is in SHOAL_KEY_FILE or SHOAL_KEY: the job's views,
their traffic, the rate of the server's link, the calls in flight, and the workers that these wait
for. Other jobs are only counted.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from typing import Any

from shoal.plan.text import counted, show_bytes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `shoal status`."""
    parser.add_argument("server", metavar="HOST[:PORT]", help="default port 7077")
    parser.add_argument("--json", action="store_true", help="print the server's answer as JSON")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    import json

    from shoal.group.pool.addresses import parse_address
    from shoal.group.pool.ask import ask

    address = parse_address(args.server, "the server's address")
    answer = ask(address, os.environ)
    if args.json:
        print(json.dumps(answer, indent=2))
        return 0
    state = "draining" if answer["is_draining"] else "ready"
    print(
        f"{address}: shoal {answer['version']}, {state}; serves {answer['n_jobs']} of at most "
        f"{counted(answer['most_jobs'], 'job')}, {answer['memory_bytes'] >> 20} MiB for each view"
    )
    for view in answer["views"]:
        print(*_lines(view), sep="\n")
    if not answer["views"]:
        print("nothing is served to this job")
    return 0


def _lines(view: dict[str, Any]) -> Iterator[str]:
    if "view" not in view:
        yield f"job {view['job']!r}: a view is forming (process {view['pid']})"
        return
    yield (
        f"job {view['job']!r}, view {view['view']}: server {view['rank'] + 1} of "
        f"{view['n_servers']}, {counted(view['n_workers'], 'worker')}, for {view['for_s']:g} s"
    )
    if "n_in_flight" not in view:
        yield "  its state cannot be read: a thread holds its lock"
        return
    yield f"  {_rates(view)}"
    waiting = f", {view['n_waiting_for_room']} more wait for room" * (
        view["n_waiting_for_room"] > 0
    )
    yield (
        f"  {counted(view['n_in_flight'], 'call')} in flight{waiting}; "
        f"{show_bytes(view['staging_bytes'])} held, {show_bytes(view['queued_bytes'])} to be sent"
    )
    yield f"  shares: {view['algorithm'] or 'no call yet'}"
    for wait in view["waits_for"]:
        who = f"worker {wait['rank']} ({wait['host']})"
        yield f"  waits for {who} for {wait['since_s']:g} s: {wait['why']}"


def _rates(view: dict[str, Any]) -> str:
    into, out, link = (
        8 * view[name] / 1e6 for name in ("bytes_in_per_s", "bytes_out_per_s", "link_bytes_per_s")
    )
    text = f"in {into:.1f} Mbit/s, out {out:.1f} Mbit/s"
    if not link:
        return f"{text}; the rate of its link is unknown (SHOAL_LINK)"
    return f"{text}: {max(into, out) / link:.0%} of its link's {link:.0f} Mbit/s"
