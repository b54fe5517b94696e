"""Announces kinds of calls to servers: the fields of a `Shape`, strictly checked.

The lowest worker sends each kind once as a message in the view's group, before or after its first
call. The server makes its own plan from it, so the two agree, or the call ends with an error.
"""

from __future__ import annotations

import struct
from typing import Final

from shoal.codec import codec_of
from shoal.dtypes import DType, Op
from shoal.errors import UsageError
from shoal.limits import MOST_CONNECTIONS
from shoal.shapes import Shape

TAG: Final = 1
N_BYTES: Final = 4096  # of the message, padded with zeros
MOST_ELEMS: Final = 1 << 40
_DTYPES: Final = tuple(DType)
# The length of the algorithm's name, which follows; then dtype, op, codec, its kept elements, the
# call's elements, and lanes.
_HEAD: Final = struct.Struct("<HBBBHQB")


def pack(shape: Shape) -> bytes:
    """Return the message for an all-reduce of a view; UsageError if the name is too long."""
    name, codec = shape.algorithm.encode(), shape.codec
    kind = shape.dtype, shape.op, codec.number, codec.keep, shape.n_elems, shape.n_lanes
    message = _HEAD.pack(len(name), *kind) + name
    if len(message) > N_BYTES:
        raise UsageError(f"{shape.algorithm[:80]}... has a name of {len(name)} bytes: too long")
    return message.ljust(N_BYTES, b"\0")


def unpack(message: bytes, rank: int, size: int) -> Shape:
    """Return the shape of the announced kind of call on server `rank`, or ValueError."""
    length, dtype, op, number, keep, n_elems, n_lanes = _HEAD.unpack_from(message)
    end = _HEAD.size + length
    if any(message[end:]):
        raise ValueError("bytes follow the message")
    is_bounded = 1 <= n_elems <= MOST_ELEMS and 1 <= n_lanes <= MOST_CONNECTIONS
    if not is_bounded or dtype >= len(_DTYPES):
        raise ValueError(f"{n_elems} elements of dtype {dtype} over {n_lanes} lanes")
    codec = codec_of(number, keep)
    return Shape(
        *("all_reduce", message[_HEAD.size : end].decode("ascii"), _DTYPES[dtype], Op(op)),
        *(n_elems, rank, size),
        hosts=tuple(range(size)),
        codec=codec,
        rounds_own=codec.is_narrow,  # in every served call
        n_lanes=n_lanes,
    )
