"""Compares the calls of ranks before they start, with TORCH_DISTRIBUTED_DEBUG=DETAIL.

Otherwise the call itself detects that ranks disagree, and its Work raises the error. With DETAIL
torch's own backends raise at the call, even if no thread waits for the Work.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from shoal.errors import UsageError
from shoal.frontend.torch.gpu.pieces import uneven_lengths
from shoal.group.buffers import BufferView

if TYPE_CHECKING:
    from shoal.group.group import Group

_DIGEST_BYTES: Final = 16
_TEXT_BYTES: Final = 240
_RECORD_BYTES: Final = _DIGEST_BYTES + _TEXT_BYTES


def compare_calls(
    group: Group,
    name: str,
    calls: Sequence[tuple[Any, ...]],
    rest: Sequence[object],
    alike: int | None,
    timeout_s: float,
) -> None:
    """Return when every rank has reached the same collective, with buffers `calls` and `rest`.

    `alike` is the index of the buffer with the same length on every rank, or with uneven blocks;
    None if there is no such buffer.

    Raises:
        UsageError: on every rank, with the calls of all. Nothing moved, and the group is usable.
        ShoalError: as for any call of a group.
    """
    behind = "".join(f" root {each}" if type(each) is int else f" {each}" for each in rest)
    text = ", ".join(f"{name}{_length(call, alike)}{behind}" for call in calls).encode()
    # The digest distinguishes lists with the same beginning that are cut off.
    own = hashlib.blake2b(text, digest_size=_DIGEST_BYTES).digest() + text[:_TEXT_BYTES]
    everyones = bytearray(group.size * _RECORD_BYTES)
    group.all_gather(everyones, own.ljust(_RECORD_BYTES, b"\0"), timeout_s=timeout_s)
    callers: dict[bytes, list[str]] = {}
    for rank in range(group.size):
        record = bytes(everyones[rank * _RECORD_BYTES : (rank + 1) * _RECORD_BYTES])
        callers.setdefault(record, []).append(str(rank))
    if len(callers) > 1:
        what = "; ".join(
            f"rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}: "
            + record[_DIGEST_BYTES:].rstrip(b"\0").decode(errors="replace")
            for record, ranks in callers.items()
        )
        raise UsageError(
            f"group {group.name!r}, rank {group.rank} of {group.size}: ranks call different "
            f"collectives: {what}; no data was moved"
        )


def _length(call: tuple[Any, ...], alike: int | None) -> str:
    if not call:
        return ""
    if alike is not None:
        lengths = uneven_lengths(call) or [call[alike].n_elems]
        return f" {call[alike].dtype}[{','.join(map(str, lengths))}]"
    return f" {(call[0] if isinstance(call[0], BufferView) else call[0][0]).dtype}"
