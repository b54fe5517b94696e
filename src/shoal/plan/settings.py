"""The environment variables that the planner reads."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, NamedTuple

from shoal import schedule
from shoal.codec import Codec, parse_wire
from shoal.errors import UsageError
from shoal.plan.channels import channels_from
from shoal.plan.wire import link_from
from shoal.settings import n_paths

if TYPE_CHECKING:
    from shoal.plan.cluster import LinkCost
    from shoal.plan.tuning import Tuning


class Forced(NamedTuple):
    """`SHOAL_ALGO`: its text, an algorithm for all collectives that have it, and names for some.

    `everywhere` is a name, or empty; `by_collective` has pairs of collective and name.
    """

    text: str = ""
    everywhere: str = ""
    by_collective: tuple[tuple[str, str], ...] = ()

    def of(self, collective: str) -> str:
        """Return the name for a collective; empty: the planner chooses."""
        return dict(self.by_collective).get(collective, self.everywhere)

    def is_for(self, collective: str) -> bool:
        """Return True if the variable names the collective; names that cannot serve are logged."""
        return collective in dict(self.by_collective)


def forced_from(environ: Mapping[str, str] = os.environ) -> Forced:
    """Read `SHOAL_ALGO`, such as `ring` or `all_reduce:ring,broadcast:chain`.

    Raises:
        UsageError: no such algorithm, or not for this collective; the message lists the known ones.
    """
    text = environ.get("SHOAL_ALGO", "").strip()
    everywhere, by_collective = "", []
    for part in filter(None, (part.strip() for part in text.split(","))):
        collective, colon, name = (word.strip() for word in part.partition(":"))
        if colon:
            if why := _why_not(collective, name):
                raise UsageError(f"SHOAL_ALGO={part!r}: {why}")
            by_collective.append((collective, name))
        elif everywhere:
            raise UsageError(
                f"SHOAL_ALGO={text!r} names both {everywhere} and {part} for all collectives; "
                "write collective:name for some"
            )
        else:
            if all(_why_not(collective, part) for collective in schedule.ALGORITHMS):
                known = sorted({name for names in schedule.ALGORITHMS.values() for name in names})
                raise UsageError(
                    f"SHOAL_ALGO={part!r} is not an algorithm; known are {', '.join(known)}, "
                    f"{schedule.MORE_ALL_REDUCES}"
                )
            everywhere = part
    return Forced(text, everywhere, tuple(by_collective))


def _why_not(collective: str, name: str) -> str:
    """Return the reason why a collective does not have an algorithm; empty if it has it."""
    try:
        schedule.find(collective, name)
    except UsageError as error:
        return str(error)
    return ""


class Settings(NamedTuple):
    """All settings; they must be equal on all ranks.

    Args:
        forced: `SHOAL_ALGO`.
        link: `SHOAL_LINK`, the costs of the links between hosts; None: not set.
        tuning: the contents of the file `SHOAL_TUNING`.
        refuse: `SHOAL_TUNING_MISMATCH`: True if a tuning file of another cluster is an error.
        wire: `SHOAL_WIRE`, the encoding of large sums between hosts.
        channels: `SHOAL_CHANNELS`, the channels between hosts; 0: the planner chooses.
        n_paths: `SHOAL_PATHS`, in which ranks may differ.
        servers: `SHOAL_SERVERS` and `SHOAL_SERVERS_REQUIRED`, as written; empty: none.
    """

    forced: Forced = Forced()
    link: LinkCost | None = None
    tuning: Tuning | None = None
    refuse: bool = True
    wire: Codec = Codec.IDENTITY
    channels: int = 0
    n_paths: int = 1
    servers: str = ""

    @classmethod
    def read(cls, environ: Mapping[str, str] = os.environ) -> Settings:
        """Read the environment and the tuning file that it names; UsageError if that fails."""
        _log_if_asked(environ)
        path = environ.get("SHOAL_TUNING", "")
        return cls(
            forced=forced_from(environ),
            link=link_from(environ),
            tuning=_tuning_at(path) if path else None,
            refuse=_one_of(environ, "SHOAL_TUNING_MISMATCH", ("refuse", "ignore")) == "refuse",
            wire=_wire_from(environ),
            channels=channels_from(environ),
            n_paths=n_paths(environ),
            servers=_servers_from(environ),
        )


def _wire_from(environ: Mapping[str, str]) -> Codec:
    try:
        return parse_wire(environ.get("SHOAL_WIRE") or Codec.IDENTITY)
    except UsageError as error:
        raise UsageError(f"SHOAL_WIRE: {error}") from None


def _servers_from(environ: Mapping[str, str]) -> str:
    """Return both variables, for comparison; `shoal.group.pool` reads them."""
    servers = environ.get("SHOAL_SERVERS", "").replace(" ", "").strip(",")
    required = environ.get("SHOAL_SERVERS_REQUIRED", "").strip("0 ")
    if required and not servers:
        raise UsageError(
            f"SHOAL_SERVERS_REQUIRED={environ['SHOAL_SERVERS_REQUIRED']!r}, but SHOAL_SERVERS "
            "names no server; set both, or neither"
        )
    return servers and f"{servers} {environ.get('SHOAL_SERVERS_REQUIRED') or 0}"


def _one_of(environ: Mapping[str, str], name: str, known: tuple[str, ...]) -> str:
    value = environ.get(name, known[0])
    if value not in known:
        raise UsageError(f"{name}={value!r} must be one of {', '.join(filter(None, known))}")
    return value


_LEVELS: Final = ("", "INFO", "DEBUG")


def _log_if_asked(environ: Mapping[str, str]) -> None:
    """Log to stderr from the level in `SHOAL_DEBUG` on; does so once in a process."""
    level = _one_of(environ, "SHOAL_DEBUG", _LEVELS)
    log = logging.getLogger("shoal")
    if level and not any(isinstance(handler, _Stderr) for handler in log.handlers):
        handler = _Stderr(sys.stderr)
        handler.setFormatter(logging.Formatter("shoal %(levelname)s %(message)s"))
        log.addHandler(handler)
        log.setLevel(level)


class _Stderr(logging.StreamHandler):  # type: ignore[type-arg]
    """A separate class, so that the handler is added only once."""


def _tuning_at(path: str) -> Tuning:
    # Imported here since few jobs have such a file.
    from pathlib import Path

    from shoal.plan.tuning import read_tuning

    return read_tuning(Path(path))
