"""What all tests share."""

import gc


def pytest_collection_finish() -> None:
    """Let the collector forget what will stay: torch, numpy, and the tests themselves.

    It goes through all of that again and again otherwise: 30 % of the time that proofs take.
    """
    gc.collect()
    gc.freeze()
