"""Narrow wires: names, algorithms and costs; and block formats, compared with ml_dtypes."""

import ctypes

import ml_dtypes
import mx
import numpy as np
import pytest

from shoal._native import encoded_bytes
from shoal.codec import CODECS, Codec, parse_wire
from shoal.dtypes import DType, Op
from shoal.engine import make_plan, round_to
from shoal.errors import UsageError
from shoal.plan import Planner, default_cluster
from shoal.plan.choose import choose
from shoal.plan.defaults import wire_of
from shoal.plan.settings import Settings, forced_from
from shoal.plan.tuning import Tuning
from shoal.schedule import ALGORITHMS, find
from shoal.shapes import Shape, describe

SLOW = wire_of(100)
FOUR_HOSTS = default_cluster((0, 1, 2, 3), wire=SLOW)
TWO_BY_TWO = default_cluster((0, 0, 1, 1), wire=SLOW)
ONE_HOST = default_cluster((0,) * 4)
SIZES = [0, *(1 << power for power in range(29))]
BF16 = Codec.BF16


def test_names_and_numbers_of_codecs_equal_those_of_the_wire() -> None:
    names = ["identity", "bf16", "fp16", "mxfp8", "mxint8", "mxfp4"]
    assert [*CODECS] == [str(one) for one in CODECS.values()] == names
    assert [one.number for one in CODECS.values()] == list(range(len(names)))
    assert parse_wire("bf16") is parse_wire(BF16) is BF16
    assert Settings.read({"SHOAL_WIRE": "bf16"}).wire is BF16
    assert Settings.read({"SHOAL_WIRE": ""}).wire is Settings.read({}).wire is Codec.IDENTITY
    for unknown in ("", "BF16", "bfloat16", 1, None):
        with pytest.raises(UsageError, match="identity, bf16"):
            parse_wire(unknown)


@pytest.mark.parametrize("codec", [one for one in CODECS.values() if one.is_narrow], ids=str)
def test_the_bytes_of_elements_equal_those_of_the_native_core(codec: Codec) -> None:
    for n_elems in (*range(200), 4095, 4096, 4097, 1_000_003):
        assert codec.bytes_of(n_elems) == encoded_bytes(codec.number, codec.keep, n_elems)
    assert Codec.IDENTITY.bytes_of(7) == 28
    if str(codec) in mx.FORMATS:
        assert all(codec.bytes_of(n) == mx.bytes_of(str(codec), n) for n in range(100))


@pytest.mark.parametrize("collective", ["all_reduce", "reduce_scatter"])
@pytest.mark.parametrize("cluster", [FOUR_HOSTS, TWO_BY_TWO, default_cluster(tuple(range(300)))])
def test_the_planner_takes_an_algorithm_that_encodes_once(collective: str, cluster: object) -> None:
    for n_bytes in SIZES:
        choice = choose(collective, n_bytes, cluster, codec=BF16)  # type: ignore[arg-type]
        assert find(collective, choice.name).encodes_once, choice


def test_algorithms_that_encode_once_are_sharded_between_hosts() -> None:
    # contract/test_weighted.py proves that sharded reduction sends each contribution once.
    once = [f"{c} {n}" for c in ALGORITHMS for n, one in ALGORITHMS[c].items() if one.encodes_once]
    assert {*once} == {"all_reduce sharded", "all_reduce fairring", "reduce_scatter direct"}


def test_a_narrow_wire_halves_the_time_of_a_nic() -> None:
    wide = choose("all_reduce", 1 << 28, FOUR_HOSTS, "sharded")
    narrow = choose("all_reduce", 1 << 28, FOUR_HOSTS, "sharded", codec=BF16)
    assert narrow.cost_us == pytest.approx(wide.cost_us / 2, rel=0.01)
    for n_bytes in SIZES:  # inside a host nothing changes
        narrow = choose("all_reduce", n_bytes, ONE_HOST, codec=BF16)
        assert narrow == choose("all_reduce", n_bytes, ONE_HOST)
    # Times of a wide wire do not decide for a narrow one.
    times = {"all_reduce": {1024: {"ring": 1.0, "sharded": 2.0}}}
    planner = Planner(FOUR_HOSTS, tuning=Tuning(FOUR_HOSTS.hosts, FOUR_HOSTS.n_cores, times))
    assert planner.choose("all_reduce", 1024).name == "ring"
    assert find("all_reduce", planner.choose("all_reduce", 1024, codec=BF16).name).encodes_once


