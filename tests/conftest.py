"""Fixtures and hooks of all tests."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from process.ranks import FileRanks
    from process.shared_ranks import SharedRanks


os.environ["SHOAL_DUMP"] = "off"  # many tests wait for a deadline, in ranks and in this process
gc.disable()  # until the tests are collected, which saves each worker 1.4 s


def pytest_collection_finish() -> None:
    """Freeze permanent objects for the collector: torch, numpy, and the tests themselves.

    Otherwise it visits them again and again, which is 30 % of the time of proofs.
    """
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="module")
def forked() -> Iterator[FileRanks]:
    from process.ranks import FileRanks

    with FileRanks() as ranks:
        yield ranks


def _ranks_of(*sizes: int) -> Any:
    @pytest.fixture(scope="module", params=sizes if len(sizes) > 1 else None)
    def fixture(request: pytest.FixtureRequest) -> Iterator[SharedRanks]:
        from process.shared_ranks import SharedRanks

        with SharedRanks(getattr(request, "param", sizes[0])) as ranks:
            yield ranks

    return fixture


ranks, three_ranks, one_or_three_ranks = _ranks_of(2), _ranks_of(3), _ranks_of(1, 3)
