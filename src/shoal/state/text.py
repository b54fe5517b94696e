"""The state of a process as text, from the same data as the JSON file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from shoal.plan.text import counted, listed, ranks_of, show_bytes
from shoal.state.document import WORDS

_MOST_STEPS: Final = 24  # of a call; the JSON file has more
_MOST_NAMED: Final = 8


def text_of(state: dict[str, Any]) -> str:
    """Return the whole state as text for people."""
    return "\n".join(_lines(state)) + "\n"


def named(rank: int, ranks: Sequence[dict[str, str]]) -> str:
    """Return a rank and its host."""
    host = ranks[rank]["host"] if 0 <= rank < len(ranks) else ""
    return f"rank {rank} on {host}" if host else f"rank {rank}"


def group_name(group: dict[str, Any]) -> str:
    """Return a group's name, or its number if this rank has not made it."""
    return f"group {group['name']!r}" if group["name"] else f"group {group['id']}"


def _lines(state: dict[str, Any]) -> Iterator[str]:
    versions = ", ".join(f"{what} {which}" for what, which in state["versions"].items() if which)
    yield f"shoal on {state['host']}, process {state['pid']}, {state['taken_at']}: {state['why']}"
    yield f"{versions}; {state['fold_isa']}"
    for name, value in state["settings"].items():
        yield f"{name}={value}"
    for world in state["worlds"]:
        yield ""
        yield from _world(world)
    yield ""
    yield "wake-ups: " + ", ".join(f"{n} {what}" for what, n in state["wakeups"].items())
    for thread in state["threads"]:
        yield f"thread {thread['name']}"
        yield from (f"  {line}" for line in thread["stack"])


def _world(world: dict[str, Any]) -> Iterator[str]:
    ranks = world["ranks"]
    yield f"world {world['epoch']}: {named(world['rank'], ranks)} of {len(ranks)}"
    if world["is_stuck"]:
        yield "  its state cannot be read: a thread holds its lock"
    if world["is_closed"]:
        yield "  closed"
    for group in world["groups"]:
        yield from _group(group, ranks)
    for peer in world["peers"]:
        if peer["state"] != "self":
            yield f"  {named(peer['rank'], ranks)}{_channel(peer)}: {_peer(peer)}"
    if "staging" in world:
        staging = {what: show_bytes(n) for what, n in world["staging"].items()}
        yield (
            f"  staging: {staging['used_bytes']} used, {staging['reserved_bytes']} reserved, at "
            f"most {staging['peak_bytes']} used so far, of {staging['ceiling_bytes']}; scratch: "
            f"{show_bytes(world['scratch_bytes'])}"
        )


def _channel(entry: dict[str, Any]) -> str:
    """Name the channel, unless it is the first."""
    return f" over channel {entry['channel']}" if "channel" in entry else ""


def _group(group: dict[str, Any], ranks: Sequence[dict[str, str]]) -> Iterator[str]:
    name = group_name(group)
    if not group["is_made"]:
        yield f"  {name}: not made here yet, but others have made calls on it"
    else:
        members = listed(group["members"], _MOST_NAMED)
        n_made, n_now = counted(group["n_calls"], "call"), len(group["in_flight"])
        yield f"  {name} of ranks {members}: {n_made} made, {n_now} in flight"
    if group["ended"]:
        yield f"    has ended: {group['ended']}"
    for call in group["in_flight"]:
        yield from _call(call, ranks)
    if group["n_in_flight_left_out"]:
        yield f"    {counted(group['n_in_flight_left_out'], 'call')} more in flight"
    if group["made_by_others"]:
        by = sorted({rank for call in group["made_by_others"] for rank in call["by"]})
        n_made = counted(len(group["made_by_others"]), "call")
        yield f"    {n_made} made by {ranks_of(by)} and not here"
    if group["finished"]:
        yield f"    the last call that ended: {group['finished'][-1]['what']}"


