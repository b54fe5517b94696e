"""Averages TensorFlow's gradients, under the names that users of Horovod know; docs/arrays.md.

In a `tf.function` the group is called from `tf.numpy_function`: TensorFlow runs such operations in
the order in which they were traced.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import tensorflow as tf

from shoal.dtypes import parse_dtype, parse_op
from shoal.errors import Unsupported, UsageError, without_internals
from shoal.frontend import arrays

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from shoal.dtypes import Op
    from shoal.group.group import Group


@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
@without_internals
def all_reduce(
    tensor: Any,
    group: Group,
    op: Op | str = "sum",
    *,
    wire: str | None = None,
    name: str | None = None,
) -> tf.Tensor:
    """Return a tensor reduced over all ranks: the same bits on every rank. Works in `tf.function`.

    Args:
        tensor: has the same shape and dtype on every rank.
        op, wire: as for `Group.all_reduce`.
        name: matches the call with the other ranks' calls of this name, for several threads.

    Raises:
        UsageError: the dtype does not support the operation (nothing was sent), or ranks passed
            different tensors (the group has ended).
        Unsupported: `tf.distribute` runs several replicas. A tape raises it for the gradient of
            this call.
        ShoalError: as for every call of the group. In a `tf.function` the program gets an error of
            `tf.errors` that contains the text.
    """
    tensor = tf.convert_to_tensor(tensor)
    group.check_fold("all_reduce", parse_dtype(tensor.dtype), parse_op(op))

    def call(live: Group, hosts: list[Any]) -> None:
        live.all_reduce(hosts[0], op, wire=wire, name=name)

    return _call(group, call, [tensor])[0]


@without_internals
def broadcast_variables(variables: Sequence[Any], group: Group, root_rank: int = 0) -> None:
    """Assign the values of rank `root_rank` to variables. NOT in a `tf.function`.

    Args:
        variables: TensorFlow's or Keras's, with the same shapes and dtypes in the same order on
            every rank.

    Raises:
        UsageError: the ranks' variables or roots differ, there is no rank `root_rank`, or it is
            called in a `tf.function`.
        ShoalError: as for every call of the group.
    """
    if not tf.executing_eagerly():
        raise UsageError("broadcast_variables runs outside tf.function; call it before training")
    variables = list(variables)
    hosts = [np.array(variable.numpy(), order="C") for variable in variables]
    arrays.broadcast(group, hosts, _names(variables), root_rank)
    for variable, host in zip(variables, hosts, strict=True):
        variable.assign(host)


class DistributedGradientTape:
    """A `tf.GradientTape` whose `gradient` returns averages over all ranks, in fusion buffers.

    All ranks request the gradients of the same variables. The first call creates their averager,
    which is kept until the group is closed.

    Args:
        tape: its other methods are unchanged.
        sparse_as_dense: convert IndexedSlices, the gradients of embeddings, to dense tensors.
        options: `wire` and `compress`, as for `shoal.average.Averager`.
    """

    def __init__(
        self,
        tape: tf.GradientTape,
        group: Group,
        sparse_as_dense: bool = False,
        **options: Unpack[arrays.Options],
    ) -> None:
        self._tape = tape
        self._averages = functools.partial(_averages, group, sparse_as_dense, options)

    def __enter__(self) -> DistributedGradientTape:
        self._tape.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._tape.__exit__(*error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tape, name)

    @without_internals
    def gradient(self, target: Any, sources: Any, *args: Any, **named: Any) -> Any:
        """Return the averaged gradients; arguments and structure are as in `tf.GradientTape`.

        Raises:
            UsageError: ranks request different gradients, none exists, or one has no average.
            Unsupported: one is sparse, or `tf.distribute` runs several replicas.
            ShoalError: as `all_reduce` does.
        """
        gradients = self._tape.gradient(target, sources, *args, **named)
        flat = tf.nest.flatten(gradients)
        averages = self._averages(flat, tf.nest.flatten(sources))
        return tf.nest.pack_sequence_as(gradients, averages)


@without_internals
def DistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: Any,
    group: Group,
    sparse_as_dense: bool = False,
    **options: Unpack[arrays.Options],
) -> Any:
    """Return a Keras 3 optimizer that averages gradients over all ranks before it applies them.

    It has the class and the settings of `optimizer`, so a saved model loads without shoal. It works
    in `model.fit` and in custom loops. Do not combine it with a `DistributedGradientTape`, which
    would average gradients twice.

    Args:
        optimizer: one that has not made a step.
        sparse_as_dense, options: as for `DistributedGradientTape`.

    Raises:
        UsageError: it is not a Keras 3 optimizer, or it has made a step.
        Unsupported: Keras has another backend than TensorFlow, or the policy is `mixed_float16` and
            `optimizer` is no `LossScaleOptimizer`.
    """
    kind: Any = type(optimizer)
    if not hasattr(optimizer, "apply") or not hasattr(kind, "from_config"):
        raise UsageError(f"DistributedOptimizer takes an optimizer of Keras 3, not {optimizer!r}")
    if keras.backend.backend() != "tensorflow":
        raise Unsupported(
            f"DistributedOptimizer needs Keras over TensorFlow, not {keras.backend.backend()}; set "
            "KERAS_BACKEND=tensorflow"
        )
    scales = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    if keras.mixed_precision.dtype_policy().name == "mixed_float16" and not scales:
        raise Unsupported(
            "under mixed_float16 each rank would skip steps by its own gradients; use "
            "DistributedOptimizer(keras.optimizers.LossScaleOptimizer(optimizer), group)"
        )
    if optimizer.built:
        raise UsageError("DistributedOptimizer takes an optimizer before its first step")

    def apply(self: Any, grads: Sequence[Any], trainable_variables: Any = None) -> Any:
        known = trainable_variables is None
        variables = list(self._trainable_variables if known else trainable_variables)
        averages = _averages(group, sparse_as_dense, options, list(grads), variables)
        return kind.apply(self, averages, trainable_variables)

    own = {"apply": apply, "__module__": kind.__module__}
    averaging: Any = type(kind.__name__, (kind,), own)
    return averaging.from_config(optimizer.get_config())


# NOT converted by AutoGraph, which rewrites functions called by a `tf.function`: it gains nothing
# here, and warns about syntax that it does not know.
@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
def _averages(
    group: Group,
    sparse_as_dense: bool,
    options: arrays.Options,
    gradients: Sequence[Any],
    sources: Sequence[Any],
) -> list[Any]:
    """Average the gradients of sources; None stays None."""
    if all(gradient is None for gradient in gradients):
        raise UsageError("there is nothing to average: no source has a gradient")
    there, names, dense = list[int](), list[str](), list[tf.Tensor]()
    for place, (gradient, name) in enumerate(zip(gradients, _names(sources), strict=True)):
        if isinstance(gradient, tf.IndexedSlices) and not sparse_as_dense:
            raise Unsupported(
                f"the gradient of {name!r} is sparse (IndexedSlices); pass sparse_as_dense=True to "
                "average it as a dense tensor"
            )
        if gradient is not None:
            there.append(place)
            names.append(name)
            dense.append(tf.convert_to_tensor(gradient))
    average_all = functools.partial(arrays.average, names=names, options=options)
    averages = dict(zip(there, _call(group, average_all, dense), strict=True))
    return [averages.get(place) for place in range(len(gradients))]


def _names(variables: Sequence[Any]) -> list[str]:
    """Return the variables' names with their places, since names may repeat."""
    named = [
        getattr(variable, "path", None) or getattr(variable, "name", "")
        if isinstance(variable, tf.Variable | keras.Variable)
        else ""
        for variable in variables
    ]
    return [f"{place} {name}".rstrip() for place, name in enumerate(named)]


def _call(
    group: Group, call: Callable[[Group, list[Any]], None], tensors: Sequence[tf.Tensor]
) -> list[tf.Tensor]:
    """Run a call on NumPy copies, now or when the traced function runs, and return the results."""
    if tf.distribute.get_strategy().num_replicas_in_sync > 1:
        raise Unsupported("shoal.tensorflow has one replica per rank: do not use tf.distribute")
    live = arrays.borrowed(group)

    def on_host(*given: Any) -> list[Any]:
        hosts = [np.array(array, order="C") for array in given]
        call(live(), hosts)
        return hosts

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def without_gradient(*values: tf.Tensor) -> Any:
        if tf.executing_eagerly():
            found = on_host(*(value.numpy() for value in values))
            return [tf.convert_to_tensor(host) for host in found], arrays.refuse_gradient
        plain = tf.autograph.experimental.do_not_convert(on_host)
        found = tf.numpy_function(plain, values, [value.dtype for value in values])
        for result, value in zip(found, values, strict=True):
            result.set_shape(value.shape)
        return found, arrays.refuse_gradient

    return list(without_gradient(*tensors))
