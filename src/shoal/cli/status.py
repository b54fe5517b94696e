"""`shoal status`: what a server does for the job whose key this is."""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from shoal.cli.options import Subparsers

_DESCRIPTION: Final = """
Ask a server (HOST or HOST:PORT) what it does for the job whose key SHOAL_KEY_FILE or SHOAL_KEY
holds: its views, how much goes through, how many calls are in flight, and for which workers they
wait. Of other jobs it tells how many there are.
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
        f"{told['most_jobs']} jobs, {told['memory_bytes'] >> 20} MiB each\n"
    )
    for view in told["views"]:
        sys.stdout.write(_line(view))
    if not told["views"]:
        sys.stdout.write("nothing is served to this job\n")
    return 0


def _line(view: dict[str, Any]) -> str:
    if "view" not in view:
        return f"job {view['job']}: a view is forming (process {view['pid']})\n"
    head = (
        f"job {view['job']}, view {view['view']}: server {view['rank'] + 1} of "
        f"{view['n_servers']}, {view['n_workers']} workers, for {view['for_s']:g} s\n"
    )
    if "n_in_flight" not in view:
        return f"{head}  its state cannot be read: a thread holds it\n"
    rates = (f"{view[name] * 8 / 1e6:.1f}" for name in ("bytes_in_per_s", "bytes_out_per_s"))
    text = "  in {} Mbit/s, out {} Mbit/s".format(*rates)
    text += f"; {view['n_in_flight']} calls in flight, {view['staging_bytes'] >> 10} KiB held\n"
    text += f"  shares: {view['algorithm'] or 'no call yet'}\n"
    if view["waits_for"]:
        text += f"  waits for workers {', '.join(map(str, view['waits_for']))}\n"
    return head + text
