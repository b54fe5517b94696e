"""What a context remembers has a bound."""

import pytest

from shoal.errors import UsageError
from shoal.group.context import Occurrences


def test_names_are_counted_one_by_one() -> None:
    named = Occurrences("calls")
    assert [named.count(name) for name in "abaab"] == [1, 1, 2, 3, 2]


def test_more_names_than_can_be_counted_are_refused_and_known_ones_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Occurrences, "MOST", 2)
    named = Occurrences("groups")
    assert [named.count(name) for name in "ab"] == [1, 1]
    with pytest.raises(UsageError, match="2 names of groups have been used"):
        named.count("c")
    assert named.count("a") == 2
