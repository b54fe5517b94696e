"""Values of `compress=`, and the codec of each step."""

from typing import Any

import pytest

from shoal.average.compress import ChunkTopK, ErrorFeedback, check_hosts
from shoal.codec import top_k
from shoal.errors import Unsupported, UsageError


@pytest.mark.parametrize(
    ("scheme", "shares"),
    [
        (ChunkTopK(), [0.01] * 9),
        # As in Deep Gradient Compression: 25 %, 6.25 %, 1.5625 %, and then the given share.
        (ChunkTopK(0.01, warm_up=6), [0.25] * 2 + [0.0625] * 2 + [0.015625] * 2 + [0.01] * 3),
        (ChunkTopK(0.001, warm_up=4), [0.25, 0.0625, 0.015625, 0.00390625] + [0.001] * 5),
        (ChunkTopK(0.1, warm_up=7), [0.25] * 7 + [0.1] * 2),
        (ChunkTopK(0.3, warm_up=7), [0.3] * 9),
        (ChunkTopK(1.0, warm_up=7), [1.0] * 9),
    ],
)
def test_warm_up_falls_by_quarters_to_the_share(scheme: ChunkTopK, shares: list[float]) -> None:
    assert [scheme.codec(step) for step in range(9)] == [top_k(share, 8) for share in shares]


def test_a_share_of_a_chunk_is_at_least_one_element() -> None:
    assert [top_k(share, 8).keep for share in (1e-9, 0.01, 0.25, 1.0)] == [1, 41, 1024, 4096]


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        ({"share": 0.0}, "share must be more than 0 and at most 1"),
        ({"share": 1.5}, "share must be"),
        ({"share": "1%"}, "share must be a number, got '1%'"),
        ({"warm_up": None}, "warm_up must be a number, got None"),
        ({"share": float("nan")}, "share must be"),
        ({"bits": 4}, "bits must be 8 or 2"),
        ({"warm_up": -1}, "warm_up must be a number of steps"),
    ],
)
def test_numbers_out_of_range_are_refused(wrong: dict[str, Any], what: str) -> None:
    with pytest.raises(UsageError, match=what):
        ChunkTopK(**wrong)


def test_top_k_is_refused_where_ranks_share_a_host_and_there_are_others() -> None:
    for hosts in ((0, 1, 2), (0, 0, 0), (0,)):
        check_hosts(ChunkTopK(), hosts)
    check_hosts(ErrorFeedback("bf16"), (0, 1, 1))
    with pytest.raises(Unsupported, match="ranks 1, 2 share a host"):
        check_hosts(ChunkTopK(), (0, 1, 1))
