"""shoal.tensorflow over real ranks on CPUs, and the example."""

import functools
import gc
import logging
import re
import time
from typing import Any

import numpy as np
import pytest
from process.examples import equal_digits
from process.ranks import on_new_ranks, on_ranks, on_survivors
from process.stage import die, error_of

import shoal

pytest.importorskip(
    "tensorflow", reason="needs TensorFlow: `make test-frameworks` has an environment with it"
)

import keras
import tensorflow as tf

import shoal.tensorflow as st

CPU = {"CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": "3"}
DTYPES = ("float32", "float64", "float16", "bfloat16", "int8", "int32", "bool", "complex64")
SHAPES = ((), (0,), (3,), (2, 0, 2), (2, 3))
DEADLINE_S = 100.0
on_two_ranks = on_ranks(2, env=CPU, deadline_s=DEADLINE_S)


def refusal(call: Any, *given: Any) -> str:
    """Return class and text of the error that a call raises."""
    error = error_of(call, *given)
    return f"{type(error).__name__}: {error}"


@on_two_ranks
def test_sums_of_every_type_and_shape_are_right_with_and_without_functions() -> None:
    with shoal.init() as group:
        both = functools.partial(st.all_reduce, group=group)
        traced = tf.function(both, reduce_retracing=True)
        for dtype in DTYPES:
            for shape in SHAPES:
                own = tf.cast(tf.fill(shape, group.rank + 1), dtype)
                wanted = np.full(shape, 3 if dtype != "bool" else 1)
                for found in (both(own), traced(own)):
                    assert (found.dtype, found.shape) == (own.dtype, shape)
                    assert (np.array(found.numpy()) == wanted).all(), (dtype, shape, found)
        turned = tf.transpose(tf.constant([[0.0, 1], [2, 3]]))
        assert both(turned, op="avg").numpy().tolist() == [[0, 2], [1, 3]]


@on_two_ranks
def test_tracing_a_function_prints_no_warning_of_autograph() -> None:
    warnings: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    tf.get_logger().addHandler(handler)

    with shoal.init() as group:
        variable = tf.Variable([1.0, 2.0])

        @tf.function
        def step() -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(variable * variable)
            tape = st.DistributedGradientTape(tape, group)
            return tape.gradient(loss, variable), st.all_reduce(loss, group)

        gradient, total = step()
        assert (gradient.numpy().tolist(), float(total)) == ([2.0, 4.0], 10.0)
    assert warnings == []


@on_two_ranks
def test_independent_calls_of_one_function_keep_their_order_in_loops() -> None:
    def late(value: Any) -> Any:
        time.sleep(0.002 * ((group.rank + int(value)) % 3))
        return value

    def body(at: Any, found: Any) -> Any:
        value = tf.ensure_shape(tf.numpy_function(late, [at], tf.int32), ())
        return at + 1, found.write(at, st.all_reduce(value, group))

    @tf.function
    def many() -> Any:
        first = tf.TensorArray(tf.int32, 50)
        _, found = tf.while_loop(lambda at, _: at < 50, body, (0, first), parallel_iterations=10)
        one = st.all_reduce(tf.ones(()), group)
        return found.stack(), one, st.all_reduce(10 * tf.ones(()), group)

    with shoal.init() as group:
        found, one, ten = many()
        assert found.numpy().tolist() == [2 * at for at in range(50)]
        assert (float(one), float(ten)) == (2.0, 20.0)


@on_two_ranks
def test_tensorflow_and_torch_in_one_process_use_separate_groups() -> None:
    import torch
    import torch.distributed as dist

    with shoal.init() as group:
        dist.init_process_group("shoal")
        both = tf.function(functools.partial(st.all_reduce, group=group))
        for step in range(5):
            tensor = torch.full((1000,), group.rank + 1.0)
            pending = dist.all_reduce(tensor, async_op=True)
            assert (both(tf.fill([1000], group.rank + step)).numpy() == 1 + 2 * step).all()
            pending.wait()
            assert tensor.tolist() == [3.0] * 1000
        dist.destroy_process_group()


