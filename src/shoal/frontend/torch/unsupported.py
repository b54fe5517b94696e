"""What torch may ask for and shoal cannot do: said at once, before anything moves."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

from shoal.errors import Unsupported

if TYPE_CHECKING:
    from shoal.frontend.torch.operations import Operations
    from shoal.group.group import Group


def describe(group: Group, operation: str) -> str:
    """The operation, in which group and by whom, as messages begin."""
    return f"{operation} in group {group.name!r} (rank {group.rank} of {group.size})"


def unsupported(what: str, instead: str) -> Unsupported:
    """The error that shoal cannot do something, with what to do instead."""
    return Unsupported(f"{what} is not supported; {instead}")


def refusing(operation: str, instead: str) -> Callable[..., NoReturn]:
    """A method that raises `Unsupported`, for an operation by the name that users know."""

    def refuse(self: Operations, *_args: Any, **_options: Any) -> NoReturn:
        raise unsupported(describe(self.group, operation), instead)

    return refuse
