"""Point to point: messages meet their receives by rank and tag, or whoever sends first."""

from typing import Any

import numpy as np
import pytest
from process.ranks import run_ranks
from process.stage import error_of, pretend_hosts

import shoal
from shoal.errors import Closed, PeerLost, TimedOut, UsageError


def ones(n_elems: int, value: float = 1.0) -> Any:
    return np.full(n_elems, value, np.float32)


def pass_messages(ranks_per_host: int) -> float:
    pretend_hosts(ranks_per_host)
    with shoal.init() as group:
        pass_round_the_ring(group)
        receive_by_tag(group)
        group.barrier()
        for call in (group.send, group.recv):
            assert "itself" in str(error_of(call, ones(1), group.rank))
            assert "rank 9" in str(error_of(call, ones(1), 9))
        return group.size


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
    """In another order than they are sent."""
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


@pytest.mark.parametrize(("size", "ranks_per_host"), [(2, 2), (3, 3), (3, 1)])
def test_messages_arrive_by_source_and_tag(size: int, ranks_per_host: int) -> None:
    assert run_ranks(pass_messages, size, ranks_per_host) == [size] * size


# From any source. The native tests of messages check the order in which receives take them.


def take_from_anyone(ranks_per_host: int) -> list[list[int]]:
    """At rank 0: the sources of all messages, by length, as their receives were called."""
    pretend_hosts(ranks_per_host)
    sources = []
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
                sources.append([work.source for work in works if work is not None])
            else:
                group.barrier()
                for _ in range(2):
                    group.send(ones(length, group.rank), 0, tag=7)
            group.barrier()
    return sources


@pytest.mark.parametrize(("size", "ranks_per_host"), [(2, 2), (3, 1), (4, 2)])
def test_receives_from_any_source_take_every_message_once(size: int, ranks_per_host: int) -> None:
    first, *others = run_ranks(take_from_anyone, size, ranks_per_host)
    assert others == [[]] * (size - 1)
    assert len(first) == 5
    for sources in first:
        assert sorted(sources) == sorted([*range(1, size), *range(1, size)])


def wait(work: shoal.Work | None) -> None:
    assert work is not None
    work.wait()


def go_on_in_the_background(ranks_per_host: int) -> float:
    """A large message to a rank that waits in a collective: nobody else drives its receive."""
    pretend_hosts(ranks_per_host)
    with shoal.init() as group:
        data = ones(1_000_000, group.rank)
        if group.rank == 0:
            pending = group.recv(data, async_op=True)
        else:
            group.send(data, 0)  # returns once it is taken
        group.barrier()
        if group.rank == 0:
            wait(pending)
        return float(data[-1])


@pytest.mark.parametrize("ranks_per_host", [2, 1])
def test_a_receive_from_any_source_goes_on_in_the_background(ranks_per_host: int) -> None:
    assert run_ranks(go_on_in_the_background, 2, ranks_per_host) == [1.0, 1.0]


def wait_for_nobody(ranks_per_host: int) -> dict[str, Exception | None]:
    pretend_hosts(ranks_per_host)
    errors: dict[str, Exception | None] = {}
    with shoal.init() as world:
        everyone = range(world.size)
        late, ended, unfit = (world.subgroup(everyone, name) for name in ("late", "ended", "unfit"))
        if world.rank == 0:
            errors["late"] = error_of(late.recv, ones(3), timeout_s=0.2)
            errors["unfit"] = error_of(unfit.recv, ones(3))
            pending = ended.recv(ones(3), async_op=True)
            world.barrier()
            assert pending is not None
            errors["ended"] = error_of(pending.wait)
        else:
            if world.rank == 1:
                unfit.send(ones(4), 0)
            world.barrier()
            if world.rank == 1:
                ended.abort("enough")
        world.barrier()
        if world.rank == 0:
            errors["left"] = error_of(world.recv, ones(3))
    return errors


@pytest.mark.parametrize("ranks_per_host", [2, 1])
def test_a_receive_from_any_source_ends_with_its_group(ranks_per_host: int) -> None:
    errors, nothing = run_ranks(wait_for_nobody, 2, ranks_per_host)
    assert nothing == {}
    kinds = {"late": TimedOut, "unfit": UsageError, "ended": Closed, "left": PeerLost}
    words = {
        "late": "deadline of recv float32[3] from any rank",
        "unfit": "called send float32[4] to rank 0",
        "ended": "enough",
        "left": "left the group",
    }
    for name, error in errors.items():
        assert isinstance(error, kinds[name]), (name, error)
        assert words[name] in str(error), (name, error)
    assert errors.keys() == kinds.keys()


def refuse_bad_messages() -> list[str]:
    with shoal.init() as group:
        errors = [
            error_of(group.recv, ones(1), 2),
            error_of(group.recv, ones(1), -1),
            error_of(group.send, ones(1), -1),
            error_of(group.recv, ones(1), group.rank),
            error_of(group.send, ones(1), 1 - group.rank, 1 << 63),
            error_of(group.send, ones(1), 1 - group.rank, name="mail"),
            error_of(group.subgroup([group.rank], "alone").recv, ones(1)),
        ]
        group.barrier()
        return [f"{type(error).__name__}: {error}" for error in errors]


def test_messages_to_nobody_are_refused() -> None:
    want = [
        "source names rank 2; ranks are 0 to 1",
        "source names rank -1",
        "to names rank -1",
        "cannot recv to or from itself",
        f"tag {1 << 63} does not fit in 64 bits",
        "a message has a tag, not a name",
        "cannot recv to or from itself",
    ]
    for texts in run_ranks(refuse_bad_messages, 2):
        for text, words in zip(texts, want, strict=True):
            assert text.startswith("UsageError"), text
            assert words in text, text
