"""When the meeting at a door ends for the processes that have no record there yet."""

import contextlib

import pytest

from shoal.errors import PeerLost
from shoal.rendezvous.door import Door, Visit, visit


def test_a_visitor_that_asks_after_another_was_lost_does_not_wait() -> None:
    with Door({}) as door, contextlib.ExitStack() as visits:

        def enter() -> Visit:
            return visits.enter_context(visit(door.address, "meeting", 60, {}, silent_s=60))

        door.open("meeting")
        early = enter()
        early.set("here/0", b"")
        with (
            contextlib.suppress(KeyError),
            visit(door.address, "meeting", 60, {}, silent_s=60) as lost,
        ):
            lost.set("here/1", b"")
            raise KeyError
        for asking in (early, enter()):
            with pytest.raises(PeerLost):
                asking.get("size", 60)
