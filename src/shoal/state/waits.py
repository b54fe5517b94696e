"""For whom a call waits, and why: what its steps say, one entry for each peer."""

from __future__ import annotations

from typing import Any, Final

WORDS: Final = {
    "data": "no data has come from it",
    "grant": "it has not granted what is to be sent",
    "credit": "it has not given back room for small messages",
    "slot": "it holds all slots of shared memory that it may hold",
    "consumed": "it has not read what lies in shared memory for it",
    "link": "its link does not take what is queued",
    "earlier calls": "it is far behind, in calls before this one",
    "lost peer": "it is gone",
}
"""What a step awaits of its peer, by the word that the native core has for it.

Three more words blame nobody else: "turn" (another step of the call), "scratch" (memory that
other calls hold) and "nothing" (it is about to move).
"""


def waits_of(call: dict[str, Any]) -> list[dict[str, Any]]:
    """The peers that a call waits for, those to blame first, then by how long.

    To blame are those who owe data, or if none does, all that hold up what is to be sent; of these
    those who have not made the call, if there are any: others may wait for the same ranks.
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