@on_two_ranks
def test_a_tape_averages_gradients_dense_and_sparse_with_one_averager() -> None:
    with shoal.init() as group:
        weight = tf.Variable([[1.0, 2.0], [3.0, 4.0]], name="weight")
        table = tf.Variable(tf.ones((4, 2)), name="table")
        unused = tf.Variable(1.0)
        sources = {"weight": weight, "rest": [table, unused]}
        points = tf.constant([[1.0, 2.0]]) * (group.rank + 1)

        def gradients() -> Any:
            with tf.GradientTape() as tape:
                picked = tf.gather(table, [group.rank, 3])
                loss = tf.reduce_sum(points @ weight) + tf.reduce_sum(picked)
            tape = st.DistributedGradientTape(tape, group, sparse_as_dense=True)
            return tape.gradient(loss, sources)

        traced = tf.function(gradients)
        for step in (gradients, traced) * 3:
            found = step()
            # Of rank 0 [[1, 1], [2, 2]], of rank 1 [[2, 2], [4, 4]]; rows 0 and 3, rows 1 and 3.
            assert found["weight"].numpy().tolist() == [[1.5, 1.5], [3.0, 3.0]]
            assert found["rest"][0].numpy().tolist() == [[0.5] * 2, [0.5] * 2, [0] * 2, [1] * 2]
            assert found["rest"][1] is None
        assert len(group.kept) == 1


def train(optimizer: Any, rank: int, size: int, *, eagerly: bool) -> Any:
    """Train a model with one rank's part of every batch."""
    keras.backend.clear_session()
    keras.utils.set_random_seed(0)
    dense = keras.layers.Dense
    model = keras.Sequential([keras.layers.Input((4,)), dense(8, activation="relu"), dense(1)])
    model.compile(optimizer, "mse", run_eagerly=eagerly)
    points = np.random.default_rng(0).standard_normal((10, 16, 4), np.float32)
    for whole in points:
        mine = np.split(whole, size)[rank]
        model.train_on_batch(mine, mine.sum(axis=1, keepdims=True))
    return model


@on_two_ranks
def test_a_distributed_optimizer_trains_as_one_rank_with_the_full_batch() -> None:
    kinds = keras.optimizers
    rates = kinds.schedules.ExponentialDecay(0.01, 10, 0.9)
    makers: list[tuple[Any, bool]] = [
        (lambda: kinds.SGD(0.02, momentum=0.9), False),
        (lambda: kinds.Adam(rates, clipnorm=0.5), True),
        (lambda: kinds.SGD(0.05, gradient_accumulation_steps=2), False),
        (lambda: kinds.LossScaleOptimizer(kinds.SGD(0.05)), False),
    ]
    with shoal.init() as group:
        for make, eagerly in makers:
            alone = train(make(), 0, 1, eagerly=eagerly)
            optimizer = st.DistributedOptimizer(make(), group)
            ours = train(optimizer, group.rank, group.size, eagerly=eagerly)
            for one, other in zip(alone.variables, ours.variables, strict=True):
                assert np.allclose(one.numpy(), other.numpy(), rtol=1e-4, atol=1e-6)
        # The object and a copy of its class and settings average; saved models do not need shoal.
        optimizer = st.DistributedOptimizer(kinds.SGD(1.0), group)
        for each in (optimizer, type(optimizer).from_config(optimizer.get_config())):
            value = keras.Variable([1.0, 1.0])
            each.apply_gradients([(keras.ops.array([2.0, 4.0]) * group.rank, value)])
            assert value.numpy().tolist() == [0.0, -1.0]
        saved = keras.saving.serialize_keras_object(optimizer)
        again = keras.saving.deserialize_keras_object(saved)
        assert type(again) is kinds.SGD
        # A variable without a gradient is skipped, as in Keras.
        one, other = keras.Variable(1.0), keras.Variable(1.0)
        fresh = st.DistributedOptimizer(kinds.SGD(1.0), group)
        with pytest.warns(UserWarning, match="Gradients do not exist"):
            fresh.apply_gradients([(keras.ops.array(1.0), one), (None, other)])
        assert (float(one.numpy()), float(other.numpy())) == (0.0, 1.0)


@on_two_ranks
def test_variables_of_tensorflow_and_keras_are_broadcast() -> None:
    with shoal.init() as group:
        numbers = tf.Variable([1.0 + group.rank, 2.0])
        flag = tf.Variable(group.rank == 1)
        half = keras.Variable(np.full((2, 2), group.rank), dtype="bfloat16", name="half")
        st.broadcast_variables([numbers, flag, half], group, root_rank=1)
        assert (numbers.numpy().tolist(), bool(flag.numpy())) == ([2.0, 2.0], True)
        assert (half.numpy() == 1).all()


