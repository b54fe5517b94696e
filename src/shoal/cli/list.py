"""`shoal list`: list the algorithms of each collective."""

from __future__ import annotations

import argparse

from shoal.schedule.table import ALGORITHMS, MORE_ALL_REDUCES


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Take no arguments."""
    parser.set_defaults(run=_run)


def _run(_args: argparse.Namespace) -> int:
    for collective, algorithms in ALGORITHMS.items():
        more = f"; also {MORE_ALL_REDUCES}" * (collective == "all_reduce")
        print(f"{collective:<15} {', '.join(algorithms)}{more}")
    return 0
