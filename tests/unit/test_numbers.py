"""Numbers of calls: each that was reserved is good for one call, in any order."""

import random

import pytest

from shoal.errors import UsageError
from shoal.group.numbers import MOST_APART, MOST_OPEN, Numbers


def test_calls_take_numbers_in_their_order_and_leave_out_those_that_are_reserved() -> None:
    numbers = Numbers("here")
    assert numbers.take() == 1
    reserved = numbers.reserve(3)
    assert reserved == range(2, 5)
    assert numbers.take() == 5
    assert numbers.reserve(0) == range(6, 6)
    order = list(reserved)
    random.Random(0).shuffle(order)
    assert [numbers.use(number) for number in order] == order
    assert numbers.take() == 6


def test_a_number_is_open_until_it_is_used_or_skipped() -> None:
    numbers = Numbers("here")
    numbers.take()
    numbers.reserve(3)
    assert [numbers.is_open(number) for number in range(1, 6)] == [False, True, True, True, True]
    numbers.use(3)
    assert numbers.lowest_open() == 2
    numbers.skip(2)
    assert numbers.lowest_open() == 4
    numbers.use(4)
    assert numbers.lowest_open() == 5
    assert not any(map(numbers.is_open, range(5)))


@pytest.mark.parametrize(
    ("number", "why"),
    [
        (2, r"number 2: .* used or skipped"),
        (3, r"number 3: .* used or skipped"),
        (1, r"number 1: .* used or skipped"),
        (5, r"number 5: .* reserved"),
        (0, r"number 0: .* reserved"),
        (-4, r"number -4: .* reserved"),
        ("two", r"number 'two': .* reserved"),
    ],
)
def test_a_number_that_is_not_there_to_be_used_is_refused(number: int, why: str) -> None:
    numbers = Numbers("group 'g', rank 0 of 2")
    numbers.take()
    numbers.reserve(3)
    numbers.use(2)
    numbers.skip(3)
    with pytest.raises(UsageError, match=f"group 'g', rank 0 of 2: .*{why}"):
        numbers.use(number)
    with pytest.raises(UsageError, match=why):
        numbers.skip(number)
    assert numbers.use(4) == 4


@pytest.mark.parametrize("count", [-1, MOST_APART + 1, 1 << 40])
def test_a_count_that_calls_cannot_be_apart_is_refused_with_the_numbers(count: int) -> None:
    numbers = Numbers("here")
    with pytest.raises(UsageError, match=rf"reserve\({count}\): from 0 to {MOST_APART} numbers"):
        numbers.reserve(count)
    with pytest.raises(UsageError, match="give a whole number"):
        numbers.reserve(2.5)  # type: ignore[arg-type]
    assert numbers.reserve(MOST_APART)[-1] == MOST_APART


def test_what_is_reserved_again_and_again_and_never_used_is_bounded() -> None:
    numbers = Numbers("here")
    numbers.reserve(MOST_APART)
    first = numbers.reserve(MOST_APART)
    with pytest.raises(UsageError, match=f"reserve\\(1\\), and {MOST_OPEN} numbers that were"):
        numbers.reserve(1)
    numbers.skip(first[0])
    assert numbers.reserve(1)[0] == 2 * MOST_APART + 1


def test_no_call_is_further_from_an_open_number_than_the_native_core_remembers() -> None:
    numbers = Numbers("here")
    first = numbers.reserve(2)
    more = numbers.reserve(MOST_APART)
    assert numbers.use(more[-3]) == MOST_APART
    assert numbers.use(more[-2]) == MOST_APART + 1
    for _ in range(2):  # refused, it is as before
        with pytest.raises(UsageError, match=f"call {more[-1]} is more than {MOST_APART} after"):
            numbers.use(more[-1])
        with pytest.raises(UsageError, match="number 1, which was reserved and neither used nor"):
            numbers.take()
    numbers.skip(first[0])
    assert numbers.use(more[-1]) == more[-1]
    with pytest.raises(UsageError, match="number 2"):
        numbers.take()
    numbers.use(first[1])
    assert numbers.take() == more[-1] + 1
