"""What a group keeps when `reform` is interrupted."""

from types import SimpleNamespace
from typing import Any

import pytest

from shoal.errors import Closed
from shoal.group.elastic import Elastic


def test_an_interrupt_after_a_shrink_does_not_lose_the_shrunk_group() -> None:
    def raising(error: BaseException) -> Any:
        def grow(**_named: Any) -> None:
            raise error

        return grow

    shrunk = SimpleNamespace(grow=raising(KeyboardInterrupt()))
    first = SimpleNamespace(grow=raising(Closed("ended")), shrink=lambda **_named: shrunk)
    first.timeout_s, first._vote_number, first._heir = 9.0, None, None
    first.ended = lambda: Closed("ended")
    with pytest.raises(KeyboardInterrupt):
        Elastic.reform(first)
    assert first._heir is shrunk
