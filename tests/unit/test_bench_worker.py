"""What a rank checks before it is timed: a wrong sum must be seen, whatever is wrong with it."""

import json
import subprocess
import sys

import numpy as np
import pytest

from shoal.bench.endpoints import Floats
from shoal.bench.worker import count_wrong, fill, peak_resident_bytes

LENGTHS = [0, 1, 1021, 65536, 65537, 300_000]


def filled(rank: int, n_elems: int) -> Floats:
    values = np.zeros(n_elems, np.float32)
    fill(values, rank)
    return values


@pytest.mark.parametrize("n_elems", LENGTHS)
def test_the_sum_over_all_ranks_is_right(n_elems: int) -> None:
    total = sum(filled(rank, n_elems) for rank in range(8))
    assert count_wrong(np.asarray(total, np.float32), range(8)) == 0


def test_every_element_of_an_unreduced_tensor_is_wrong() -> None:
    assert count_wrong(filled(0, 300_000), range(2)) == 300_000


def test_one_wrong_element_is_counted() -> None:
    total = filled(0, 300_000) + filled(1, 300_000)
    total[-1] += 1
    assert count_wrong(total, range(2)) == 1


def test_a_rank_folded_twice_instead_of_another_is_seen() -> None:
    # 0 + 0 + 3 + 3 would look right if the tensors were multiples of one another.
    total = 2 * filled(0, 1000) + 2 * filled(3, 1000)
    assert count_wrong(total, range(4)) > 900


@pytest.mark.parametrize("shift", [1, 65536, 75_000])
def test_values_that_landed_elsewhere_are_seen(shift: int) -> None:
    total = np.roll(filled(0, 300_000), shift)
    assert count_wrong(total, [0]) > 290_000


def test_the_peak_of_memory_is_at_least_what_was_touched() -> None:
    code = (
        "import json, numpy; from shoal.bench.worker import peak_resident_bytes as peak;"
        "before = peak(); numpy.ones(64 << 20, numpy.uint8); print(json.dumps([before, peak()]))"
    )
    argv = [sys.executable, "-c", code]
    done = subprocess.run(argv, check=True, capture_output=True, text=True)
    before, after = json.loads(done.stdout)
    assert before + (64 << 20) <= after + (8 << 20)
    assert after < before + (80 << 20)
    assert peak_resident_bytes() > 0
