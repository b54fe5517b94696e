"""The values that newcomers and members write for each other at a door (door.py).

A newcomer writes its announcement under a random id, and waits for the answer: a refusal, or an
invitation to the meeting where the new group forms.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Final, NamedTuple

from shoal.engine import HANDSHAKE_VERSION
from shoal.rendezvous.packing import field, seal, text_field, unpack

_KIND: Final = b"shoal/nw"
_ANSWER_KIND: Final = b"shoal/an"
N_ID_BYTES: Final = 16
NEWCOMER: Final = "newcomer"
GONE: Final = b"gone"
"""The value of `here_key` for a newcomer that was lost before it reached the meeting."""

_DAMAGED: Final = "its announcement is damaged, or of another version of shoal"


def own_version() -> str:
    """Return this process's version of shoal."""
    return str(sys.modules["shoal"].__version__)


def announcement_key(number: str) -> str:
    """Return the store key of a newcomer's announcement; `number` is its id."""
    return f"{NEWCOMER}/{number}"


def answer_key(number: str) -> str:
    """Return the store key of the answer to a newcomer."""
    return f"answer/{number}"


def here_key(number: str) -> str:
    """Return the key, in a meeting's part of the store, by which a newcomer checks in."""
    return f"here/{number}"


class Announcement(NamedTuple):
    """A process that asks to be let in.

    Args:
        shoal: its version of shoal.
        group: the name of the group that it wants to enter.
        digest: of its settings.
    """

    shoal: str
    group: str
    host_label: str
    digest: bytes

    def encode(self) -> bytes:
        """Return the announcement as a value for the store."""
        texts = b"".join(map(text_field, (self.shoal, self.group, self.host_label)))
        return seal(_KIND, HANDSHAKE_VERSION, texts + field(self.digest))


# Returns why the group refuses a process; empty: it does not.
Check = Callable[[Announcement], str]


def judge(value: bytes, check: Check) -> tuple[str, str]:
    """Return the host name in an announcement, and why the process is refused; empty: it is not."""
    try:
        data = unpack(_KIND, value)
        found = Announcement(data.text(), data.text(), data.text(), data.field())
        data.end()
    except ValueError:
        return "", _DAMAGED
    return found.host_label, check(found)


class Answer(NamedTuple):
    """The answer to a newcomer: a refusal, or the address and name of a meeting."""

    refusal: str = ""
    address: str = ""
    uuid: str = ""

    def encode(self) -> bytes:
        """Return the answer as a value for the store."""
        return seal(_ANSWER_KIND, HANDSHAKE_VERSION, b"".join(map(text_field, self)))


def decode_answer(value: bytes) -> Answer:
    """Return the answer in this value; ValueError if damaged or of another version."""
    data = unpack(_ANSWER_KIND, value)
    found = Answer(data.text(), data.text(), data.text())
    data.end()
    return found
