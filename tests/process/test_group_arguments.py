"""What calls on a group take and what they refuse, in words and before anything moves."""

import array
from collections.abc import Callable
from typing import Any

import numpy as np
from process.ranks import run_ranks
from process.stage import error_of

import shoal


def ones(n_elems: int, value: float = 1.0) -> Any:
    return np.full(n_elems, value, np.float32)


def refuse_bad_arguments() -> dict[str, str]:
    with shoal.init() as group:
        matrix = np.zeros((4, 6), np.float32)
        frozen = ones(3)
        frozen.flags.writeable = False
        cases = {
            "columns": lambda: group.all_reduce(matrix[:, ::2]),
            "transposed": lambda: group.all_reduce(matrix.T),
            "reversed": lambda: group.broadcast(ones(3)[::-1]),
            "frozen": lambda: group.all_reduce(frozen),
            "list": lambda: group.all_reduce([1.0, 2.0]),
            "strings": lambda: group.all_reduce(np.array(["a", "b"])),
            "objects": lambda: group.all_reduce(np.array([object()])),
            "swapped": lambda: group.all_reduce(np.zeros(3, ">f4" if LITTLE else "<f4")),
            "longdouble": lambda: group.all_reduce(np.zeros(3, np.longdouble)),
            "dates": lambda: group.all_reduce(np.zeros(3, "datetime64[s]")),
            "no such op": lambda: group.all_reduce(ones(3), "median"),
            "bits of floats": lambda: group.all_reduce(ones(3), "bxor"),
            "max of complex": lambda: group.all_reduce(np.zeros(3, np.complex64), "max"),
            "avg of bool": lambda: group.all_reduce(np.zeros(3, bool), "avg"),
            "root": lambda: group.broadcast(ones(3), root=2),
            "short": lambda: group.all_gather(ones(3), ones(3)),
            "one part": lambda: group.all_gather([ones(3)], ones(3)),
            "own part": lambda: group.reduce_scatter(ones(3), [ones(2), ones(2)]),
            "other type": lambda: group.reduce_scatter(ones(3), np.zeros(6)),
            "keyword": lambda: group.all_reduce(ones(3), timeout=3),
            "priority": lambda: group.all_reduce(ones(3), priority=2000),
            "shape": lambda: shoal.empty((2, -3)),
            "type": lambda: shoal.empty(3, "quaternion"),
            **uneven_or_missing(group),
            **overlapping(group),
        }
        texts = {}
        for name, call in cases.items():
            error = error_of(call)
            texts[name] = f"{type(error).__name__}: {error}"
        # Nothing was called, as far as the group is concerned.
        data = ones(3)
        group.all_reduce(data)
        assert data[0] == group.size
        return texts


def uneven_or_missing(group: shoal.Group) -> dict[str, Callable[[], object]]:
    two, first = [ones(3), ones(3)], group.rank == 0
    return {
        "reduce root": lambda: group.reduce(ones(3), root=2),
        "gather root": lambda: group.gather(two, ones(3), root=-1),
        "scatter root": lambda: group.scatter(ones(3), two, root=5),
        "no outputs": lambda: group.gather(None if first else two, ones(3)),
        "no inputs": lambda: group.scatter(ones(3), None if first else two),
        "uneven gather": lambda: group.gather([ones(3), ones(4)], ones(3 + group.rank), group.rank),
        "uneven scatter": lambda: group.scatter(ones(3), [ones(3)] * 2 + [ones(3)], group.rank),
        "reduce bits": lambda: group.reduce(ones(3), op="bor"),
        "two types": lambda: group.all_to_all(two, [ones(3), np.zeros(3)]),
        "types differ": lambda: group.all_to_all(two, [np.zeros(3), np.zeros(3)]),
        "own block": lambda: group.all_to_all(two, [ones(4), ones(4)]),
        "odd whole": lambda: group.all_to_all(ones(4), ones(5)),
        "frozen outputs": lambda: group.all_gather([b"abc", b"abc"], b"abc"),
    }


def overlapping(group: shoal.Group) -> dict[str, Callable[[], object]]:
    rank, whole = group.rank, ones(8)
    mine, theirs = whole[rank * 4 :][:4], whole[(1 - rank) * 4 :][:4]
    own = [mine, ones(4)] if rank == 0 else [ones(4), mine]
    return {
        "gather theirs": lambda: group.all_gather(whole, theirs),
        "gather into one": lambda: group.all_gather([mine, mine], mine),
        "gather shifted": lambda: group.all_gather(whole, whole[2:6]),
        "scatter theirs": lambda: group.reduce_scatter(theirs, whole),
        "scatter shifted": lambda: group.reduce_scatter(whole[3:7], [whole[:4], whole[4:]]),
        "scatter into all": lambda: group.reduce_scatter(mine, [mine, mine]),
        "exchange in place": lambda: group.all_to_all(whole, whole),
        "exchange crossed": lambda: group.all_to_all([whole[:4], whole[4:]], own[::-1]),
        "root's gather": lambda: group.gather(whole, theirs, root=rank),
        "root's scatter": lambda: group.scatter(theirs, whole, root=rank),
    }


