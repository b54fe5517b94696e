"""Compares the calls of ranks before they start, with TORCH_DISTRIBUTED_DEBUG=DETAIL.

Otherwise the call itself detects that ranks disagree, and its Work raises the error. With DETAIL
torch's own backends raise at the call, even if no thread waits for the Work.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from shoal.average.agreeing import difference_among
from shoal.errors import UsageError
from shoal.frontend.torch.gpu.pieces import uneven_lengths
from shoal.group.buffers import BufferView

if TYPE_CHECKING:
    from shoal.group.group import Group


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
    parts = {
        f"part {at} of this call" if at else "this call": f"{name}{_length(call, alike)}{behind}"
        for at, call in enumerate(calls)
    }
    if len(calls) > 1:
        parts["this call"] += f", the first of {len(calls)}"
    if found := difference_among(group, None, parts, timeout_s):
        raise UsageError(f"{group}: {found}; no data was moved")


def _length(call: tuple[Any, ...], alike: int | None) -> str:
    if not call:
        return ""
    if alike is not None:
        lengths = uneven_lengths(call) or [call[alike].n_elems]
        return f" {call[alike].dtype}[{','.join(map(str, lengths))}]"
    return f" {(call[0] if isinstance(call[0], BufferView) else call[0][0]).dtype}"
