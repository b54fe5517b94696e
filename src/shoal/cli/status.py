"""`shoal status`: what a server does for the job whose key this is."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from shoal.plan.text import counted, show_bytes

if TYPE_CHECKING:
    from shoal.cli.options import Subparsers

_DESCRIPTION: Final = """
Ask a server (HOST or HOST:PORT) what it does for the job whose key SHOAL_KEY_FILE or SHOAL_KEY
holds: its views, how much goes through and how much could, how many calls are in flight, for which
workers they wait, and what the planner says of each kind of call: by whom it is reduced, whether it
is bandwidth-bound, which link is the bottleneck, and what another server would bring. Of other jobs
it tells how many there are.
"""


def add_to(subparsers: Subparsers) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        *("status",), help="say what a server does for a job", description=_DESCRIPTION
    )
    parser.add_argument("server", metavar="HOST[:PORT]")
    parser.add_argument("--json", action="store_true", help="print what it tells as it is")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Ask, and print."""
    import json

    from shoal.group.pool.addresses import parse_address
    from shoal.group.pool.ask import ask

    address = parse_address(args.server, "shoal status")
    told = ask(address, os.environ)
    if args.json:
        sys.stdout.write(json.dumps(told, indent=2) + "\n")
        return 0
    state = "draining" if told["is_draining"] else "ready"
    sys.stdout.write(
        f"{address}: shoal {told['version']}, {state}; serves {told['n_jobs']} of at most "
        f"{counted(told['most_jobs'], 'job')}, {told['memory_bytes'] >> 20} MiB for each view\n"
    )
    for view in told["views"]:
        sys.stdout.write("".join(f"{line}\n" for line in _lines(view)))
    for call in told.get("calls", ()):
        sys.stdout.write(f"view {call['view']}, {call['kind']}: {call['how']}\n")
    if not told["views"]:
        sys.stdout.write("nothing is served to this job\n")
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
        yield "  its state cannot be read: a thread holds it"
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
        return f"{text}; how fast its link is nobody has said (SHOAL_LINK)"
    return f"{text}: {max(into, out) / link:.0%} of its link's {link:.0f} Mbit/s"
