"""The job key: one secret that every rank of a job holds, and the keys derived from it.

A connection is used only after both ends have proved that they hold the key
(native/transport/handshake.h). The proof authenticates the connection but does not encrypt it. An
eavesdropper could try short keys against a recorded proof, so use a long random key:
`openssl rand -hex 32 > key; chmod 600 key`.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from typing import Final

from shoal.engine import pair_key
from shoal.errors import UsageError

__all__ = ["HOW_TO_SET_KEY", "N_KEY_BYTES", "job_key", "pair_key", "random_key"]

N_KEY_BYTES: Final = 32  # of a random key: the width of SHA-256
_MIN_BYTES: Final = 16  # 128 bits if random; shorter keys are passwords
_MAX_BYTES: Final = 4096  # a longer file is not a key but a mistake
HOW_TO_SET_KEY: Final = (
    "SHOAL_KEY_FILE (or SHOAL_KEY) must hold the same key on every rank, or be unset on every rank"
)


def job_key(environ: Mapping[str, str] = os.environ) -> bytes | None:
    """Return the key given by `SHOAL_KEY_FILE`, else by `SHOAL_KEY`, else None.

    Raises UsageError, which does not show the key, for a file that is missing, not regular, another
    user's or open to others, and for a key of fewer than 16 bytes.
    """
    path = environ.get("SHOAL_KEY_FILE")
    if path:
        return _check(_read(path), f"SHOAL_KEY_FILE={path}")
    text = environ.get("SHOAL_KEY")
    if text:
        return _check(os.fsencode(text), "SHOAL_KEY")
    return None


def random_key() -> bytes:
    """Return a new random key, for a job without a key."""
    return os.urandom(N_KEY_BYTES)


def _read(path: str) -> bytes:
    try:
        # O_NONBLOCK: a pipe named by mistake must NOT hang the job at start.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise UsageError(f"SHOAL_KEY_FILE={path} cannot be read: {error.strerror}") from error
    try:
        # Of the open file, NOT of the path: another file might be moved there in between.
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise UsageError(f"SHOAL_KEY_FILE={path} is not a regular file")
        if found.st_uid != os.geteuid():
            raise UsageError(
                f"SHOAL_KEY_FILE={path} belongs to user {found.st_uid}, but this process "
                f"runs as user {os.geteuid()}: use a file that you own"
            )
        if found.st_mode & 0o077:
            raise UsageError(
                f"SHOAL_KEY_FILE={path} has mode {stat.S_IMODE(found.st_mode):04o}, so other users "
                f"may read the key: chmod 600 {path}"
            )
        return os.read(fd, _MAX_BYTES + 1).rstrip(b"\r\n")
    finally:
        os.close(fd)


def _check(key: bytes, where: str) -> bytes:
    if not _MIN_BYTES <= len(key) <= _MAX_BYTES:
        raise UsageError(
            f"{where} holds {len(key)} bytes; expected {_MIN_BYTES} to {_MAX_BYTES}, for example "
            "the output of `openssl rand -hex 32`"
        )
    return key
