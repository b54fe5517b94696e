"""Groups form at the door of a member, beside or after other groups of the process."""

import os
import time
from typing import Any

import numpy as np
import pytest
from process.ranks import on_ranks, on_survivors
from process.stage import Stage, descriptors, die, error_of, pretend_hosts

import shoal
from shoal.errors import Closed, PeerLost, TimedOut, UsageError
from shoal.group.form import form_at
from shoal.rendezvous.door import Door
from shoal.rendezvous.meeting import Meeting


def open_doors() -> tuple[Stage, int, int, Door, list[str]]:
    """Return the stage, this rank, the size, its door, and the addresses of all doors."""
    stage, door = Stage.from_environment(), Door()
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    stage.store.set(f"door/{rank}", door.address.encode())
    addresses = [stage.store.get(f"door/{other}", 30.0).decode() for other in range(size)]
    return stage, rank, size, door, addresses


def total(group: shoal.Group) -> float:
    data = np.full(1000, 1.0 + group.rank)
    group.all_reduce(data)
    assert (data == data[0]).all()
    return float(data[0])


@pytest.mark.parametrize("ranks_per_host", [4, 2])
@on_ranks(4, has_stage=True, env={"SHOAL_KEY": "k" * 32})
def test_a_group_forms_at_a_door_beside_another_and_after_an_abort(ranks_per_host: int) -> None:
    if ranks_per_host == 4:
        del os.environ["SHOAL_KEY"]  # a door inside a host needs none
    pretend_hosts(ranks_per_host)
    stage, rank, size, door, addresses = open_doors()
    addresses.reverse()
    for turn in range(3):
        with form_at(door, addresses, f"turn {turn}", timeout_s=30) as group:
            assert (group.rank, total(group)) == (3 - rank, 10.0)
            part = addresses[:2]  # beside the live group
            if door.address in part:
                with form_at(door, part, f"part {turn}", timeout_s=30) as pair:
                    assert total(pair) == 3.0
            group.barrier()
            stage.meet(rank, size, f"the end of turn {turn}")
            if turn == 1:
                group.abort("the test ends it")
                assert isinstance(error_of(group.barrier), Closed)
    door.close()


@pytest.mark.parametrize("victim", [0, 2])
@on_survivors(3, has_stage=True)
def test_a_dead_member_ends_a_forming_at_once_and_the_rest_can_form_again(victim: int) -> None:
    _, rank, _, door, addresses = open_doors()
    publish = Meeting.publish

    def publish_and_die(self: Meeting, own: Any) -> None:
        publish(self, own)
        die()

    if rank == victim:
        Meeting.publish = publish_and_die
    started = time.monotonic()
    error = error_of(form_at, door, addresses, "one", timeout_s=50)
    assert isinstance(error, PeerLost), error
    assert f"rank {victim}" in str(error) or "serves no store" in str(error)
    assert time.monotonic() - started < 10
    rest = [one for number, one in enumerate(addresses) if number != victim]
    with form_at(door, rest, "two", timeout_s=30) as group:
        assert total(group) == 3.0


@on_ranks(1)
def test_wrong_addresses_and_an_unopened_meeting_are_errors() -> None:
    door, other = Door(), Door()
    own, absent = door.address, other.address
    # In the last case the other door exists, but its process never opens the meeting.
    cases = [absent], [own, own], ["nowhere", own], [absent, own]
    errors = [error_of(form_at, door, addresses, "one", timeout_s=0.2) for addresses in cases]
    assert [type(error) for error in errors] == [UsageError, UsageError, UsageError, TimedOut]
    first, second, third, last = map(str, errors)
    repeat = "repeat one, or leave out this process's own"
    assert first == f"the addresses {absent} {repeat}, {own}"
    assert second == f"the addresses {own}, {own} {repeat}, {own}"
    assert "'nowhere' is not an address" in third
    assert last.endswith(f"{absent} did not begin the meeting 'one' within 0.2 s")


@on_ranks(2, has_stage=True)
def test_repeated_forming_leaks_no_descriptors_and_no_values_of_a_door() -> None:
    stage, rank, size, door, addresses = open_doors()
    with door:
        open_before = -1
        for turn in range(20):
            with form_at(door, addresses, f"turn {turn}", timeout_s=30) as group:
                assert total(group) == 3.0
            stage.meet(rank, size, f"after {turn}")
            if turn == 2:
                open_before = len(descriptors())
        assert len(descriptors()) <= open_before
        n_values = len(door._doorman._values)
        assert n_values < 60 if rank == 0 else n_values == 0
