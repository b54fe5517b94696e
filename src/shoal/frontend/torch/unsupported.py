"""What torch may ask for and shoal cannot do yet: said at once, before anything moves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NoReturn

from shoal.errors import Unsupported

if TYPE_CHECKING:
    from shoal.group import Group


class Missing(NamedTuple):
    """An operation by the name that users know, and what serves them meanwhile."""

    operation: str
    meanwhile: str


_GLOO: Final = "or a Gloo group beside this one, dist.new_group(backend='gloo')"
_GATHER: Final = Missing("gather", f"use all_gather (or all_gather_object), {_GLOO}")
_ALL_TO_ALL: Final = Missing("all_to_all", f"use all_gather, or isend and irecv, {_GLOO}")
_COALESCING: Final = Missing("coalescing of mixed operations", "start them with async_op=True")
_SPLIT: Final = Missing("split_group", "use dist.new_group")
_MERGE: Final = Missing("merge_group", "start a new default group")
_RECONFIGURE: Final = Missing("reconfigure", "destroy the group and make a new one")

# Under the names by which torch's own code looks for them, of all versions.
MISSING: Final[Mapping[str, Missing]] = {
    "reduce": Missing("reduce", f"use all_reduce, {_GLOO}"),
    "gather": _GATHER,
    "gather_single": _GATHER,
    "scatter": Missing("scatter", f"use broadcast (or broadcast_object_list), {_GLOO}"),
    "alltoall": _ALL_TO_ALL,
    "all_to_all_single": _ALL_TO_ALL,
    "alltoall_base": _ALL_TO_ALL,
    "allreduce_sparse": Missing("all_reduce of sparse tensors", "pass tensor.to_dense()"),
    "recv_anysource": Missing("recv from any source", "name the source"),
    "monitored_barrier": Missing("monitored_barrier", "use barrier with a timeout"),
    "_start_coalescing": _COALESCING,
    "start_coalescing": _COALESCING,
    "split_group": _SPLIT,
    "splitGroup": _SPLIT,
    "split": _SPLIT,
    "merge_remote_group": _MERGE,
    "mergeRemoteGroup": _MERGE,
    "merge": _MERGE,
    "shrink": Missing("shrink_group", "use dist.new_group with the ranks that are left"),
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
