"""Writes the state of a process. Never overwrites a file and never blocks for ever."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import socket
import tempfile
from pathlib import Path
from typing import Any, Final

from shoal import threads
from shoal.errors import ShoalError, UsageError

_LOG: Final = logging.getLogger("shoal")

_NAME: Final = "shoal-dump-%h-rank%r-%p"
_MOST_OF_ONE_NAME: Final = 1000

# A network file system may hang. After this time the writer thread goes on alone.
_PATIENCE_S: Final = 5.0


def pattern_of_job() -> str | None:
    """Return the path pattern for files at a deadline or signal; None: write no files."""
    wanted = os.environ.get("SHOAL_DUMP", "")
    return None if wanted == "off" else wanted or tempfile.gettempdir() + os.sep


def check_folder() -> None:
    """Raise UsageError if this process can write no files where `SHOAL_DUMP` names a place.

    Creates nothing: most jobs write no files.
    """
    wanted, host = os.environ.get("SHOAL_DUMP", ""), socket.gethostname()
    if wanted in ("", "off"):
        return
    folder = Path(os.path.dirname(stem_of(wanted, None, host, os.getpid())))
    is_created = wanted.endswith(os.sep) or "%" in os.path.dirname(wanted)
    existing = next(one for one in (folder, *folder.parents) if os.path.exists(one))
    if existing != folder and not is_created:
        why = f"the folder {folder} does not exist: create it, or end the name with {os.sep}"
    elif not existing.is_dir():
        why = f"{existing} is not a folder: name another place"
    elif not os.access(existing, os.W_OK | os.X_OK):
        why = f"this user may not write to {existing}: name another place"
    else:
        return
    raise UsageError(
        f"SHOAL_DUMP={wanted!r} cannot be used on {host}: {why}, or set SHOAL_DUMP=off to write "
        "no files"
    )


def stem_of(pattern: str, rank: int | None, host: str, pid: int) -> str:
    """Return the path of one process's files, without the extension.

    In a folder (one that exists, the empty name, or one that ends in a slash) the files get a
    default name.
    In any other name %r is the rank, %h the host, %p the process and %% a percent sign. The rank
    is added to a name with neither %r nor %p, since all ranks get the same pattern.
    """
    if not pattern or pattern.endswith(os.sep) or os.path.isdir(pattern):
        pattern = os.path.join(pattern, _NAME)
    elif pattern.endswith((".json", ".txt")):
        pattern = pattern.rpartition(".")[0]
    if not re.search(r"(?<!%)(%%)*%[rp]", pattern):
        pattern += "-rank%r"
    # A host name may hold any character.
    safe_host = re.sub(r"[^A-Za-z0-9._-]", "_", host)
    values = {"r": str(pid if rank is None else rank), "h": safe_host, "p": str(pid), "%": "%"}
    return re.sub("%([rhp%])", lambda found: values[found[1]], pattern)


def write(state: dict[str, Any], text: str, pattern: str) -> tuple[Path, ...]:
    """Write the JSON file and the text file, and return their paths in this order.

    Existing files are never written to. A failure is logged, and the result is empty.
    """
    outcome: list[tuple[Path, ...]] = []

    def work() -> None:
        stem = pattern
        try:
            stem = stem_of(pattern, state["rank"], state["host"], state["pid"])
            outcome.append(_write(stem, json.dumps(state, indent=1) + "\n", text))
        except (OSError, ValueError) as error:  # ValueError: a name with a NUL in it
            _LOG.warning("the state of this rank cannot be written to %s: %s", stem, error)

    try:
        writer = threads.start("shoal-dump-writer", work)
    except ShoalError as error:
        _LOG.warning("the state of this rank cannot be written to %s: %s", pattern, error)
        return ()
    writer.join(_PATIENCE_S)
    if writer.is_alive():
        _LOG.warning("writing %s takes longer than %g s; it goes on", pattern, _PATIENCE_S)
    return outcome[0] if outcome else ()


def _write(stem: str, *contents: str) -> tuple[Path, ...]:
    folder = os.path.dirname(stem)
    if folder:
        os.makedirs(folder, exist_ok=True)
    for n in range(1, _MOST_OF_ONE_NAME + 1):
        name = stem if n == 1 else f"{stem}-{n}"
        paths = (Path(name + ".json"), Path(name + ".txt"))
        with contextlib.suppress(FileExistsError):
            _create(paths, contents)
            return paths
    raise FileExistsError(f"there are {_MOST_OF_ONE_NAME} files of this name already")


def _create(paths: tuple[Path, ...], contents: tuple[str, ...]) -> None:
    """Create all of the files, or none."""
    made: list[Path] = []
    try:
        for path, content in zip(paths, contents, strict=True):
            # NOT readable by other users of the folder: the file names hosts and calls.
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            made.append(path)
            with open(fd, "w", encoding="utf-8", errors="backslashreplace") as file:
                file.write(content)
    except OSError:
        for path in made:
            with contextlib.suppress(OSError):
                path.unlink()
        raise
