"""shoal.jax over real ranks on JAX's CPU devices, and the example."""

import functools
import gc
import os
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from process.examples import equal_digits
from process.ranks import on_new_ranks, on_ranks, on_survivors
from process.stage import die, error_of

from shoal.average import ErrorFeedback

pytest.importorskip("jax", reason="needs JAX: `make test-frameworks` has an environment with it")

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import shoal.jax

CPU = {"JAX_PLATFORMS": "cpu"}
TWO_DEVICES = CPU | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
DTYPES = ("float32", "float16", "bfloat16", "int8", "int32", "uint16", "bool", "complex64")
SHAPES = ((), (0,), (3,), (2, 0, 2), (2, 3))


def refusal(call: Any, *given: Any) -> str:
    """Return class and text of the error that a call or its results raise."""
    error = error_of(lambda: jax.block_until_ready(call(*given)))
    return f"{type(error).__name__}: {error}"


@on_ranks(2, env=CPU)
def test_sums_of_every_type_and_shape_are_right_with_and_without_jit() -> None:
    with shoal.init() as group:
        for dtype in DTYPES:
            for shape in SHAPES:
                own = jnp.full(shape, group.rank + 1, dtype)
                wanted = np.full(shape, 3 if dtype != "bool" else 1).astype(own.dtype)
                both = functools.partial(shoal.jax.all_reduce, group=group)
                for found in (both(own), jax.jit(both)(own)):
                    assert (found.dtype, found.shape) == (own.dtype, shape)
                    assert (np.asarray(found) == wanted).all(), (dtype, shape, found)
        assert float(shoal.jax.all_reduce(group.rank, group, "avg")) == 0  # an int, which truncates
        assert shoal.jax.all_reduce(np.ones(2), group).dtype == "float32"  # as JAX does


@on_ranks(2, env=CPU)
def test_jax_and_torch_in_one_process_use_separate_groups() -> None:
    import torch
    import torch.distributed as dist

    with shoal.init() as group:
        dist.init_process_group("shoal")
        both = jax.jit(functools.partial(shoal.jax.all_reduce, group=group))
        for step in range(5):
            tensor = torch.full((1000,), group.rank + 1.0)
            pending = dist.all_reduce(tensor, async_op=True)
            assert (np.asarray(both(jnp.full(1000, group.rank + step))) == 1 + 2 * step).all()
            pending.wait()
            assert tensor.tolist() == [3.0] * 1000
        dist.destroy_process_group()


@on_ranks(2, env=CPU)
def test_each_tree_is_averaged_in_fusion_buffers_by_one_averager() -> None:
    with shoal.init() as group:
        tree = {f"{at}": jnp.full((at, 3), group.rank + at, jnp.float32) for at in range(40)}
        tree = {"layers": tree, "scale": jnp.bfloat16(2 * group.rank), "none": None}
        under_jit = jax.jit(lambda given: shoal.jax.average(given, group))
        for average in (lambda given: shoal.jax.average(given, group), under_jit) * 3:
            found = average(tree)
            assert jax.tree.structure(found) == jax.tree.structure(tree)
            assert (float(found["scale"]), found["scale"].dtype) == (1.0, jnp.bfloat16)
            for at, leaf in found["layers"].items():
                assert np.asarray(leaf).tolist() == [[int(at) + 0.5] * 3] * int(at)
        layers = tree["layers"]
        narrow = shoal.jax.average(layers, group, compress=ErrorFeedback("bf16"))
        assert float(narrow["7"][0, 0]) == 7.5
        first = shoal.jax.broadcast(tree, group, root=1)
        assert float(first["scale"]) == 2.0
        assert float(first["layers"]["7"][0, 0]) == 8.0
        averagers = [averager for averager, _ in group.kept.values()]
        # Under jit and outside the tree has one averager; compress needs another.
        assert len(averagers) == 2
        assert len(averagers[0].layout.buffers) == 2  # one for each type