def _call(call: dict[str, Any], ranks: Sequence[dict[str, str]]) -> Iterator[str]:
    left = "" if call["left_s"] is None else f", {max(0.0, call['left_s']):.1f} s left"
    n_over, n_steps = call["n_steps"] - call["n_steps_left"], call["n_steps"]
    name = f"call {call['serial']}, {call['what']}, {show_bytes(call['n_bytes'])}{_channel(call)}"
    yield f"    {name}: made {call['age_s']:.1f} s ago{left}; {n_over} of {n_steps} steps are over"
    if call["awaits_message"]:
        yield "      waits for a message to this rank"
    if call["scratch"] == "awaited":
        yield f"      waits for {show_bytes(call['scratch_bytes'])} of scratch, which others hold"
    for wait in call["waits"]:
        absent = "" if wait["in_call"] else "; it has not joined this call"
        also = "waits" if wait["is_blamed"] else "also waits"
        yield (
            f"      {also} for {named(wait['rank'], ranks)}, {wait['since_s']:.1f} s: "
            f"{WORDS[wait['why']]}{absent}"
        )
    for step in call["steps"][:_MOST_STEPS]:
        yield f"        {_step(step)}"
    n_more = len(call["steps"][_MOST_STEPS:]) + call["n_steps_left_out"]
    if n_more > 0:
        yield f"        {n_more} more steps"


def _step(step: dict[str, Any]) -> str:
    what = step["kind"]
    if "peer" in step:
        what += f" {'to' if what == 'send' else 'from'} rank {step['peer']}"
    counts = [f"{step['done']} of {step['n_segments']} segments done", f"{step['ready']} ready"]
    counts += [
        f"{step[key]} {key}" for key in ("started", "granted", "arrived", "offered") if key in step
    ]
    return f"step {step['step']}, {what}: {', '.join(counts)}; awaits {step['awaits']}"


def _peer(peer: dict[str, Any]) -> str:
    parts = [peer["state"] if peer["link"] == "none" else f"{peer['link']}, {peer['state']}"]
    if peer["since_received_s"] is not None:
        parts.append(f"last frame {peer['since_received_s']:.1f} s ago")
    parts += [
        f"{way} {show_bytes(peer[f'n_bytes_{way}'])} and {peer[f'n_frames_{way}']} frames "
        f"(now {show_bytes(round(peer[f'bytes_{way}_per_s']))}/s)"
        for way in ("out", "in")
    ]
    if peer["n_queued"]:
        parts.append(f"{peer['n_queued']} frames queued, {show_bytes(peer['queued_bytes'])}")
    stalls = [f"{n} {what.replace('_', ' ')}" for what, n in peer["stalls"].items() if n]
    if stalls:
        parts.append(f"stalls: {', '.join(stalls)}")
    parts += filter(None, map(_path, range(len(peer["paths"])), peer["paths"]))
    parts += [
        f"rtt {socket['rtt_us'] / 1000:.1f} ms, window {socket['congestion_window']} segments, "
        f"{socket['n_unacked']} unacknowledged, {socket['n_retransmits']} sent again, "
        f"{show_bytes(socket['unsent_bytes'])} unsent"
        for socket in peer["sockets"]
    ]
    return "; ".join(parts)


def _path(number: int, path: dict[str, Any]) -> str:
    """Describe a path; empty if it is open and was never lost, or will never be connected."""
    times = f", reconnected {path['n_reconnects']} times" if path["n_reconnects"] else ""
    since = f" for {path['lost_s']:.1f} s" if path["lost_s"] is not None else ""
    match path["state"]:
        case "unmade":
            return f"path {number} not connected yet"
        case "dialled":
            return f"path {number} connecting for the first time{since}"
        case "lost":
            return f"path {number} lost{since}, reconnecting (it {path['why_lost']}){times}"
    return f"path {number}{times} (it {path['why_lost']})" if times else ""
