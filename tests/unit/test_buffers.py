"""Objects that shoal accepts as memory, and errors for others."""

import array
import ctypes
import mmap
import sys

import ml_dtypes
import numpy as np
import pytest
import torch

import shoal
from shoal.dtypes import DType
from shoal.errors import UsageError
from shoal.group.buffers import blocks_of, clash, span_of


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.bool])
def test_a_torch_tensor_is_used_in_place(dtype: torch.dtype) -> None:
    data = torch.zeros(2, 3, dtype=dtype)
    span = span_of(data)
    assert (span.address, span.n_elems) == (data.data_ptr(), 6)
    assert f"torch.{span.dtype}" == str(dtype)


@pytest.mark.parametrize("name", ["c_float", "c_int64", "c_uint16", "c_bool"])
def test_a_buffer_that_states_this_machines_byte_order_is_accepted(name: str) -> None:
    element = getattr(ctypes, name)
    data = (element * 3)()
    assert memoryview(data).format[0] == ("<" if sys.byteorder == "little" else ">")
    span = span_of(data)
    assert (span.address, span.n_bytes) == (ctypes.addressof(data), ctypes.sizeof(data))
    assert (span.n_elems, str(span.dtype)) == (3, np.dtype(element).name)


def test_the_marks_of_native_order_are_known() -> None:
    exporter = pytest.importorskip("_testbuffer", reason="this Python came without its own tests")
    for form, name in (
        ("=f", "float32"),  # so does JAX
        ("=q", "int64"),
        ("=l", "int32"),  # of standard size, for any size of the machine's long
        ("=?", "bool"),
        ("@f", "float32"),
        ("@l", np.dtype("l").name),
    ):
        data = exporter.ndarray([1, 2, 3], shape=[3], format=form, flags=exporter.ND_WRITABLE)
        span = span_of(data)
        assert (span.n_elems, str(span.dtype)) == (3, name), form
        assert ctypes.string_at(span.address, span.n_bytes) == data.tobytes(), form


def test_an_array_of_bfloat16_is_accepted_as_bfloat16() -> None:
    data = np.ones((2, 3), ml_dtypes.bfloat16)
    span = span_of(data)
    assert span[:3] == (data.ctypes.data, 6, DType.BFLOAT16)
    with pytest.raises(UsageError, match="float8_e5m2"):
        span_of(np.ones(2, ml_dtypes.float8_e5m2))
    with pytest.raises(UsageError, match=r"Fortran order; pass array\.T"):
        span_of(data.T)


def test_a_buffer_cannot_shrink_while_its_span_lives() -> None:
    data = bytearray(5)
    span = span_of(data)
    with pytest.raises(BufferError):
        data.clear()
    del span
    data.clear()


def closed() -> mmap.mmap:
    memory = mmap.mmap(-1, 1)
    memory.close()
    return memory


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (np.zeros((4, 4))[:, 1], r"\(4,\) is not contiguous.*numpy\.ascontiguousarray\(array\)"),
        (torch.zeros(4, 4).t()[1:], r"not contiguous in memory; pass tensor\.contiguous\(\)"),
        (np.zeros(3, dtype=">f4"), "foreign byte orders"),
        (closed(), "mmap gives no buffer: mmap closed"),
    ],
)
def test_unusable_objects_are_refused_with_the_reason(data: object, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        span_of(data)


def test_empty_gives_zeroed_arrays_and_tensors_of_any_shape() -> None:
    assert shoal.empty(5).dtype == np.float32
    assert shoal.empty(np.int64(5)).shape == (5,)
    assert (shoal.empty((2, 3), "int64") == np.zeros((2, 3))).all()
    assert shoal.empty((), "float64").shape == ()
    assert shoal.empty((0, 3), "bool").size == 0
    tensor = shoal.empty((2, 3), torch.bfloat16)
    assert (tensor.shape, tensor.dtype) == ((2, 3), torch.bfloat16)
    assert not tensor.any()


def test_empty_refuses_wrong_requests_with_the_reason() -> None:
    with pytest.raises(UsageError, match="negative dimension"):
        shoal.empty((2, -1))
    with pytest.raises(UsageError, match=r"torch\.bfloat16"):
        shoal.empty(2, "bfloat16")


def test_memory_from_empty_is_freed_with_its_last_view() -> None:
    def n_mappings() -> int:
        with open("/proc/self/maps") as maps:
            return sum("shoal-buffer" in line for line in maps)

    before = n_mappings()
    tensor = shoal.empty(1000, torch.float32)
    view = tensor[10:20]
    assert n_mappings() == before + 1
    del tensor
    assert n_mappings() == before + 1
    del view
    assert n_mappings() == before


def test_written_buffers_must_not_overlap() -> None:
    for written, read, found in (
        ([(0, 4), (4, 8)], [(8, 12), (8, 12)], None),  # buffers that are only read may overlap
        ([(4, 8), (0, 5)], [], (1, 0, True)),
        ([(0, 4), (8, 12)], [(4, 8), (11, 20)], (1, 1, False)),
        ([(0, 100)], [(50, 60)], (0, 0, False)),
        ([(50, 60)], [(0, 100)], (0, 0, False)),
        ([(0, 4), (2, 2)], [(3, 3), (4, 4)], None),  # empty buffers overlap none
        ([(0, 1), (2, 3), (4, 5)], [(1, 2), (0, 5)], (2, 1, False)),
    ):
        assert clash(written, read) == found


def test_a_sequence_that_is_a_buffer_is_cut_into_blocks() -> None:
    whole = array.array("f", range(6))
    blocks = blocks_of(whole, 3, writable=True)
    assert blocks.lengths == (2, 2, 2)
    for rank in range(3):
        assert blocks.block(rank).address == whole.buffer_info()[0] + 8 * rank
