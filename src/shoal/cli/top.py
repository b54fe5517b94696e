"""`shoal top`: show what the ranks of a job do, once per second.

Show, for each rank of this user on this host that was started with SHOAL_MONITOR=1: the share of
time in which a call was in flight, the rates of its links, the calls in flight, and the ranks that
these wait for. With SHOAL_KEY_FILE and the address of a rank (rank 0 logs its own at
SHOAL_DEBUG=INFO), show the ranks of that job on all hosts instead. Ctrl-C ends it.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from shoal.errors import ShoalError, UsageError
from shoal.plan.text import counted, show_bytes

_PERIOD_S: Final = 1.0
_MOST_CALLS: Final = 4  # of a rank
_MOST_LINKS: Final = 8  # of a rank, by traffic
_HOME_AND_CLEAR: Final = "\x1b[H\x1b[2J"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `shoal top`."""
    where = "the address of any rank: show all ranks of its job"
    parser.add_argument("address", nargs="?", metavar="HOST:PORT", help=where)
    parser.add_argument("--once", action="store_true", help="print one screen and end")
    add = parser.add_mutually_exclusive_group().add_argument
    add("--json", action="store_true", help="print the answers of all ranks as JSON, once")
    add("--prometheus", action="store_true", help="print the numbers as Prometheus text, once")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    import json

    from shoal.state.prometheus import text_of

    read = _reader(args)
    if args.json or args.prometheus:
        documents = read()
        text = json.dumps(documents, indent=2) + "\n" if args.json else text_of(documents)
        sys.stdout.write(text)
        return 0
    before: dict[tuple[str, int], Mapping[str, Any]] = {}
    while True:
        worlds = read()
        shown = f"of the job at {args.address}" if args.address else "here"
        # A worker with servers is in another world with them, but it is one rank.
        n_ranks = len(worlds if args.address else {world.get("pid") for world in worlds})
        lines = [f"shoal top, {time.strftime('%H:%M:%S')}: {counted(n_ranks, 'rank')} {shown}"]
        if not worlds:
            lines.append("start a job on this host, as this user, with SHOAL_MONITOR=1")
        for world in worlds:
            on = f" on {world.get('host')}" if args.address else ""
            lines += _lines(world, before.get((world["world"], world["rank"]), {}), on)
        # Names of hosts come from other machines, and must not control the terminal.
        lines = ["".join(c if c.isprintable() else "?" for c in line) for line in lines]
        if sys.stdout.isatty() and not args.once:
            lines = [_HOME_AND_CLEAR + lines[0], *lines[1 : shutil.get_terminal_size().lines - 1]]
        print(*lines, sep="\n", flush=True)
        if args.once:
            return 0
        before = {(world["world"], world["rank"]): world for world in worlds}
        time.sleep(_PERIOD_S)


def _reader(args: argparse.Namespace) -> Callable[[], list[dict[str, Any]]]:
    """Return a function that reads the state of all ranks to show."""
    if not args.address:
        from shoal.state.monitor import read_all

        return read_all
    from shoal.rendezvous import job_key
    from shoal.rendezvous.door import parse_address
    from shoal.state.remote import Place, ask, places_of

    host, port = parse_address(args.address)
    key = job_key()
    if key is None:
        raise UsageError("ranks answer only holders of the job key: set SHOAL_KEY_FILE")
    places: list[Place] = []

    def read() -> list[dict[str, Any]]:
        if not places:
            [first] = ask([Place("", 0, host, host, port)], key)
            if "error" in first:
                raise ShoalError(f"the process at {args.address}: {first['error']}")
            places.extend(places_of(first))
        found = ask(places, key)
        answers = [one for one in found if "error" not in one]
        if not answers or any(one["world"] == places[0].world for one in answers):
            return found
        # The group has grown: its members answer at the same places, but with other ranks.
        places[:] = places_of(answers[0])
        return ask(places, key)

    return read


def _lines(world: Mapping[str, Any], before: Mapping[str, Any], where: str) -> list[str]:
    from shoal.state.remote import DAMAGED

    try:
        return list(_shown(world, before, where))
    except DAMAGED:
        return [f"rank {world['rank']}{where}: its numbers cannot be read"]


def _shown(world: Mapping[str, Any], before: Mapping[str, Any], where: str) -> Iterator[str]:
    name = f"rank {world['rank']}{where}" + (f", process {world['pid']}" if "pid" in world else "")
    if not world.get("is_readable"):
        yield f"{name}: {world.get('error', 'a thread holds its links')}"
        return
    since_s = world["counted_s"] - before.get("counted_s", 0.0)
    share = (world["busy_s"] - before.get("busy_s", 0.0)) / since_s if since_s else 0.0
    links, calls = world["links"], world["in_flight"]
    out, into = (sum(link[f"bytes_{way}_per_s"] for link in links) for way in ("out", "in"))
    yield (
        f"{name}: {share:.0%} of the time in calls, {len(calls)} of {world['n_calls']} in flight; "
        f"out {show_bytes(out)}/s, in {show_bytes(into)}/s"
    )
    for call in calls[:_MOST_CALLS]:
        yield f"  {call['what']}, {show_bytes(call['n_bytes'])}, begun {call['age_s']:.1f} s ago"
        for wait in call["waits"]:
            absent = "" if wait["in_call"] else "; it has not joined this call"
            peer = f"rank {wait['rank']} on {wait['host']}"
            yield f"    waits for {peer}, {wait['since_s']:.1f} s: {wait['why']}{absent}"
    if len(calls) > _MOST_CALLS:
        yield f"  {counted(len(calls) - _MOST_CALLS, 'call')} more"
    busiest = sorted(links, key=lambda link: -link["bytes_out_per_s"] - link["bytes_in_per_s"])
    for link in busiest[:_MOST_LINKS]:
        yield f"  {_link(link)}"
    if len(links) > _MOST_LINKS:
        yield f"  {counted(len(links) - _MOST_LINKS, 'link')} more"
    if stalls := ", ".join(f"{n} {name}" for name, n in world["stalls"].items() if n):
        yield f"  stalls: {stalls}"


def _link(link: Mapping[str, Any]) -> str:
    more = "" if link["rtt_us"] is None else f", round trip {link['rtt_us'] / 1e3:.1f} ms"
    more += f", {link['n_retransmits']} retransmitted" * (link["n_retransmits"] > 0)
    more += f", {counted(link['n_paths_lost'], 'path')} lost" * (link["n_paths_lost"] > 0)
    more += f", {link['state']}" * (link["state"] != "alive")
    return (
        f"{link['kind']} to rank {link['rank']} on {link['host']}: "
        f"out {show_bytes(link['bytes_out_per_s'])}/s ({show_bytes(link['bytes_out'])} in all), "
        f"in {show_bytes(link['bytes_in_per_s'])}/s ({show_bytes(link['bytes_in'])} in all){more}"
    )
