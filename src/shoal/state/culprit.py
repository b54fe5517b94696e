"""Names the ranks that hold up a job, from the states that its ranks wrote."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from shoal.errors import UsageError
from shoal.limits import FIRST_NAMED_KEY, LAST_FINISHED
from shoal.plan.text import ranks_of
from shoal.state.document import VERSION, WORDS
from shoal.state.text import group_name, named


def read(paths: Iterable[Path]) -> list[dict[str, Any]]:
    """Read the states in these files; UsageError names a file that is not a state."""
    states = []
    for path in paths:
        try:
            state = json.loads(path.read_bytes())
        except OSError as error:
            raise UsageError(f"cannot read {path}: {error.strerror}") from None
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{path} is not JSON: {error}; give the .json files") from None
        version = state.get("shoal_dump") if isinstance(state, dict) else None
        if version != VERSION:
            what = "is not a state of shoal" if version is None else f"has version {version}"
            raise UsageError(f"{path} {what}; this shoal reads version {VERSION}")
        states.append({**state, "text_file": str(path.with_suffix(".txt"))})
    return states


def verdict(states: Sequence[dict[str, Any]]) -> str:
    """Describe which rank waits for which, in a few sentences for each world."""
    worlds: defaultdict[str, dict[int, dict[str, Any]]] = defaultdict(dict)
    for state in sorted(states, key=lambda state: state["taken_at_s"]):
        for world in state["worlds"]:
            found = {**world, "threads": state["threads"], "text_file": state.get("text_file")}
            before = worlds[world["epoch"]].get(world["rank"])
            # Of a rank's states, keep the last one with calls in flight.
            if before is None or _in_flight(found) or not _in_flight(before):
                worlds[world["epoch"]][world["rank"]] = found
    if not worlds:
        return "no rank was in a group\n"
    cases = [_Case(by_rank) for _, by_rank in sorted(worlds.items())]
    return "\n".join("\n".join(case.sentences()) + "\n" for case in cases)


def _in_flight(world: dict[str, Any]) -> bool:
    return any(group["in_flight"] for group in world["groups"])


class _MissingCall(NamedTuple):
    """A call that one rank has not made, and the ranks that wait in it."""

    rank: int
    group: dict[str, Any]
    call: dict[str, Any]
    waiting: tuple[int, ...]


class _Case:
    """One world, from the states of its ranks."""

    def __init__(self, worlds: Mapping[int, dict[str, Any]]) -> None:
        self._worlds = worlds
        self._ranks = next(iter(worlds.values()))["ranks"]
        self._groups: defaultdict[str, dict[int, dict[str, Any]]] = defaultdict(dict)
        for rank, world in worlds.items():
            for group in world["groups"]:
                self._groups[group["id"]][rank] = group

    def sentences(self) -> Iterator[str]:
        size = len(self._ranks)
        silent = [rank for rank in range(size) if rank not in self._worlds]
        heading = f"{len(self._worlds)} of {size} ranks reported"
        yield f"{heading}; there is no report from {ranks_of(silent)}" if silent else heading
        if not any(_in_flight(world) for world in self._worlds.values()):
            files = [world["text_file"] for world in self._worlds.values() if world["text_file"]]
            look = f": look at the stacks in {', '.join(files[:4])}" if files else ""
            yield f"no rank that reported had a call in flight{look}"
            return
        yield from self._mismatches()
        missing_calls = list(self._missing_calls())
        for missing in missing_calls:
            yield self._describe(missing)
        yield from self._absent(silent)
        yield from self._waits({missing.rank for missing in missing_calls})

    def _mismatches(self) -> Iterator[str]:
        for group in self._groups.values():
            for by_rank in _calls(group).values():
                kinds: defaultdict[str, list[int]] = defaultdict(list)
                for rank, call in by_rank.items():
                    kinds[call["agreement"]].append(rank)
                if len(kinds) > 1:
                    parts = [
                        f"{ranks_of(r)} called {by_rank[r[0]]['what']}" for r in kinds.values()
                    ]
                    name = group_name(next(iter(group.values())))
                    yield f"the ranks made different calls in {name}: {', but '.join(parts)}"

    def _missing_calls(self) -> Iterator[_MissingCall]:
        """Yield by group and rank the first call that the rank has not made and others wait in."""
        for group in self._groups.values():
            calls = sorted(
                _calls(group).items(), key=lambda item: min(c["serial"] for c in item[1].values())
            )
            made = next((here for here in group.values() if here["is_made"]), None)
            for rank in made["members"] if made is not None else ():
                for key, by_rank in calls:
                    one = next(iter(by_rank.values()))
                    if rank in self._worlds and _missed(group.get(rank), key, rank, by_rank):
                        yield _MissingCall(rank, made or {}, one, tuple(by_rank))
                        break

    def _describe(self, missing: _MissingCall) -> str:
        group = self._groups[missing.group["id"]].get(missing.rank)
        longest_s = max(
            call["age_s"]
            for rank in missing.waiting
            for call in self._groups[missing.group["id"]][rank]["in_flight"]
            if call["key"] == missing.call["key"]
        )
        text = (
            f"{named(missing.rank, self._ranks)} has not made {missing.call['what']} "
            f"(call {missing.call['serial']} in {group_name(missing.group)}), which "
            f"{ranks_of(missing.waiting)} made up to {longest_s:.1f} s ago"
        )
        if group is None or not group["is_made"]:
            text += "; it has not made that group, or has closed it"
        elif group["finished"]:
            text += f"; its last call to end there was {group['finished'][-1]['what']}"
        else:
            text += "; no call has ended there"
        threads = self._worlds[missing.rank]["threads"]
        at = next((thread["at"] for thread in threads if thread["name"] == "MainThread"), "")
        if at:
            text += f". Its main thread was at {at}"
        return text

    def _absent(self, silent: Sequence[int]) -> Iterator[str]:
        """Name the ranks without a report that have not joined a call in which others wait."""
        for group in self._groups.values():
            for by_rank in _calls(group).values():
                for rank in silent:
                    missed = [
                        other
                        for other, call in by_rank.items()
                        if any(w["rank"] == rank and not w["in_call"] for w in call["waits"])
                    ]
                    if missed:
                        yield (
                            f"{named(rank, self._ranks)} has no report, and {ranks_of(missed)} "
                            f"received nothing from it in {by_rank[missed[0]]['what']}: it has not "
                            "made the call, or is stopped or cut off"
                        )

    def _waits(self, absent: set[int]) -> Iterator[str]:
        """Name the ranks that each rank waits for, and the ranks at the ends of these chains."""
        edges: dict[int, set[int]] = {}
        for rank, world in self._worlds.items():
            waits = [w for g in world["groups"] for call in g["in_flight"] for w in call["waits"]]
            blamed = [wait for wait in waits if wait["is_blamed"]]
            if not blamed:
                continue
            edges[rank] = {wait["rank"] for wait in blamed}
            longest = max(blamed, key=lambda wait: wait["since_s"])
            yield (
                f"rank {rank} waits for {ranks_of(sorted(edges[rank]))}, up to "
                f"{longest['since_s']:.1f} s: {WORDS[longest['why']]}"
            )
        ends = Counter(end for rank in edges for end in _reached(edges, rank) if end not in edges)
        if ends:
            most = max(ends.values())
            culprits = sorted(end for end, n in ends.items() if n == most)
            everyone = "all of them wait" if most == len(edges) else f"{most} of them wait"
            yield f"{everyone}, directly or through others, for {ranks_of(culprits)}"
        elif edges and not absent:
            rings = sorted(rank for rank in edges if rank in _reached(edges, rank))
            yield (
                f"{ranks_of(rings)} wait for each other: look at the queues and stalls of their "
                "links in the texts"
            )


def _calls(group: Mapping[int, dict[str, Any]]) -> dict[str, dict[int, dict[str, Any]]]:
    """Return the calls in flight in one group, by key, then rank."""
    calls: defaultdict[str, dict[int, dict[str, Any]]] = defaultdict(dict)
    for rank, here in sorted(group.items()):
        for call in here["in_flight"]:
            if not call["awaits_message"]:
                calls[call["key"]][rank] = call
    return calls


def _missed(group: dict[str, Any] | None, key: str, rank: int, by_rank: Mapping[int, Any]) -> bool:
    """True if a rank certainly has not made a call. Messages concern two ranks only."""
    if rank in by_rank or int(key, 16) >> 63:
        return False
    if group is None or not group["is_made"]:
        return True
    if int(key, 16) < FIRST_NAMED_KEY:
        return bool(group["last_number"] < int(key, 16))
    ended = [call["key"] for call in group["finished"]]
    is_all = len(ended) < LAST_FINISHED and group["n_in_flight_left_out"] == 0
    return is_all and key not in ended


def _reached(edges: Mapping[int, set[int]], start: int) -> set[int]:
    """Return the ranks that a rank waits for, directly or through others."""
    found: set[int] = set()
    ahead = [start]
    while ahead:
        new = edges.get(ahead.pop(), set()) - found
        found |= new
        ahead += new
    return found
