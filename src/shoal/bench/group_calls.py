"""The calls of shoal's own Group."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from shoal.bench.collectives import there_and_back

if TYPE_CHECKING:
    from shoal.bench.collectives import Bind, Call, On


def _ping_pong(on: On, data: Any, other: Any) -> Call:
    send = partial(on.group.send, data, on.rank ^ 1)
    recv = partial(on.group.recv, other, on.rank ^ 1)
    return there_and_back(on, send, recv)


GROUP_CALLS: Final[Mapping[str, Bind]] = MappingProxyType(
    {
        "all_reduce": lambda on, data, _: partial(on.group.all_reduce, data, on.op),
        "broadcast": lambda on, data, _: partial(on.group.broadcast, data, on.root),
        "reduce": lambda on, data, _: partial(on.group.reduce, data, on.root, on.op),
        "all_gather": lambda on, data, other: partial(on.group.all_gather, other, on.own(data)),
        "reduce_scatter": lambda on, data, other: partial(
            on.group.reduce_scatter, on.own(other), data, on.op
        ),
        "gather": lambda on, data, other: partial(
            on.group.gather, other if on.is_root else None, on.own(data), on.root
        ),
        "scatter": lambda on, data, other: partial(
            on.group.scatter, on.own(other), data if on.is_root else None, on.root
        ),
        "all_to_all": lambda on, data, other: partial(on.group.all_to_all, other, data),
        "send_recv": _ping_pong,
        "barrier": lambda on, _data, _other: on.group.barrier,
    }
)