@on_new_ranks(2, env=CPU, deadline_s=DEADLINE_S)
def test_wrong_calls_are_refused_and_the_group_stays_usable() -> None:
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    with shoal.init() as group:
        both = functools.partial(st.all_reduce, group=group)
        ones = tf.ones(3)
        table = tf.Variable(tf.ones((4, 2)), name="table")
        used = keras.optimizers.SGD()
        used.build([keras.Variable(1.0)])
        mirrored = tf.distribute.MirroredStrategy(["cpu:0", "cpu:1"])

        def second() -> Any:
            with tf.GradientTape() as tape:
                tape.watch(ones)
                total = both(ones)
            return tape.gradient(total, ones)

        def gradient(source: Any, **options: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.gather(table, [0]))
            return st.DistributedGradientTape(tape, group, **options).gradient(loss, source)

        def of_mixed() -> Any:
            keras.mixed_precision.set_dtype_policy("mixed_float16")
            try:
                return st.DistributedOptimizer(keras.optimizers.SGD(), group)
            finally:
                keras.mixed_precision.set_dtype_policy("float32")

        other = tf.Variable(tf.ones(2 + group.rank), name="other")
        no_gradients = "Unsupported: shoal.s calls have no gradients"
        rows = r"Unsupported: the gradient of '0 table:0' is sparse \(IndexedSlices\); pass sparse_"
        at_once = ".*UsageError: broadcast_variables runs outside tf.function"
        named = r"UsageError: .*'1 other:0' is not the same on all ranks: float32\[2\] on rank 0"
        no_keras = "UsageError: .* takes an optimizer of Keras 3, not 3"
        for call, wanted in (
            (second, no_gradients),
            (tf.function(second), f".*{no_gradients}"),
            (lambda: gradient(table), rows),
            (lambda: gradient(other), "UsageError: there is nothing to average"),
            (lambda: both(tf.constant("a")), "UsageError: unknown dtype"),
            (lambda: both(ones, op="mean"), "UsageError: unknown operation 'mean'"),
            (lambda: tf.function(both, jit_compile=True)(ones), "InvalidArgumentError: "),
            (lambda: mirrored.run(both, (ones,)), "Unsupported: .* do not use tf.distribute"),
            (tf.function(lambda: st.broadcast_variables([table], group)), at_once),
            (lambda: st.broadcast_variables([table, other], group), named),
            (lambda: st.DistributedOptimizer(used, group), "UsageError: .* before its first step"),
            (lambda: st.DistributedOptimizer(3, group), no_keras),
            (of_mixed, "Unsupported: under mixed_float16 .*LossScaleOptimizer"),
        ):
            found = refusal(call)
            assert re.match(wanted, found, re.DOTALL), (wanted, found)
        assert both(ones).numpy().tolist() == [2.0] * 3  # the group is usable


@on_two_ranks
def test_errors_of_the_group_reach_a_program_from_functions() -> None:
    group = shoal.init(timeout_s=30.0)
    total = tf.function(lambda x: st.all_reduce(x, group), reduce_retracing=True)
    differ = refusal(total, tf.ones(3 + group.rank))
    group = group.shrink()
    part = group.subgroup([0, 1], "part")
    dropped = tf.function(functools.partial(st.all_reduce, group=part))
    concrete = dropped.get_concrete_function(tf.TensorSpec((2,)))
    assert concrete(tf.ones(2)).numpy().tolist() == [2.0, 2.0]
    del part, dropped
    gc.collect()
    assert "the program dropped this group" in refusal(concrete, tf.ones(2))
    later = tf.function(lambda x: st.all_reduce(x, group))
    assert later(tf.ones(2)).numpy().tolist() == [2.0, 2.0]
    group.close()
    assert "it was closed" in refusal(later, tf.ones(2))
    assert refusal(st.all_reduce, tf.ones(2), group).startswith("Closed: ")
    assert "called all_reduce float32[3] sum" in differ
    assert "but rank 1" in differ


# The deadline is less than that of the calls.
@on_survivors(3, 1, env=CPU, deadline_s=70.0)
def test_a_lost_rank_fails_a_function_and_the_survivors_go_on() -> None:
    group = shoal.init(timeout_s=90.0)

    @tf.function
    def total(x: Any) -> Any:
        return st.all_reduce(x, group)

    total(tf.ones(300_000))
    if group.rank == 1:
        die()
    error = refusal(total, tf.ones(300_000))
    group = group.shrink()
    assert float(st.all_reduce(tf.ones(()), group)) == 2.0
    group.close()
    assert re.match(r"UnknownError: .*PeerLost: rank 1 ", error, re.DOTALL)


def test_the_example_equals_one_rank_with_all_samples() -> None:
    assert equal_digits("tensorflow_train.py") > 5
