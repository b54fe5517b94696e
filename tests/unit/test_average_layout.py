"""Fusion buffers: the places of arrays, for any arrays, orders and lengths; and their values."""

import itertools
import random

import ml_dtypes
import numpy as np
import pytest

from shoal.average import ArraySpec, Layout
from shoal.average.layout import ALIGN_BYTES
from shoal.average.preparing import not_finite, scale
from shoal.dtypes import DType
from shoal.errors import UsageError

SIZES = [0, 1, 15, 16, 17, 997, 4096, 10_007]
TYPES = [DType.FLOAT32, DType.FLOAT64, DType.BFLOAT16, DType.INT32, DType.COMPLEX128]


@pytest.fixture(params=range(60), scope="module")
def layout(request: pytest.FixtureRequest) -> Layout:
    chance = random.Random(request.param)
    types = chance.sample(TYPES, chance.randrange(1, 4))
    names = [f"array {number}" for number in range(chance.randrange(1, 30))]
    entries = [ArraySpec(n, (chance.choice(SIZES),), chance.choice(types)) for n in names]
    order = chance.sample(range(len(entries)), len(entries))
    return Layout.of(entries, order, chance.choice([64, 1000, 4096, 1 << 14, 1 << 20, 1 << 30]))


def test_buffers_cover_the_memory_once(layout: Layout) -> None:
    extents = sorted(buffer.extent for buffer in layout.buffers)
    ends = [0, *(extent.end for extent in extents)]
    begins = [*(extent.offset for extent in extents), layout.n_bytes]
    for end, begin in zip(ends, begins, strict=True):
        assert end <= begin <= end + 64  # in another order another type may have the tail


def test_all_but_the_last_buffer_of_a_type_have_one_length(layout: Layout) -> None:
    for dtype in {buffer.dtype for buffer in layout.buffers}:
        extents = sorted(b.extent for b in layout.buffers if b.dtype is dtype)
        lengths = [extent.n_bytes for extent in extents]
        assert set(lengths[:-1]) <= {lengths[0]}
        assert 0 < lengths[-1] <= lengths[0] + 2 * ALIGN_BYTES + 4096  # a tail, and up to a page
        # The last one is shorter only by the amount that rounded up the others.
        assert lengths[0] - lengths[-1] < ALIGN_BYTES * len(lengths)


def test_a_buffer_exceeds_the_requested_length_only_slightly() -> None:
    for length in (64, 100, 4096, 5000):
        layout = Layout.of([ArraySpec("a", (100_003,), DType.FLOAT32)], [0], length)
        longest = max(buffer.extent.n_bytes for buffer in layout.buffers)
        assert longest <= max(length + ALIGN_BYTES, length * 17 / 16)


def test_arrays_as_long_as_a_buffer_do_not_span_two_and_padding_needs_no_further_one() -> None:
    entries = [ArraySpec(str(n), (1 << 17,), DType.FLOAT32) for n in range(32)]
    layout = Layout.of(entries, range(32), 1 << 19)
    assert [buffer.entries for buffer in layout.buffers] == [(n,) for n in range(32)]
    layout = Layout.of([ArraySpec("a", (1 << 20,), DType.FLOAT32)], [0], 1 << 22)
    assert layout.n_bytes == (1 << 22) + ALIGN_BYTES
    assert len(layout.buffers) == 1