@on_ranks(2, env=CPU)
def test_loops_branches_and_donated_buffers_are_right() -> None:
    with shoal.init() as group:
        both = functools.partial(shoal.jax.all_reduce, group=group)
        own = jnp.arange(3.0) + group.rank  # the sum is 1, 3, 5
        for _ in range(2):  # the second time from the cache
            doubled = jax.jit(lambda x: jax.lax.scan(lambda c, _: (both(c), c[0]), x, None, 3)[0])
            assert doubled(own).tolist() == [4.0, 12.0, 20.0]
            branch = jax.jit(lambda x: jax.lax.cond(x[0] < 9, both, lambda x: x, x))
            assert branch(own).tolist() == [1.0, 3.0, 5.0]
        loop = jax.jit(lambda x: jax.lax.while_loop(lambda c: c[0] < 30, both, x))
        assert loop(jnp.ones(1)).tolist() == [32.0]
        donated = jax.jit(both, donate_argnums=0)
        assert donated(jnp.arange(1000.0) + group.rank)[-1] == 2 * 999 + 1
        kept = jax.jit(lambda x: (both(x), x))(own)  # in place, except for arrays used elsewhere
        assert (kept[0].tolist(), kept[1].tolist()) == ([1.0, 3.0, 5.0], own.tolist())
        assert own.tolist() == [group.rank + at for at in range(3)]
        if group.rank == 0:  # tracing makes no call, also for a constant array
            assert jax.eval_shape(both, own).shape == (3,)
            assert jax.eval_shape(lambda: both(own)).shape == (3,)
        constant = jax.jit(lambda x: both(own) * x)
        assert constant(2.0).tolist() == constant(2.0).tolist() == [2.0, 6.0, 10.0]


@on_new_ranks(2, env=CPU)
def test_independent_calls_of_one_function_keep_their_order_on_one_core() -> None:
    # One core, so that JAX has one thread: a callback that waited for another would hang.
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    with shoal.init() as group:

        def slow(x: Any) -> Any:
            return jnp.tanh(x @ x / 300)

        @jax.jit
        def both(x: Any, y: Any) -> Any:
            x, y = (slow(slow(x)), y) if group.rank else (x, slow(slow(y)))
            return shoal.jax.all_reduce(0 * x + 1, group), shoal.jax.all_reduce(0 * y + 10, group)

        x = jnp.ones((300, 300))
        for _ in range(20):
            one, ten = both(slow(x), x)  # dispatched before its arguments are ready
            x = one
        assert (float(one.min()), float(one.max())) == (2.0, 2.0)
        assert (float(ten.min()), float(ten.max())) == (20.0, 20.0)


@on_ranks(2, env=CPU)
def test_threads_may_make_named_calls() -> None:
    found = [0.0] * 3
    with shoal.init() as group:

        def work(at: int) -> None:
            named = functools.partial(shoal.jax.all_reduce, group=group, name=f"thread {at}")
            total = jax.jit(named)
            for _ in range(50):
                found[at] = float(total(jnp.full(1000, float(at)))[-1])

        with ThreadPoolExecutor(3) as threads:
            list(threads.map(work, range(3)))
    assert found == [0.0, 2.0, 4.0]


@on_new_ranks(2, env=TWO_DEVICES)
def test_wrong_calls_are_refused_and_the_group_stays_usable() -> None:
    with shoal.init() as group:
        both = functools.partial(shoal.jax.all_reduce, group=group)
        average = functools.partial(shoal.jax.average, group=group)
        ones = jnp.ones((2, 4))
        rows = NamedSharding(Mesh(jax.devices(), "i"), PartitionSpec("i"))
        spread = jax.shard_map(
            both, mesh=rows.mesh, in_specs=rows.spec, out_specs=rows.spec, check_vma=False
        )
        sharded = jax.device_put(ones, rows)
        differing = [jnp.ones(2 + group.rank)]
        no_gradients = "Unsupported: shoal.s calls have no gradients"
        no_vmap = "Unsupported: shoal.jax does not run under vmap"
        no_pmap = "Unsupported: .* outside pmap and shard_map"
        gather_first = "Unsupported: .* is sharded over 2 devices; gather it first"
        at_once = "UsageError: shoal.jax.broadcast runs outside jit"
        named = r"UsageError: .*\[0\].* is not the same on all ranks: float32\[2\] on rank 0"
        for call, wanted in (
            (lambda: jax.grad(lambda x: both(x).sum())(ones), no_gradients),
            (lambda: jax.grad(lambda x: jax.jit(both)(x).sum())(ones), no_gradients),
            (lambda: jax.vmap(both)(ones), no_vmap),
            (lambda: jax.vmap(jax.jit(both))(ones), no_vmap),
            (lambda: jax.pmap(both)(ones), no_pmap),
            (lambda: jax.jit(spread)(ones), no_pmap),
            (lambda: both(sharded), gather_first),
            (lambda: jax.jit(both)(sharded), "JaxRuntimeError: .*sharding"),
            (lambda: jax.jit(both)(ones.astype("float8_e4m3fn")), "UsageError: unknown dtype"),
            (lambda: both(jax.random.key(0)), "UsageError: unknown dtype key<fry>"),
            (lambda: both(ones, op="mean"), "UsageError: unknown operation 'mean'"),
            (lambda: average({"flags": ones > 0}), "UsageError: .* there is no average of"),
            (lambda: average({}), "UsageError: there is nothing to average"),
            (lambda: jax.jit(lambda x: shoal.jax.broadcast(x, group))(ones), at_once),
            (lambda: average(differing), named),
        ):
            found = refusal(call)
            assert re.match(wanted, found, re.DOTALL), (wanted, found)
        assert both(ones).tolist() == [[2.0] * 4] * 2  # the group is usable


