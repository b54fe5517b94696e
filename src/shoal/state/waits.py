"""The peers that a call waits for, and why: one entry per peer and reason."""

from __future__ import annotations

from typing import Any, Final

WORDS: Final = {
    "data": "no data has come from it",
    "grant": "it has not granted the next segment",
    "credit": "it has not returned room for small messages",
    "slot": "it holds all slots of shared memory that it may hold",
    "consumed": "it has not read the segments in shared memory",
    "link": "its link does not take what is queued",
    "earlier calls": "it is far behind, in calls before this one",
    "lost peer": "it is gone",
}
"""The reasons for which a step waits for its peer, by the native core's word.

Three more words blame no peer: "turn" (another step of the call comes first), "scratch" (other
calls hold the memory) and "nothing" (the step is about to move).
"""


def waits_of(call: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the peers that a call waits for, those to blame first, then the longest wait.

    To blame are the peers that owe data; if none does, all peers that hold up a send. If some of
    these have not made the call, only they are to blame: the others may wait for the same ranks.
    """
    in_call = {peer["rank"]: peer["in_call"] for peer in call["peers"]}
    found: dict[tuple[int, str], dict[str, Any]] = {}
    for step in call["steps"]:
        if step["awaits"] not in WORDS:
            continue
        entry = found.setdefault(
            (step["peer"], step["awaits"]),
            {"rank": step["peer"], "why": step["awaits"], "since_s": 0.0, "n_steps": 0},
        )
        entry["since_s"] = max(entry["since_s"], step["since_s"])
        entry["n_steps"] += 1
        entry["in_call"] = in_call.get(step["peer"], False)
    waits = list(found.values())
    blamed = [wait for wait in waits if wait["why"] == "data"] or waits
    blamed = [wait for wait in blamed if not wait["in_call"]] or blamed
    for wait in waits:
        wait["is_blamed"] = wait in blamed
    return sorted(waits, key=lambda wait: (not wait["is_blamed"], -wait["since_s"], wait["rank"]))