LITTLE = array.array("h", [1]).tobytes()[0] == 1


def test_bad_arguments_are_refused_in_words_and_the_group_lives_on() -> None:
    want = {
        "columns": "ndarray of shape (4, 3) is not contiguous",
        "transposed": "ndarray of shape (6, 4) is in Fortran order; pass array.T",
        "reversed": "not contiguous",
        "frozen": "read-only",
        "list": "list has no buffer",
        "strings": "which shoal does not know",
        "objects": "which shoal does not know",
        "swapped": "which shoal does not know; convert it first, foreign byte orders too",
        "longdouble": "which shoal does not know",
        "dates": "elements of datetime64[s], which shoal does not know",
        "no such op": "unknown operation 'median'",
        "bits of floats": "all_reduce has no bxor of float32",
        "max of complex": "all_reduce has no max of complex64",
        "avg of bool": "all_reduce has no avg of bool",
        "root": "root names rank 2; ranks are 0 to 1",
        "short": "outputs: float32[3] cannot be cut into one block for each of 2 ranks",
        "one part": "outputs: 1 buffers; one for each rank, 2, needed",
        "own part": "inputs hold float32[2] for this rank, but its output is float32[3]",
        "other type": "inputs hold float64[3] for this rank, but its output is float32[3]",
        "keyword": "TypeError",
        "priority": "priority=2000 is not within 1000 of 0",
        "shape": "negative dimension",
        "type": "unknown dtype",
        "reduce root": "root names rank 2",
        "gather root": "root names rank -1",
        "scatter root": "root names rank 5",
        "uneven gather": "outputs hold [3, 4] elements; all blocks need",
        "uneven scatter": "inputs: 3 buffers; one for each rank, 2, needed",
        "reduce bits": "reduce has no bor of float32",
        "two types": "inputs: float64[3] for rank 1 among buffers of float32",
        "types differ": "outputs hold float32[3] for this rank, but its own input is float64[3]",
        "own block": "outputs hold float32[3] for this rank, but its own input is float32[4]",
        "odd whole": "inputs: float32[5] cannot be cut into one block for each of 2 ranks",
        "frozen outputs": "read-only",
        "gather theirs": "and data overlap in memory",
        "gather into one": "outputs[0] and outputs[1] overlap in memory",
        "gather shifted": "and data overlap in memory",
        "scatter theirs": "output and inputs[",
        "scatter shifted": "output and inputs[0] overlap",
        "scatter into all": "output and inputs[",
        "exchange in place": "overlap in memory; only this rank's own block",
        "exchange crossed": "and inputs[",
        "root's gather": "and data overlap in memory",
        "root's scatter": "output and inputs[",
    }
    by_rank = (
        {"no outputs": "this rank is the root and needs outputs", "no inputs": "needs inputs"},
        {
            "no outputs": "only the root, rank 0, has outputs; pass None",
            "no inputs": "only the root, rank 0, has inputs; pass None",
        },
    )
    for own, texts in zip(by_rank, run_ranks(refuse_bad_arguments, 2), strict=True):
        assert texts.keys() == want.keys() | own.keys()
        for name, text in texts.items():
            assert (want | own)[name] in text, (name, text)
            assert text.startswith(("UsageError", "TypeError")), name


def reduce_odd_things() -> list[Any]:
    with shoal.init() as group:
        zero_dim = np.array(2.5)
        empty_matrix = np.zeros((0, 7), np.int32)
        matrix = np.arange(6, dtype=np.int16).reshape(2, 3)
        columns = np.asfortranarray(np.ones((2, 3)))[:, 1]  # contiguous all the same
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
        return [thing.tolist() if hasattr(thing, "tolist") else list(thing) for thing in things]


def test_zero_dimensional_empty_and_plain_buffers_work() -> None:
    want = [
        *(5.0, [], [[0, 2, 4], [6, 8, 10]], [2.0, 2.0], [2, 4, 6], [1.0, 3.0], [4, 6, 8]),
        [True, True, False],
    ]
    assert run_ranks(reduce_odd_things, 2) == [want, want]
