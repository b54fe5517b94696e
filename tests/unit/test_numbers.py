"""Numbers and names of calls: a reserved number serves one call, in any order."""

import pytest

from shoal.errors import UsageError
from shoal.group.context import Occurrences
from shoal.group.numbers import MOST_APART, MOST_OPEN, Numbers


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


@pytest.mark.parametrize("number", [1, 2, 3, 5, 0, -4, "two"])
def test_a_number_that_is_not_reserved_is_refused(number: int | str) -> None:
    why = "used or skipped" if number in (1, 2, 3) else "reserved"
    numbers = Numbers("group 'g', rank 0 of 2")
    numbers.take()
    numbers.reserve(3)
    numbers.use(2)
    numbers.skip(3)
    for call in (numbers.use, numbers.skip):
        with pytest.raises(UsageError, match=f"g', rank 0 of 2: .*number {number!r}: .* {why}"):
            call(number)
    assert numbers.use(4) == 4


def test_reservations_at_once_and_unused_ones_are_bounded() -> None:
    numbers = Numbers("here")
    for count in (-1, MOST_APART + 1, 1 << 40):
        why = rf"reserve\({count}\): from 0 to {MOST_APART} numbers"
        with pytest.raises(UsageError, match=why):
            numbers.reserve(count)
    with pytest.raises(UsageError, match="give a whole number"):
        numbers.reserve(2.5)  # type: ignore[arg-type]
    assert numbers.reserve(MOST_APART)[-1] == MOST_APART
    first = numbers.reserve(MOST_APART)
    with pytest.raises(UsageError, match=f"reserve\\(1\\), but {MOST_OPEN} of at most"):
        numbers.reserve(1)
    numbers.skip(first[0])
    assert numbers.reserve(1)[0] == 2 * MOST_APART + 1


def test_calls_stay_within_the_native_cores_memory_of_an_open_number() -> None:
    numbers = Numbers("here")
    first = numbers.reserve(2)
    more = numbers.reserve(MOST_APART)
    assert numbers.use(more[-3]) == MOST_APART
    assert numbers.use(more[-2]) == MOST_APART + 1
    for _ in range(2):  # the refusal changed nothing
        with pytest.raises(UsageError, match=f"call {more[-1]} is more than {MOST_APART} after"):
            numbers.use(more[-1])
        with pytest.raises(UsageError, match="number 1, which is neither used nor"):
            numbers.take()
    numbers.skip(first[0])
    assert numbers.use(more[-1]) == more[-1]
    with pytest.raises(UsageError, match="number 2"):
        numbers.take()
    numbers.use(first[1])
    assert numbers.take() == more[-1] + 1


def test_names_are_counted_one_by_one_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Occurrences, "MOST", 2)
    named = Occurrences("groups")
    assert [named.count(name) for name in "abaab"] == [1, 1, 2, 3, 2]
    with pytest.raises(UsageError, match="2 names of groups have been used"):
        named.count("c")
    assert named.count("a") == 4
