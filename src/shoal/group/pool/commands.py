"""The commands of the lowest worker to the pool threads of all workers: messages in `Control`."""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

MEETING_S: Final = 3.0
"""The time in which a view forms. A server that is gone by then delays the others this long."""

N_BYTES: Final = 16
"""The length of a command."""

_FORMAT: Final = struct.Struct("<BBxxxxxxQ")
_FORM, _END = 1, 2


class Form(NamedTuple):
    """Form a view; rank 0 then broadcasts with which servers."""

    view: int


class End(NamedTuple):
    """End a view: once its calls have ended, or at once if a server of it is lost."""

    view: int
    is_lost: bool


Command = Form | End


def encode(command: Command) -> bytes:
    """Return the command as `N_BYTES` bytes."""
    if isinstance(command, Form):
        return _FORMAT.pack(_FORM, 0, command.view)
    return _FORMAT.pack(_END, command.is_lost, command.view)


def decode(data: bytes) -> Command:
    """Return the command that `encode` wrote; ValueError for anything else."""
    kind, flag, view = _FORMAT.unpack(data)
    if kind == _FORM:
        return Form(view)
    if kind != _END:
        raise ValueError(f"a command of kind {kind}")
    return End(view, bool(flag))
