"""Averages, sums and broadcasts JAX arrays; docs/arrays.md.

A function under jit calls the group from a JAX callback. decisions/0083 has the reasons.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback
from jax.experimental.buffer_callback import buffer_callback

from shoal.dtypes import parse_dtype, parse_op
from shoal.errors import Unsupported, UsageError, without_internals
from shoal.frontend import arrays

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from shoal.dtypes import Op
    from shoal.group.group import Group


@without_internals
def all_reduce(
    array: Any,
    group: Group,
    op: Op | str = "sum",
    *,
    wire: str | None = None,
    name: str | None = None,
) -> jax.Array:
    """Return `array` reduced over all ranks: the same bits on every rank. Works under jit on a CPU.

    Args:
        array: a JAX array, or any argument of `jnp.asarray`, with the same shape on every rank.
        op, wire: as for `Group.all_reduce`.
        name: matches the call with the other ranks' calls of this name, for several threads.

    Raises:
        UsageError: the dtype does not support the operation (nothing was sent), or ranks passed
            different arrays (the group has ended).
        Unsupported: the array is sharded; it is called under `vmap`, `pmap`, `shard_map` or a
            gradient; or a function under jit does not run on a CPU.
        ShoalError: as for every call of the group. Under jit the program gets a
            `jax.errors.JaxRuntimeError` that contains the text.
    """
    array = _as_array(array)
    group.check_fold("all_reduce", parse_dtype(array.dtype), parse_op(op))
    is_traced = _is_traced([array])

    def call(live: Group, hosts: list[Any]) -> None:
        matched_by = _name_in_jit(live) if is_traced and name is None else name
        live.all_reduce(hosts[0], op, wire=wire, name=matched_by)

    return _call(group, call, [array])[0]


@without_internals
def average(tree: Any, group: Group, **options: Unpack[arrays.Options]) -> Any:
    """Return a pytree averaged over all ranks, in fusion buffers. Works under jit on a CPU.

    Every rank passes a tree with the same names, shapes and dtypes. The first call with such a tree
    creates its averager, which is kept until the group is closed. With error feedback, trees of
    equal models need different names: `{"critic1": tree}`.

    Args:
        tree: gradients or other arrays; numbers become arrays, None stays None.
        options: `wire` and `compress`, as for `shoal.average.Averager`.

    Raises:
        UsageError: the tree has no arrays, or a dtype has no average, or the ranks' trees or
            options differ.
        Unsupported, ShoalError: as `all_reduce` does.
    """
    names, leaves, rebuild = _flatten(tree)
    average_all = functools.partial(arrays.average, names=names, options=options)
    return rebuild(_call(group, average_all, leaves))


@without_internals
def broadcast(tree: Any, group: Group, root: int = 0) -> Any:
    """Return the pytree of rank `root`, such as its initial parameters. NOT under jit.

    Args:
        tree: has the same names, shapes and dtypes on every rank.

    Raises:
        UsageError: the ranks' trees or roots differ, there is no rank `root`, or it is called under
            jit.
        Unsupported, ShoalError: as `all_reduce` does.
    """
    names, leaves, rebuild = _flatten(tree)
    if _is_traced(leaves):
        raise UsageError("shoal.jax.broadcast runs outside jit: call it before the training step")
    broadcast_all = functools.partial(arrays.broadcast, names=names, root=root)
    return rebuild(_call(group, broadcast_all, leaves))


# ---- arrays in host memory ----


def _flatten(tree: Any) -> tuple[list[str], list[jax.Array], Callable[[Any], Any]]:
    found, structure = jax.tree_util.tree_flatten_with_path(tree)
    names = [jax.tree_util.keystr(path) or "the array" for path, _ in found]
    leaves = [_as_array(leaf) for _, leaf in found]
    return names, leaves, lambda new: jax.tree_util.tree_unflatten(structure, new)


def _as_array(leaf: Any) -> jax.Array:
    """Return an array or tracer, with JAX's default dtype: float32 for a Python float."""
    array = leaf if isinstance(leaf, jax.Array) else jnp.asarray(leaf)
    if not isinstance(array, jax.core.Tracer) and len(array.devices()) > 1:
        raise Unsupported(
            f"an array of shape {array.shape} is sharded over {len(array.devices())} devices; "
            "gather it first: jax.device_put(array, jax.devices()[0])"
        )
    return array


