"""Point to point: receives match messages by rank and tag, or the first from any rank."""

from typing import Any

import numpy as np
import pytest
from process.ranks import on_ranks
from process.stage import pretend_hosts

import shoal


def ones(n_elems: int, value: float = 1.0) -> Any:
    return np.full(n_elems, value, np.float32)


@pytest.mark.parametrize(("size", "ranks_per_host"), [(2, 2), (3, 3), (3, 1)])
@on_ranks()
def test_messages_arrive_by_source_and_tag(size: int, ranks_per_host: int) -> None:
    pretend_hosts(ranks_per_host)
    with shoal.init() as group:
        pass_round_the_ring(group)
        receive_by_tag(group)
        group.barrier()


def pass_round_the_ring(group: shoal.Group) -> None:
    right, left = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    for length in (0, 1, 1009, 40_001, 2_000_003):
        into = ones(length, -1.0)
        sending = group.send(ones(length, group.rank), right, work=True)
        group.recv(into, left)
        assert sending is not None
        sending.wait()
        assert (into == left).all(), length


def receive_by_tag(group: shoal.Group) -> None:
    """Receive in another order than the messages are sent."""
    if group.rank == 0:
        for number, tag in enumerate((5, 7, 5)):
            group.send(ones(3, number), 1, tag)
        group.send(b"read-only", 1, 9)
    if group.rank == 1:
        for tag, number in ((7, 1), (5, 0), (5, 2)):
            into = ones(3, -1.0)
            group.recv(into, 0, tag)
            assert (into == number).all(), tag
        text = bytearray(9)
        group.recv(text, 0, 9)
        assert text == b"read-only"


# From any source. The native tests of messages check the order of matching and the ends of
# receives.


@pytest.mark.parametrize(("size", "ranks_per_host"), [(2, 2), (3, 1), (4, 2)])
@on_ranks()
def test_receives_from_any_source_take_every_message_once(size: int, ranks_per_host: int) -> None:
    pretend_hosts(ranks_per_host)
    with shoal.init() as group:
        others = range(1, group.size)
        for length in (0, 1, 1009, 40_001, 1_000_003):
            if group.rank == 0:
                into = [ones(length, -1) for _ in (*others, *others)]
                works = [
                    group.recv(data, tag=7, async_op=place % 2 == 0, work=True)
                    for place, data in enumerate(into)
                ]
                group.barrier()  # the receives wait meanwhile
                for work, data in zip(works, into, strict=True):
                    assert work is not None
                    work.wait()
                    assert (data == work.source).all(), (length, work.source)
                assert sorted(work.source for work in works) == sorted([*others, *others])
            else:
                group.barrier()
                for _ in range(2):
                    group.send(ones(length, group.rank), 0, tag=7)
            group.barrier()


def wait(work: shoal.Work | None) -> None:
    assert work is not None
    work.wait()


@pytest.mark.parametrize("ranks_per_host", [2, 1])
@on_ranks(2)
def test_a_receive_from_any_source_goes_on_in_the_background(ranks_per_host: int) -> None:
    """Send a large message to a rank that waits in a collective and drives no receive."""
    pretend_hosts(ranks_per_host)
    with shoal.init() as group:
        data = ones(1_000_000, group.rank)
        if group.rank == 0:
            pending = group.recv(data, async_op=True)
        else:
            group.send(data, 0)  # returns once it is received
        group.barrier()
        if group.rank == 0:
            wait(pending)
        assert data[-1] == 1