@pytest.mark.parametrize("types", [[DType.FLOAT32], [DType.INT32, DType.BFLOAT16, DType.FLOAT64]])
def test_long_buffers_share_no_page(types: list[DType]) -> None:
    for length in (70_000, 100_000, 1 << 20):
        entries = [ArraySpec(str(dtype), (1_000_003,), dtype) for dtype in types]
        entries.append(ArraySpec("short", (3,), DType.COMPLEX64))
        layout = Layout.of(entries, range(len(entries)), length)
        long = sorted(buffer.extent for buffer in layout.buffers if buffer.dtype in types)
        assert len(long) > 2
        ends = [-1, *(extent.end for extent in long)]
        pages = [extent.offset // 4096 for extent in sorted(one.extent for one in layout.buffers)]
        assert all(extent.offset % 4096 == 0 for extent in long)
        assert all((end - 1) // 4096 < page for end, page in zip(ends, pages, strict=True))
        longest = max(buffer.extent.n_bytes for buffer in layout.buffers)
        assert longest <= max(length * 17 / 16, length + 4096)


def test_places_are_aligned_and_disjoint_and_within_their_type(layout: Layout) -> None:
    taken = sorted((place, index) for index, place in enumerate(layout.places))
    for (place, index), (after, _) in itertools.pairwise(taken):
        assert place.end <= after.offset or not place.n_bytes
        assert place.offset % ALIGN_BYTES == 0
        assert place.n_bytes == layout.entries[index].n_bytes
    for buffer in layout.buffers:
        begin, end = buffer.extent.offset, buffer.extent.end
        within = (max(place.offset, begin) < min(place.end, end) for place in layout.places)
        inside = {index for index, is_within in enumerate(within) if is_within}
        assert set(buffer.entries) == inside
        assert {layout.entries[index].dtype for index in inside} <= {buffer.dtype}


def test_buffers_fill_in_order_when_arrays_are_ready_in_order(layout: Layout) -> None:
    left = [0] * len(layout.buffers)
    for numbers in layout.buffers_of:
        for number in numbers:
            left[number] += 1
    assert all(left), "a buffer that waits for nothing never leaves"
    filled = []
    for index in layout.order:
        for number in layout.buffers_of[index]:
            left[number] -= 1
            if left[number] == 0:
                filled.append(number)
    assert filled == list(range(len(layout.buffers)))


def test_every_order_needs_the_same_memory(layout: Layout) -> None:
    other = Layout.of(layout.entries, sorted(layout.order), 4096)
    assert other.n_bytes == layout.n_bytes


@pytest.mark.parametrize(
    ("entries", "order", "fusion_bytes", "words"),
    [
        ([], [], 4096, "nothing to average"),
        ([("a", (1,)), ("a", (2,))], [0, 1], 4096, "'a' is named twice"),
        ([("a", (3, -1))], [0], 4096, "negative dimension"),
        ([("a", (1,)), ("b", (2,))], [0, 0], 4096, "must name each of them once"),
        ([("a", (1,))], [1], 4096, "must name each of them once"),
        ([("a", (1,))], [0], 63, "at least 64, got 63"),
    ],
)
def test_arrays_that_cannot_be_laid_out_are_refused(
    entries: list[tuple[str, tuple[int, ...]]], order: list[int], fusion_bytes: int, words: str
) -> None:
    specs = [ArraySpec(*entry, DType.FLOAT32) for entry in entries]
    with pytest.raises(UsageError, match=words):
        Layout.of(specs, order, fusion_bytes)


FACTORS = [0.0, 0.25, 1 / 3, 1.0, 1.1, 3.0]


@pytest.mark.parametrize("factor", FACTORS)
def test_bfloat16_is_scaled_as_ml_dtypes_rounds_it(factor: float) -> None:
    every = np.arange(1 << 16, dtype=np.uint16)
    with np.errstate(all="ignore"):
        values = every.view(ml_dtypes.bfloat16).astype(np.float32) * np.float32(factor)
        want = values.astype(ml_dtypes.bfloat16)
        if factor == 0.0:
            want = np.zeros_like(want)
        scale(every, DType.BFLOAT16, factor)
    found = every.view(ml_dtypes.bfloat16)
    is_nan = np.isnan(want.astype(np.float32))
    np.testing.assert_array_equal(np.isnan(found.astype(np.float32)), is_nan)
    np.testing.assert_array_equal(found[~is_nan].view(np.uint16), want[~is_nan].view(np.uint16))


@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "complex64", "complex128"])
def test_elements_are_scaled_and_rounded_once(dtype: str, factor: float) -> None:
    values = np.random.default_rng(1).standard_normal(1000).astype(dtype)
    factor_type = np.float32 if dtype == "float16" else np.dtype(dtype).type
    want = (values * factor_type(factor)).astype(dtype)  # float16 is rounded once
    scale(values, DType[dtype.upper()], factor)
    np.testing.assert_array_equal(values, want)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "complex64", "bfloat16"])
def test_the_first_non_finite_element_is_found(dtype: str, bad: float) -> None:
    kind = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    values = np.full(100, 3.0, kind)
    bits = values.view(np.uint16) if dtype == "bfloat16" else values
    assert not_finite(bits, DType[dtype.upper()]) is None
    values[70] = values[41] = bad
    assert not_finite(bits, DType[dtype.upper()]) == 41


def test_integers_are_finite() -> None:
    assert not_finite(np.full(5, 0x7F80, np.uint16), DType.UINT16) is None
