"""What calls on a group take and what they refuse, in words and before anything moves."""

import array
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
            "shape": lambda: shoal.empty((2, -3)),
            "type": lambda: shoal.empty(3, "quaternion"),
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


LITTLE = array.array("h", [1]).tobytes()[0] == 1


def test_bad_arguments_are_refused_in_words_and_the_group_lives_on() -> None:
    want = {
        "columns": "ndarray of shape (4, 3) is not contiguous",
        "transposed": "ndarray of shape (6, 4) is not contiguous",
        "reversed": "not contiguous",
        "frozen": "read-only",
        "list": "list has no buffer",
        "strings": "which shoal does not know",
        "objects": "which shoal does not know",
        "swapped": "which shoal does not know; convert it first, foreign byte orders too",
        "longdouble": "which shoal does not know",
        "dates": "elements that shoal does not know",
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
        "shape": "negative dimension",
        "type": "unknown dtype",
    }
    for texts in run_ranks(refuse_bad_arguments, 2):
        assert texts.keys() == want.keys()
        for name, text in texts.items():
            assert want[name] in text, name
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
