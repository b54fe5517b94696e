"""What TORCH_DISTRIBUTED_DEBUG=DETAIL adds: ranks compare their calls before they make them.

Without it the call itself finds out that ranks disagree, and its Work says so. With it torch's own
backends raise at the call, whether or not anybody waits for the Work.
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


def compare_calls(group: Group, words: str, timeout_s: float) -> None:
    """Return when every rank has come to the same collective.

    Args:
        words: what this rank calls, as `in_words` says it.

    Raises:
        UsageError: on every rank, names what each kind of rank calls. Nothing has moved, and the
            group goes on.
        ShoalError: as of any call of a group.
    """
    text = words.encode()
    # The digest tells apart lists that begin alike and are cut off.
    own = hashlib.blake2b(text, digest_size=_DIGEST_BYTES).digest() + text[:_TEXT_BYTES]
    everyones = bytearray(group.size * _CALL_BYTES)
    group.all_gather(everyones, own.ljust(_CALL_BYTES, b"\0"), timeout_s=timeout_s)
    callers: dict[bytes, list[int]] = {}
    for rank in range(group.size):
        begin = rank * _CALL_BYTES
        callers.setdefault(bytes(everyones[begin : begin + _CALL_BYTES]), []).append(rank)
    if len(callers) > 1:
        what = "; ".join(_who_calls_what(call, ranks) for call, ranks in callers.items())
        raise UsageError(
            f"group {group.name!r}, rank {group.rank} of {group.size}: ranks call different "
            f"collectives: {what}; nothing has moved"
        )


_DIGEST_BYTES: Final = 16
_TEXT_BYTES: Final = 240
_CALL_BYTES: Final = _DIGEST_BYTES + _TEXT_BYTES


def in_words(
    name: str, calls: Sequence[tuple[Any, ...]], rest: Sequence[object], alike: int | None
) -> str:
    """Calls as far as every rank must make the same.

    Args:
        name: of the group's method; `calls` has its buffers for each tensor, `rest` the root and
            the fold.
        alike: the buffer that is as long on every rank, or one of uneven blocks; None if none is.
    """
    behind = "".join(f" root {each}" if type(each) is int else f" {each}" for each in rest)
    return ", ".join(f"{name}{_length(call, alike)}{behind}" for call in calls)


def _length(call: tuple[Any, ...], alike: int | None) -> str:
    if not call:
        return ""
    if alike is not None:
        lengths = uneven_lengths(call) or [call[alike].n_elems]
        return f" {call[alike].dtype}[{','.join(map(str, lengths))}]"
    return f" {(call[0] if isinstance(call[0], BufferView) else call[0][0]).dtype}"


def _who_calls_what(call: bytes, ranks: list[int]) -> str:
    words = call[_DIGEST_BYTES:].rstrip(b"\0").decode(errors="replace")
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}: {words}"
