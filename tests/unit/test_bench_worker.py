"""Checks of a rank before it is timed: every kind of wrong sum must be detected."""

import ml_dtypes
import numpy as np
import pytest

from shoal.bench.collectives import COLLECTIVES, Call, CallSpec
from shoal.bench.elements import ELEMENTS, OPERATIONS, ElementType
from shoal.bench.libraries import LibraryRank
from shoal.bench.values import Contribution, FilledBuffer, KnownValues, Values
from shoal.bench.worker import Rank
from shoal.codec import Codec


def filled(rank: int, n_elems: int) -> Values:
    values = np.zeros(n_elems, np.float32)
    KnownValues(8).fill(values, rank)
    return values


def count_wrong(values: Values, source: Contribution, codec: Codec = Codec.IDENTITY) -> int:
    return KnownValues(8, codec=codec).count_wrong(values, source)


def test_every_kind_of_wrong_sum_is_detected() -> None:
    one, two, both = filled(0, 300_000), filled(1, 300_000), Contribution(range(2))
    assert count_wrong(one, both) == 300_000  # never reduced
    total = one + two
    total[-1] += 1
    assert count_wrong(total, both) == 1
    # A rank folded twice: 0 + 0 + 3 + 3 would look right if tensors were multiples of each other.
    assert count_wrong(2 * one[:1000] + 2 * filled(3, 1000), Contribution(range(4))) > 900
    for shift in (1, 65536, 75_000):  # stored elsewhere
        assert count_wrong(np.roll(one, shift), Contribution([0])) > 290_000


def test_a_rounded_result_is_right_within_the_allowed_error_and_never_if_it_is_nan() -> None:
    total = np.asarray(filled(0, 70_000) + filled(1, 70_000), np.float32) * np.float32(1.007)
    # Rounded twice, by 0.4 % each or by 0.3 %.
    assert count_wrong(total, Contribution(range(2)), Codec("coarse", 1, 16, 0.004)) == 0
    assert count_wrong(total, Contribution(range(2)), Codec("fine", 1, 16, 0.003)) == 70_000
    total[5] = np.nan
    assert count_wrong(total, Contribution(range(2)), Codec("coarse", 1, 16, 0.004)) == 1


def test_a_small_value_of_a_block_may_be_off_by_a_part_of_the_largest() -> None:
    total, blocks = filled(0, 65_536), Codec("blocks", 3, 8, 0.004, 32)
    smallest, most = int(total.argmin()), float(total.max())
    total[smallest] += 0.007 * most
    assert count_wrong(total, Contribution([0]), blocks) == 0
    total[smallest] += 0.002 * most
    assert count_wrong(total, Contribution([0]), blocks) == 1


def by_numpy(collective: str, rank: int, tensors: list[Values]) -> list[Values]:
    """Return the blocks of a rank's result, from the definition of the collective; [] for none."""
    size = len(tensors)
    cut = [np.split(tensor, size) for tensor in tensors]
    results: dict[str, list[Values]] = {
        "all_reduce": [np.sum(tensors, axis=0)],
        "broadcast": [tensors[0]],
        "reduce": [np.sum(tensors, axis=0)] if rank == 0 else [],
        "all_gather": [blocks[peer] for peer, blocks in enumerate(cut)],
        "reduce_scatter": [np.sum([blocks[rank] for blocks in cut], axis=0)],
        "gather": [blocks[peer] for peer, blocks in enumerate(cut)] if rank == 0 else [],
        "scatter": [cut[0][rank]],
        "all_to_all": [blocks[rank] for blocks in cut],
        "send_recv": [tensors[rank + 1 if rank % 2 == 0 else rank - 1]],
        "barrier": [],
    }
    return results[collective]


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("n_elems", [8, 300_000])
def test_the_expected_result_of_a_rank_is_numpys(collective: str, n_elems: int) -> None:
    tensors = [filled(rank, n_elems) for rank in range(4)]
    untouched = np.zeros(n_elems, np.float32)
    n_block = n_elems // 4 if COLLECTIVES[collective].cut else n_elems
    for rank in range(4):
        blocks = by_numpy(collective, rank, tensors)
        sources = COLLECTIVES[collective].want(rank, range(4), n_block, 0).values()
        for block, source in zip(blocks, sources, strict=True):
            assert count_wrong(block, source) == 0
            assert count_wrong(untouched[: len(block)], source) == len(block)


def stored(element: ElementType, values: Values) -> Values:
    """Return integers in the memory of that type, by ml_dtypes where NumPy has no such type."""
    if element.name == "bfloat16":
        return values.astype(ml_dtypes.bfloat16).view(np.uint16)
    return values.astype(element.storage)


def shown(element: ElementType, values: Values) -> Values:
    kind = ml_dtypes.bfloat16 if element.name == "bfloat16" else np.dtype(element.storage)
    return values.view(kind).astype(np.float64 if element.is_float else np.int64)


BY_NUMPY = {"sum": np.sum, "product": np.prod, "min": np.min, "max": np.max, "avg": np.mean}


@pytest.mark.parametrize("op", OPERATIONS)
@pytest.mark.parametrize("name", ELEMENTS)
@pytest.mark.parametrize("n_ranks", [7, 16])
def test_a_fold_of_numpy_is_right_in_every_type(name: str, op: str, n_ranks: int) -> None:
    element, known = ELEMENTS[name], KnownValues(n_ranks, ELEMENTS[name], op)
    tensors = [np.zeros(65_600, element.storage) for _ in range(n_ranks)]
    for rank, tensor in enumerate(tensors):
        known.fill(tensor, rank)
    exact = BY_NUMPY[op]([shown(element, tensor) for tensor in tensors], axis=0)
    folded = stored(element, exact if element.is_float else np.trunc(exact))
    assert known.count_wrong(folded, Contribution(range(n_ranks))) == 0
    folded[[3, 65_599]] = stored(element, np.array([0, 0]))
    assert known.count_wrong(folded, Contribution(range(n_ranks))) == 2


class AloneRank:
    """A library of one rank, which records its calls and may skip their work."""

    def __init__(self) -> None:
        self.done, self.is_lazy = "", False

    def _bind(self, _what: CallSpec, data: Values, other: Values) -> Call:
        def gather() -> None:
            self.done += "C"
            if not self.is_lazy:
                other[:] = data

        return gather

    def _barrier(self) -> None:
        self.done += "B"

    def rank(self) -> Rank:
        def allocate(n_elems: int, dtype: str) -> FilledBuffer:
            return FilledBuffer(*[np.empty(n_elems, dtype)] * 2)

        return Rank(LibraryRank(0, allocate, self._barrier, self._bind, lambda: None, (0,)))


def test_the_result_of_an_earlier_call_does_not_count() -> None:
    library = AloneRank()
    rank, what = library.rank(), {"n_bytes": 400, "collective": "all_gather", "in_place": False}
    assert rank.check(**what) == {"n_wrong": 0}
    library.is_lazy = True
    assert rank.check(**what) == {"n_wrong": 100}


def test_calls_are_made_separately_or_in_a_row_after_a_warm_up() -> None:
    for is_apart, turns in ((True, "BCBCBC"), (False, "BCCC")):
        library = AloneRank()
        how = {"n_calls": 1, "n_samples": 3, "n_warmup": 2, "is_apart": is_apart}
        answer = library.rank().measure(n_bytes=4, **how)
        assert library.done == f"BCCB{turns}B"
        assert len(answer["times_s"]) == len(answer["cpu_s"]) == 3
