"""Arguments that calls accept, and those they refuse before data moves."""

import array
import functools
import math
from collections.abc import Callable

import numpy as np
from process.arrays import ones
from process.ranks import on_ranks
from process.stage import error_of

import shoal

Refused = tuple[Callable[[], object], str]  # a call, and text of its error


def wrong_values(group: shoal.Group) -> list[Refused]:
    """One wrong buffer of each kind; unit/test_buffers.py has the others."""
    frozen = ones(3)
    frozen.flags.writeable = False
    return [
        (lambda: group.all_reduce(np.zeros((6, 4)).T), "is in Fortran order; pass array.T"),
        (lambda: group.broadcast(ones(3)[::-1]), "not contiguous"),
        (lambda: group.all_reduce(frozen), "read-only"),
        (lambda: group.all_reduce([1.0, 2.0]), "list has no buffer"),
        (lambda: group.all_reduce(np.array(["a", "b"])), "which shoal does not know"),
        (lambda: group.all_reduce(np.array([object()])), "which shoal does not know"),
        (lambda: group.all_reduce(np.zeros(3, np.longdouble)), "which shoal does not know"),
        (lambda: group.all_reduce(ones(3), "median"), "unknown operation 'median'"),
        (lambda: group.all_reduce(ones(3), "bxor"), "all_reduce has no bxor of float32"),
        (lambda: group.reduce(ones(3), op="bor"), "reduce has no bor of float32"),
        (lambda: group.all_reduce(np.zeros(3, "c8"), "max"), "all_reduce has no max of complex64"),
        (lambda: group.all_reduce(np.zeros(3, bool), "avg"), "all_reduce has no avg of bool"),
        (lambda: group.all_reduce(ones(3), timeout=3), "unknown keywords timeout"),
        *(
            (functools.partial(group.all_reduce, ones(3), timeout_s=wrong), f"0, got {wrong}")
            for wrong in (math.nan, -1.0)
        ),
        (lambda: group.broadcast(ones(3), root=2), "root names rank 2; ranks are 0 to 1"),
        (lambda: group.reduce(ones(3), root=2), "root names rank 2"),
        (lambda: group.gather([ones(3), ones(3)], ones(3), root=-1), "root names rank -1"),
        (lambda: group.scatter(ones(3), [ones(3), ones(3)], root=5), "root names rank 5"),
        (lambda: shoal.empty(3, "quaternion"), "unknown dtype"),
    ]


def wrong_blocks(group: shoal.Group) -> list[Refused]:
    rank, two, odd = group.rank, [ones(3), ones(3)], [ones(3), ones(4)]
    if rank == 0:
        outputs, no_outputs = None, "this rank is the root and needs outputs"
        inputs, no_inputs = None, "needs inputs"
    else:
        outputs, no_outputs = two, "only the root, rank 0, has outputs; pass None"
        inputs, no_inputs = two, "only the root, rank 0, has inputs; pass None"
    needed = "buffers; give 2, one for each rank"
    but = "for this rank, but its output is float32[3]"
    return [
        (lambda: group.gather(outputs, ones(3)), no_outputs),
        (lambda: group.scatter(ones(3), inputs), no_inputs),
        (lambda: group.all_gather(ones(3), ones(3)), "outputs: float32[3] cannot be cut"),
        (lambda: group.all_gather([ones(3)], ones(3)), f"outputs: got 1 {needed}"),
        (lambda: group.scatter(ones(3), [ones(3)] * 3, rank), f"inputs: got 3 {needed}"),
        (lambda: group.reduce_scatter(ones(3), [ones(2)] * 2), f"inputs hold float32[2] {but}"),
        (lambda: group.reduce_scatter(ones(3), np.zeros(6)), f"inputs hold float64[3] {but}"),
        (lambda: group.gather(odd, ones(3 + rank), rank), "outputs hold [3, 4] elements; all"),
        (
            lambda: group.all_to_all(two, [ones(3), np.zeros(3)]),
            "inputs: float64[3] for rank 1 among buffers of float32",
        ),
        (
            lambda: group.all_to_all(two, [ones(4), ones(4)]),
            "outputs hold float32[3] for this rank, but its own input is float32[4]",
        ),
        (lambda: group.all_to_all(ones(4), ones(5)), "inputs: float32[5] cannot be cut"),
        (lambda: group.all_gather([b"abc", b"abc"], b"abc"), "read-only"),
    ]


