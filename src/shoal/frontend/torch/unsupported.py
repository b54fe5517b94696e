"""What torch may ask for and shoal cannot do yet: said at once, before anything moves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NoReturn

from shoal.errors import Unsupported

if TYPE_CHECKING:
    from shoal.group.group import Group


class Missing(NamedTuple):
    """An operation by the name that users know, and what serves them meanwhile."""

    operation: str
    meanwhile: str


_MERGE: Final = Missing("merge_group", "start a new default group")
_RECONFIGURE: Final = Missing("reconfigure", "destroy the group and make a new one")

# Under the names by which torch's own code looks for them, of all versions.
MISSING: Final[Mapping[str, Missing]] = {
    "merge_remote_group": _MERGE,
    "mergeRemoteGroup": _MERGE,
    "merge": _MERGE,
    "shrink": Missing("shrink_group", "use shoal.torch.shrink_group"),
    "reconfigure": _RECONFIGURE,
    "get_reconfigure_handle": _RECONFIGURE,
    "new_window": Missing("new_window", "use send and recv"),
}


class NotThereYet:
    """Has a method for each line of MISSING; it raises `Unsupported`."""

    _group: Group

    def describe(self, operation: str) -> str:
        """The operation, in which group and by whom, as messages begin."""
        group = self._group
        return f"{operation} in group {group.name!r} (rank {group.rank} of {group.size})"


def _refusing(name: str, missing: Missing) -> Callable[..., NoReturn]:
    def refuse(self: NotThereYet, *_args: Any, **_options: Any) -> NoReturn:
        doing = self.describe(missing.operation)
        raise Unsupported(f"{doing} is not there yet; {missing.meanwhile}")

    refuse.__name__ = name
    refuse.__doc__ = f"Raise Unsupported: {missing.operation} is not there yet."
    return refuse


for _name, _missing in MISSING.items():
    setattr(NotThereYet, _name, _refusing(_name, _missing))