@on_ranks(2, env=CPU)
def test_errors_of_the_group_reach_a_program_from_compiled_functions() -> None:
    group = shoal.init(timeout_s=30.0)
    total = jax.jit(lambda x: shoal.jax.all_reduce(x, group))
    differ = refusal(total, jnp.ones(3 + group.rank))
    group = group.shrink()  # the same ranks; compiled functions call the old group or the new one
    old, total = total, jax.jit(lambda x, group=group: shoal.jax.all_reduce(x, group))
    assert total(jnp.ones(2)).tolist() == [2.0, 2.0]
    part = group.subgroup([0, 1], "part")
    dropped = jax.jit(functools.partial(shoal.jax.all_reduce, group=part))
    dropped(jnp.ones(2)).block_until_ready()
    lowered = dropped.lower(jnp.ones(2)).compile()
    del part, dropped
    gc.collect()
    lost = refusal(lowered, jnp.ones(2))
    group.close()
    closed = refusal(total, jnp.ones(2))
    for text in (differ, lost, closed, refusal(old, jnp.ones(2))):
        assert text.startswith("JaxRuntimeError: ")
    assert "rank 0" in differ
    assert "called all_reduce float32[3] sum" in differ
    assert "but rank 1" in differ
    assert "Closed: " in lost
    assert "the program dropped this group" in lost
    assert "it was closed" in closed
    assert refusal(shoal.jax.average, [jnp.ones(2)], group).startswith("Closed: ")


# The deadline is less than that of the calls.
@on_survivors(3, 1, env=CPU, deadline_s=40.0)
def test_a_lost_rank_fails_a_compiled_function_and_the_survivors_go_on() -> None:
    group = shoal.init(timeout_s=60.0)
    average = jax.jit(lambda tree: shoal.jax.average(tree, group))
    tree = {"a": jnp.ones(300_000), "b": jnp.ones(5)}
    average(tree)["a"].block_until_ready()
    if group.rank == 1:
        die()
    error = refusal(average, tree)
    group = group.shrink()
    assert shoal.jax.average(tree, group)["b"].tolist() == [1.0] * 5
    group.close()
    assert re.match(r"JaxRuntimeError: .*PeerLost: rank 1 ", error, re.DOTALL)


def test_the_example_equals_one_rank_with_all_samples() -> None:
    assert equal_digits("jax_train.py") > 5


@on_ranks(2, env=CPU)
def test_a_call_outside_jit_follows_the_calls_of_unfinished_functions() -> None:
    def body(_: Any, value: Any) -> Any:
        return jnp.tanh(value @ value) / 8

    with shoal.init() as group:
        heavy = jax.jit(lambda value, n: jax.lax.fori_loop(0, n, body, value))
        total = jax.jit(lambda own, late: shoal.jax.all_reduce(own + 0 * late[0, 0], group))
        start, one, ten = jnp.ones((300, 300)) / 100, jnp.ones(4), 10 * jnp.ones(4)
        jax.block_until_ready((total(one, heavy(start, 1)), shoal.jax.all_reduce(ten, group)))
        for step in range(10):
            group.barrier()
            inner = total(one, heavy(start, 300 if (step + group.rank) % 2 else 1))
            outer = shoal.jax.all_reduce(ten, group)
            assert (float(inner[0]), float(outer[0])) == (2.0, 20.0), step
            inner = total(one, heavy(start, 300 if (step + group.rank) % 2 else 1))
            raw = np.full(4, 10, np.float32)
            group.all_reduce(raw)
            assert (float(inner[0]), float(raw[0])) == (2.0, 20.0), step