def overlapping(group: shoal.Group) -> list[Refused]:
    rank, whole = group.rank, ones(8)
    mine, theirs = whole[rank * 4 :][:4], whole[(1 - rank) * 4 :][:4]
    own = [mine, ones(4)] if rank == 0 else [ones(4), mine]
    halves = [whole[:4], whole[4:]]
    return [
        (lambda: group.all_gather(whole, theirs), "and data overlap in memory"),
        (lambda: group.all_gather([mine, mine], mine), "outputs[0] and outputs[1] overlap"),
        (lambda: group.all_gather(whole, whole[2:6]), "and data overlap in memory"),
        (lambda: group.reduce_scatter(theirs, whole), "output and inputs["),
        (lambda: group.reduce_scatter(whole[3:7], halves), "output and inputs[0] overlap"),
        (lambda: group.reduce_scatter(mine, [mine, mine]), "output and inputs["),
        (lambda: group.all_to_all(whole, whole), "overlap in memory; only this rank's own block"),
        (lambda: group.all_to_all(halves, own[::-1]), "and inputs["),
        (lambda: group.gather(whole, theirs, root=rank), "and data overlap in memory"),
        (lambda: group.scatter(theirs, whole, root=rank), "output and inputs["),
    ]


def wrong_messages(group: shoal.Group) -> list[Refused]:
    other, alone = 1 - group.rank, group.subgroup([group.rank], "alone")
    return [
        (lambda: group.recv(ones(1), 2), "source names rank 2; ranks are 0 to 1"),
        (lambda: group.recv(ones(1), -1), "source names rank -1"),
        (lambda: group.send(ones(1), -1), "to names rank -1"),
        (lambda: group.send(ones(1), group.rank), "cannot send to or from itself"),
        (lambda: group.recv(ones(1), group.rank), "cannot recv to or from itself"),
        (lambda: group.send(ones(1), other, 1 << 63), f"tag {1 << 63} does not fit in 64 bits"),
        (lambda: group.send(ones(1), other, name="mail"), "a message has a tag, not a name"),
        (lambda: alone.recv(ones(1)), "cannot recv to or from itself"),
    ]


@on_ranks(2)
def test_bad_arguments_are_refused_with_the_reason_and_the_group_goes_on() -> None:
    with shoal.init() as group:
        for refused in (wrong_values, wrong_blocks, overlapping, wrong_messages):
            for call, words in refused(group):
                error = error_of(call)
                assert isinstance(error, (shoal.UsageError, TypeError)), (words, error)
                assert words in str(error), (words, error)
        # The group has counted no call.
        data = ones(3)
        group.all_reduce(data)
        assert data[0] == 2


@on_ranks(2)
def test_zero_dimensional_empty_and_plain_buffers_work() -> None:
    with shoal.init() as group:
        zero_dim = np.array(2.5)
        empty_matrix = np.zeros((0, 7), np.int32)
        matrix = np.arange(6, dtype=np.int16).reshape(2, 3)
        columns = np.asfortranarray(np.ones((2, 3)))[:, 1]  # still contiguous
        raw = bytearray([1, 2, 3])
        numbers = array.array("d", [0.5, 1.5])
        view = memoryview(array.array("i", range(10)))[2:5]
        flag = np.array([group.rank == 0, True, False])
        things = [zero_dim, empty_matrix, matrix, columns, raw, numbers, view, flag]
        for thing in things:
            group.all_reduce(thing)
        nothing = np.zeros(0, np.float32)
        group.all_gather(nothing, np.zeros(0, np.float32))
        group.reduce_scatter(np.zeros(0, np.float32), nothing)
        group.broadcast(zero_dim, root=1)
        found = [thing.tolist() if hasattr(thing, "tolist") else list(thing) for thing in things]
        doubled = [5.0, [], [[0, 2, 4], [6, 8, 10]], [2.0, 2.0], [2, 4, 6], [1.0, 3.0], [4, 6, 8]]
        assert found == [*doubled, [True, True, False]]
