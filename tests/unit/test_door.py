"""Visits to a door that fail, and meetings that end for processes without a record there."""

import contextlib
import socket

import pytest

from shoal.errors import PeerLost, TimedOut
from shoal.rendezvous.door import Door, visit
from shoal.rendezvous.store.client import TcpStoreClient


def test_a_visitor_that_asks_after_anothers_loss_does_not_wait() -> None:
    with Door({}) as door, contextlib.ExitStack() as visits:

        def enter() -> TcpStoreClient:
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


def test_a_stopped_process_is_named_by_the_address_of_its_door() -> None:
    with socket.create_server(("127.0.0.1", 0)) as stopped:  # its kernel still accepts connections
        address = f"127.0.0.1:{stopped.getsockname()[1]}"
        with pytest.raises(TimedOut) as raised, visit(address, "meeting", 60, {}, silent_s=0.1):
            pass
    assert str(raised.value).endswith(": is it stopped, or its host cut off?")
    assert f"the process at {address} did not answer within 0.1 s" in str(raised.value)
    assert "MASTER_ADDR" not in str(raised.value)