def test_a_forced_algorithm_is_used_unless_it_would_round_repeatedly() -> None:
    flat = ("ring", "all_reduce:tree", "direct", "doubling", "halving", "ring_2d")
    for text in (*flat, *(f"sharded/{name}" for name in ("tree", "ring", *flat[2:5]))):
        planner = Planner(TWO_BY_TWO, forced_from({"SHOAL_ALGO": text}), title="group 'g'")
        assert planner.choose("all_reduce", 1024).why == "set by SHOAL_ALGO"
        with pytest.raises(UsageError, match="every hop"):
            planner.choose("all_reduce", 1024, codec=BF16)
        inside = Planner(ONE_HOST, forced_from({"SHOAL_ALGO": text}))
        assert inside.choose("all_reduce", 1024, codec=BF16).why == "set by SHOAL_ALGO"
    for name in ("sharded", "sharded[4*1|]", "ring/sharded"):
        planner = Planner(TWO_BY_TWO, forced_from({"SHOAL_ALGO": f"all_reduce:{name}"}))
        assert planner.choose("all_reduce", 1024, codec=BF16).name == name


def test_ranks_must_agree_on_the_wire_and_on_rounding_own_parts() -> None:
    wide = Shape("all_reduce", "sharded", DType.FLOAT32, Op.SUM, 5, 0, 2, hosts=(0, 1))
    narrow = wide._replace(codec=BF16)
    described = {describe(shape) for shape in (wide, narrow, narrow._replace(rounds_own=True))}
    assert len(described) == 3
    with pytest.raises(ValueError, match="needs a narrow codec"):
        make_plan(wide._replace(rounds_own=True))
    data = (ctypes.c_float * 4)(1.0, 1 + 2**-8, 1 + 3 * 2**-8, -3.0)
    round_to(BF16, DType.FLOAT32, ctypes.addressof(data), 3)
    assert list(data) == [1.0, 1.0, 1 + 2**-6, -3.0]
    for dtype in (DType.INT32, DType.FLOAT64):
        with pytest.raises(ValueError, match="does not support this dtype"):
            round_to(BF16, dtype, ctypes.addressof(data), 1)


FLOATS = {"mxfp8": ml_dtypes.float8_e4m3fn, "mxfp4": ml_dtypes.float4_e2m1fn}


def blocks(n_blocks: int, seed: int) -> mx.Floats:
    """Return blocks of any scale, with zeros, and elements far below the largest."""
    random = np.random.default_rng(seed)
    values = random.normal(size=(n_blocks, mx.BLOCK)) * (random.random((n_blocks, mx.BLOCK)) > 0.1)
    near = random.integers(-12, 1, size=values.shape)
    scales = random.integers(-150, 125, size=(n_blocks, 1))
    return np.ldexp(values, near + scales).astype(np.float32).ravel()


@pytest.mark.parametrize("name", FLOATS)
def test_elements_are_rounded_as_in_ml_dtypes(name: str) -> None:
    values = np.random.default_rng(1).normal(size=(2000, mx.BLOCK)).astype(np.float32)
    middles = (mx.FORMATS[name].magnitudes[1:] + mx.FORMATS[name].magnitudes[:-1]) / 2
    middles = np.resize(np.concatenate([middles, -middles]), (20, mx.BLOCK))
    largest = mx.FORMATS[name].magnitudes[-1]
    values = np.float32(np.concatenate([values * largest / 4, middles]).clip(-largest, largest))
    values[:, 0] = largest  # so that the scale is one
    expected = values.astype(FLOATS[name]).astype(np.float32)
    round_to(CODECS[name], DType.FLOAT32, values.ctypes.data, values.size)
    np.testing.assert_array_equal(values, expected)


@pytest.mark.parametrize("name", mx.FORMATS)
def test_native_rounding_is_as_in_numpy(name: str) -> None:
    anything = np.random.default_rng(5).integers(0, 1 << 32, 20_000, np.uint32).view(np.float32)
    for values in (blocks(30_000, 6), anything, blocks(2, 7)[:45]):
        rounded, expected = np.array(values), mx.rounded(name, values)
        round_to(CODECS[name], DType.FLOAT32, rounded.ctypes.data, len(rounded))
        np.testing.assert_array_equal(rounded, expected, strict=True)
        signs = np.signbit(expected) | np.isnan(rounded)
        np.testing.assert_array_equal(np.signbit(rounded) | np.isnan(rounded), signs)
