"""Whether JSON that another process wrote has the fields and types of a dataclass."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import UnionType
from typing import Any, Final, get_args, get_origin, get_type_hints

_MOST: Final = 2.0**64  # above every counter, and below what arithmetic on floats overflows at


def fits(value: Any, kind: Any) -> bool:
    """Return True if `value` is as JSON holds this dataclass, Mapping, tuple, union or scalar.

    Other fields may be there too. Numbers are finite.
    """
    origin, args = get_origin(kind), get_args(kind)
    if dataclasses.is_dataclass(kind):
        fields = get_type_hints(kind).items()
        return isinstance(value, dict) and all(
            name in value and fits(value[name], of) for name, of in fields
        )
    if origin is UnionType:
        return any(fits(value, of) for of in args)
    if origin is Mapping:
        return isinstance(value, dict) and all(fits(one, args[1]) for one in value.values())
    if origin is tuple:
        n = len(value) if isinstance(value, list) else -1
        kinds = [args[0]] * n if args[-1] is Ellipsis else args
        return n == len(kinds) and all(map(fits, value, kinds))
    if kind in (int, float):
        return type(value) in (int, kind) and abs(value) <= _MOST
    return type(value) is kind