def _is_traced(leaves: Sequence[Any]) -> bool:
    """Return True if the call is being compiled, even if its arrays are constants."""
    return any(isinstance(leaf, jax.core.Tracer) for leaf in (*leaves, jnp.asarray(0)))


_Call = Callable[["Group", list[Any]], None]
"""Calls a group with NumPy arrays, which it overwrites."""


def _call(group: Group, call: _Call, given: Sequence[jax.Array]) -> list[jax.Array]:
    """Run the call on NumPy copies of the arrays, and return the results."""
    if _is_traced(given):
        return _in_jit(group, call, given)
    hosts = [np.array(array, order="C") for array in given]
    # An earlier function under jit may still run on a JAX thread and call the group after this
    # call, but before it on other ranks. Its error is raised where its results are used.
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        jax.effects_barrier()
    call(group, hosts)
    # Nothing writes to these arrays any more, so JAX may keep them.
    return [
        jax.device_put(host, array.sharding) if array.committed else jnp.asarray(host)
        for host, array in zip(hosts, given, strict=True)
    ]


# ---- under jit ----

_N_NAMES: Final = 64
_n_calls: Final[weakref.WeakKeyDictionary[Group, Iterator[int]]] = weakref.WeakKeyDictionary()


def _name_in_jit(group: Group) -> str:
    """Return a name for the next call under jit, the same on all ranks.

    The name keeps it apart from calls of the group's own methods. These may run before it on one
    rank and after it on another, because JAX runs compiled functions on its own threads.
    """
    return f"jit/{next(_n_calls.setdefault(group, itertools.count())) % _N_NAMES}"


_MARK: Final = jax.ShapeDtypeStruct((), np.int32)


def _in_jit(group: Group, call: _Call, given: Sequence[jax.Array]) -> list[jax.Array]:
    """Let the compiled program call the group, in the order in which calls were traced.

    The call takes a mark from a callback with ordered effects, and passes one to another such
    callback. So calls wait for each other, but not for a JAX thread.
    """
    if jax.default_backend() != "cpu":
        raise Unsupported(
            f"shoal.jax runs under jit only on a CPU, not on {jax.default_backend()}; call it "
            "outside jit, between the function that computes gradients and the one that uses them"
        )
    if jax.sharding.get_abstract_mesh().manual_axes:
        raise Unsupported(
            "shoal.jax runs on one device of each rank; call it outside pmap and shard_map"
        )
    live = arrays.borrowed(group)  # JAX keeps compiled functions forever

    def run(_context: Any, outputs: Any, *_inputs: Any) -> None:
        *hosts, mark = (np.asarray(output) for output in outputs)
        call(live(), hosts)
        mark[...] = 0

    def launch(*values: jax.Array) -> list[jax.Array]:
        shapes = [jax.ShapeDtypeStruct(value.shape, value.dtype) for value in values]
        in_place = {index: index for index in range(len(values))}
        mark = io_callback(lambda: np.int32(0), _MARK, ordered=True)
        calling = buffer_callback(
            run, [*shapes, _MARK], has_side_effect=True, input_output_aliases=in_place
        )
        results: list[jax.Array] = calling(*values, mark)
        io_callback(lambda _: None, None, results.pop(), ordered=True)
        return results

    without_vmap = jax.custom_batching.custom_vmap(launch)
    without_vmap.def_vmap(_refuse_vmap)
    without_gradient = jax.custom_jvp(without_vmap)
    without_gradient.defjvp(arrays.refuse_gradient)
    results: list[jax.Array] = without_gradient(*given)
    return results


def _refuse_vmap(*_given: Any) -> Any:
    raise Unsupported("shoal.jax does not run under vmap; call it with the whole array")
