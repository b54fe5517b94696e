"""Names, sizes and numbers of dtypes and operations, with NumPy and torch as the oracle."""

import numpy as np
import pytest
import torch

from shoal import _native as native
from shoal.dtypes import DType, Op, parse_dtype, parse_op
from shoal.errors import UsageError
from shoal.schedule import Buffer


def test_numbers_of_dtypes_equal_those_of_the_wire_and_of_the_native_core() -> None:
    # New entries follow these.
    names = ["float32", "float64", "float16", "bfloat16", "int8", "int16", "int32", "int64"]
    names += ["uint8", "bool", "complex64", "complex128", "uint16", "uint32", "uint64"]
    assert [str(dtype) for dtype in sorted(DType)][:15] == names
    ops = ["sum", "avg", "product", "min", "max", "band", "bor", "bxor"]
    assert [str(op) for op in sorted(Op)][:8] == ops
    assert [(str(dtype), dtype.n_bytes) for dtype in DType] == native.dtypes()
    assert [str(op) for op in Op] == native.fold_ops()
    assert list(map(int, DType)) == list(range(len(DType)))
    assert list(map(int, Op)) == list(range(len(Op)))
    assert list(map(int, Buffer)) == list(range(native.N_BUFFERS))
    assert [buffer.name for buffer in Buffer] == ["DATA", "INPUT", "OUTPUT", "SCRATCH"]


@pytest.mark.parametrize("name", [str(one) for one in DType if one is not DType.BFLOAT16])
def test_a_numpy_dtype_and_its_scalar_type_and_its_name_are_the_same(name: str) -> None:
    dtype = parse_dtype(np.dtype(name))
    assert str(dtype) == f"{dtype}" == name
    assert parse_dtype(np.dtype(name).type) is parse_dtype(name) is parse_dtype(dtype) is dtype
    assert dtype.n_bytes == np.dtype(name).itemsize


def test_torch_dtypes_and_operations_are_recognised_by_name() -> None:
    for dtype in DType:
        theirs = getattr(torch, str(dtype))
        assert parse_dtype(theirs) is dtype
        assert dtype.n_bytes == theirs.itemsize
    for op in Op:
        assert parse_op(str(op)) is parse_op(op) is op


def test_an_unknown_name_is_an_error_that_lists_the_known_ones() -> None:
    with pytest.raises(UsageError, match="byte order"):
        parse_dtype(np.dtype(np.float32).newbyteorder("S"))
    for dtype in ("float8", "Float32", "", int, 0, None, object()):
        with pytest.raises(UsageError, match=r"^unknown dtype .*; give one of float32, .*, uint64"):
            parse_dtype(dtype)
    for op in ("mean", "SUM", "", 0, None, ["sum"]):
        with pytest.raises(UsageError, match=r"^unknown operation .*; give one of sum, .*, bxor$"):
            parse_op(op)
