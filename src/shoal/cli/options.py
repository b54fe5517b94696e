"""Shared by subcommands: the parser, ranks and hosts as text, and writing to a file."""

from __future__ import annotations

import argparse
import contextlib
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NoReturn

from shoal.errors import UsageError, did_you_mean


class Parser(argparse.ArgumentParser):
    """An argparse parser that raises UsageError for wrong arguments."""

    def __init__(self, **settings: Any) -> None:
        # Else `--ranks` would mean `--ranks-per-host` in commands without `--ranks`.
        super().__init__(allow_abbrev=False, **settings)

    def parse_known_args(  # type: ignore[override]  # argparse has overloads by namespace
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Report unknown arguments of a subcommand with a pointer to its own help."""
        namespace, unknown = super().parse_known_args(args, namespace)
        if unknown:
            near = did_you_mean(unknown[0], self._option_string_actions)
            self.error(f"unrecognized arguments: {' '.join(unknown)}{near}")
        return namespace, unknown

    def error(self, message: str) -> NoReturn:
        """Raise UsageError; argparse calls it."""
        wrong = re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message)
        near = did_you_mean(wrong[1], re.findall(r"[\w-]+", wrong[2])) if wrong else ""
        raise UsageError(f"{message}{near}; see {self.prog} --help")


MOST_TIMEOUT_S: Final = 1_000_000
"""Torch counts milliseconds in 31 bits."""

_COUNT: Final = r"[1-9]\d{0,99}"
_HOSTS_TIMES_RANKS: Final = re.compile(f"({_COUNT})x({_COUNT})")
_RANKS_OF_EACH: Final = re.compile(f"{_COUNT}(,{_COUNT})+")
_MOST_RANKS: Final = 1_000_000
"""A bound far above any use, so that a typo does not fill the memory."""


def hosts_of(text: str) -> tuple[int, ...]:
    """Return each rank's host from "2x4" or "4,4,2" (ranks of each); UsageError for others."""
    if match := _HOSTS_TIMES_RANKS.fullmatch(text):
        ranks_per_host = [int(match[2])] * min(int(match[1]), _MOST_RANKS + 1)
    elif _RANKS_OF_EACH.fullmatch(text):
        ranks_per_host = [int(n_ranks) for n_ranks in text.split(",")]
    else:
        raise UsageError(
            f"cannot read the hosts {text!r}: write 2x4 for 2 hosts of 4 ranks each, "
            "or 4,4,2 for the ranks of each host"
        )
    if sum(ranks_per_host) > _MOST_RANKS:
        raise UsageError(f"--hosts {text}: at most {_MOST_RANKS} ranks in all")
    return tuple(host for host, n_ranks in enumerate(ranks_per_host) for _ in range(n_ranks))


@contextlib.contextmanager
def naming(option: str) -> Iterator[None]:
    """Name the option in a UsageError about its value."""
    try:
        yield
    except UsageError as error:
        raise UsageError(f"{option}: {error}") from None


def check_writable(path: Path) -> None:
    """Raise UsageError if a file cannot be written; call it before minutes of measuring."""
    try:
        path.open("ab").close()
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from None


def write(text: str, out: Path | None) -> None:
    """Write a result to a file, or to stdout if `out` is None; UsageError if that fails."""
    if out is None:
        sys.stdout.write(text)
        return
    try:
        out.write_text(text, encoding="utf-8")
        print(f"wrote {out}", file=sys.stderr)
    except OSError as error:
        raise UsageError(f"cannot write {out}: {error.strerror}") from None
