"""Averages and broadcasts NumPy arrays: the core of the front ends for array frameworks.

Each call passes a group and arrays, so this module keeps averagers from call to call.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, TypedDict

from shoal.average import Averager, ChunkTopK, ErrorFeedback
from shoal.average.agreeing import agree
from shoal.average.lacking import end_group
from shoal.average.layout import ArraySpec
from shoal.errors import Closed, Unsupported

if TYPE_CHECKING:
    from shoal.group.group import Group


# Averagers kept for a group. Without a limit, arrays with changing shapes would fill the memory.
_MOST_KEPT: Final = 32


class Options(TypedDict, total=False):
    """Options of an average, as for `shoal.average.Averager`."""

    wire: str | None
    compress: str | ErrorFeedback | ChunkTopK | None


def average(group: Group, arrays: Sequence[Any], names: Sequence[str], options: Options) -> None:
    """Average NumPy arrays over all ranks, in place; every rank calls it with the same specs.

    The first call with these names, shapes and dtypes creates an averager, which is kept until the
    group is closed or newer averagers replace it. Raises UsageError as `Averager` does, also if
    arrays differ between ranks in that call; ShoalError as `Averager.wait` does. Ctrl-C ends the
    group.
    """
    specs = tuple(map(ArraySpec.of, names, arrays))
    key = (specs, *options.items())
    if key not in group.kept:
        if len(group.kept) >= _MOST_KEPT:  # equal on all ranks: they make the same calls
            group.kept.pop(min(group.kept, key=_has_residuals))
        named = {spec.name: (spec.shape, spec.dtype) for spec in specs}
        with _uninterrupted(group, Exception):
            group.kept[key] = Averager(group, named, **options), threading.Lock()
    averager, lock = group.kept[key]
    with lock:  # an averager serves one thread at a time
        try:
            with _uninterrupted(group):
                _step(averager, arrays)
        except BaseException:  # the step has not ended, and another cannot begin
            group.kept.pop(key, None)
            raise


@contextlib.contextmanager
def _uninterrupted(group: Group, *harmless: type[Exception]) -> Iterator[None]:
    """End the group after an error, even Ctrl-C: the other ranks would wait until the deadline.

    Args:
        harmless: errors that do not end it.
    """
    try:
        yield
    except harmless:
        raise
    except BaseException as error:
        if group.ended() is None:
            by = type(error).__name__
            end_group(group, f"{by} interrupted an average of arrays on rank {group.rank}")
        raise


def _has_residuals(key: Any) -> bool:
    """Return True if an averager with these options keeps residuals, which are lost with it."""
    compress = dict(key[1:]).get("compress")
    return compress is not None and not isinstance(compress, str)


def _step(averager: Averager, arrays: Sequence[Any]) -> None:
    places = list(averager.begin().values())
    # From the last array to the first, as the layout expects: buffers are sent during the copies.
    order = range(len(arrays))[::-1]
    for index in order:
        places[index][...] = _bits(arrays[index])
        averager.ready(index)
    averager.send_rest()
    for index in order:
        averager.wait_for(index)
        _bits(arrays[index])[...] = places[index]
    averager.wait()


def _bits(array: Any) -> Any:
    """View a bfloat16 array as its bits, as `Averager.begin` does."""
    return array.view("uint16") if array.dtype.name == "bfloat16" else array


def broadcast(group: Group, arrays: Sequence[Any], names: Sequence[str], root: int) -> None:
    """Overwrite contiguous NumPy arrays with the arrays of rank `root`; every rank calls it.

    Raises:
        UsageError: names, shapes or dtypes differ; the text has the first difference and the ranks.
        ShoalError: as for every call of the group, which has ended.
    """
    specs = list(map(ArraySpec.of, names, arrays))
    agree(group, "broadcast of arrays", specs, {"root": root})
    works = [group.broadcast(array, root, async_op=True) for array in arrays]
    for work in works:
        if work is not None:
            work.wait()


def borrowed(group: Group) -> Callable[[], Group]:
    """Return a function for compiled programs that returns the group without keeping it alive.

    It raises Closed if the program has dropped the group.
    """
    held, name = weakref.ref(group), str(group)

    def live() -> Group:
        if (found := held()) is None:
            raise Closed(
                f"{name}: the program dropped this group, but a function compiled with it called "
                "it; trace the function again with an open group"
            )
        return found

    return live


def refuse_gradient(*_given: Any) -> Any:
    """Raise Unsupported, in place of the derivative of any call of a front end."""
    raise Unsupported(
        "shoal's calls have no gradients; compute the gradient of each rank's own loss, and "
        "average it"
    )
