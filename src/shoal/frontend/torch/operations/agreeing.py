"""What TORCH_DISTRIBUTED_DEBUG=DETAIL adds: ranks hear what the others call before they do it.

Without it the call itself finds out that ranks disagree, and its Work says so. With it torch's own
backends raise at the call, whether or not anybody waits for the Work.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from torch._C._distributed_c10d import DebugLevel, ProcessGroup, get_debug_level

from shoal.dtypes import Op
from shoal.errors import UsageError
from shoal.group.buffers import Span

if TYPE_CHECKING:
    from shoal.group.group import Group


def debugging(group: object) -> bool:
    """Whether a group has to do it: torch wraps a Backend, but not a ProcessGroup in Python."""
    return isinstance(group, ProcessGroup) and get_debug_level() == DebugLevel.DETAIL


def agree(group: Group, name: str, calls: Sequence[tuple[Any, ...]], timeout_s: float) -> None:
    """Return when every rank has come to the same collective.

    Args:
        name: of the group's method; `calls` has its arguments for each tensor.

    Raises:
        UsageError: on every rank, names what each kind of rank calls. Nothing has moved, and the
            group goes on.
        ShoalError: as of any call of a group.
    """
    words = ", ".join(_in_words(name, call) for call in calls).encode()
    # The digest tells apart lists that begin alike and are cut off.
    card = hashlib.blake2b(words, digest_size=_DIGEST_BYTES).digest() + words[:_WORD_BYTES]
    cards = bytearray(group.size * _CARD_BYTES)
    group.all_gather(cards, card.ljust(_CARD_BYTES, b"\0"), timeout_s=timeout_s)
    callers: dict[bytes, list[int]] = {}
    for rank in range(group.size):
        begin = rank * _CARD_BYTES
        callers.setdefault(bytes(cards[begin : begin + _CARD_BYTES]), []).append(rank)
    if len(callers) > 1:
        what = "; ".join(_told(card, ranks) for card, ranks in callers.items())
        raise UsageError(
            f"group {group.name!r}, rank {group.rank} of {group.size}: ranks call different "
            f"things: {what}; nothing has moved"
        )


_DIGEST_BYTES: Final = 16
_WORD_BYTES: Final = 240
_CARD_BYTES: Final = _DIGEST_BYTES + _WORD_BYTES

# The argument that is as long on every rank: the first, except where that is the gathered whole.
_ALIKE: Final = {"all_gather": 1, "gather": 1}


def _in_words(name: str, call: tuple[Any, ...]) -> str:
    """A call as far as every rank must make the same."""
    words = [name]
    if call:
        span = call[_ALIKE.get(name, 0)]
        if name == "all_to_all":  # lengths differ from rank to rank
            words.append(str((span if isinstance(span, Span) else span[0]).dtype))
        else:
            words.append(f"{span.dtype}[{span.n_elems}]")
    for argument in call:
        if isinstance(argument, Op):
            words.append(str(argument))
        elif isinstance(argument, int):
            words.append(f"root {argument}")
    return " ".join(words)


def _told(card: bytes, ranks: list[int]) -> str:
    words = card[_DIGEST_BYTES:].rstrip(b"\0").decode(errors="replace")
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}: {words}"
