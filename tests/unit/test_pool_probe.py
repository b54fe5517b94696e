"""What a probe of links means: how far below a worker's a server's rate is, and who is late."""

import pytest

from shoal.group.pool.late import late_server
from shoal.group.pool.probe import UNKNOWN, part_of, step_of


@pytest.mark.parametrize(
    ("rate", "reference", "part"),
    [
        (100.0, 100.0, 1.0),
        (250.0, 100.0, 1.0),  # it carries no less: more cannot be seen through one worker's link
        (76.0, 100.0, 1.0),  # as near as two measurements of one link
        (70.0, 100.0, 0.5**0.5),
        (45.0, 100.0, 0.5),
        (55.0, 100.0, 0.5),
        (10.0, 100.0, 0.5**3.5),
        (0.0, 100.0, 1.0),  # it did not answer
        (100.0, 0.0, 1.0),  # nor did the worker
        (1e-300, 1e300, 0.5**127),
    ],
)
def test_a_server_counts_as_a_part_of_a_worker_in_steps_of_a_root_of_2(
    rate: float, reference: float, part: float
) -> None:
    step = step_of(rate, reference)
    assert 0 <= step <= UNKNOWN
    assert part_of(step) == pytest.approx(part)
    assert (step == UNKNOWN) == (not rate or not reference)


def test_the_server_with_a_far_longer_queue_for_its_share_is_late() -> None:
    kib = 1 << 10
    assert late_server([80 * kib, 500 * kib, 70 * kib, 90 * kib], [1, 1, 1, 1])[0] == 1
    assert late_server([80 * kib, 100 * kib, 70 * kib, 90 * kib], [1, 1, 1, 1])[0] is None
    assert late_server([400 * kib, 100 * kib, 90 * kib], [4, 1, 1])[0] is None
    assert late_server([400 * kib, 400 * kib, 400 * kib], [4, 1, 4])[0] == 1


def test_no_server_is_late_where_no_queue_is_long_or_there_is_nothing_to_compare() -> None:
    assert late_server([20_000.0, 100.0, 0.0], [1, 1, 1])[0] is None
    assert late_server([1e9, 0.0], [1, 0])[0] is None
    assert late_server([1e9], [1])[0] is None
