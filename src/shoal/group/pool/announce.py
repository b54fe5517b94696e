"""Announces kinds of calls to servers: the fields of a `Shape`, strictly checked.

The lowest worker sends each kind once as a message in the view's group, before or after its first
call. The server makes its own plan from it, so the two agree, or the call ends with an error.
"""

from __future__ import annotations

from typing import Final

from shoal.codec import codec_of
from shoal.dtypes import DType, Op
from shoal.errors import UsageError
from shoal.limits import MOST_CONNECTIONS
from shoal.rendezvous.packing import Unpacker, number, seal, unseal
from shoal.shapes import Shape

TAG: Final = 1
N_BYTES: Final = 4096  # of the message, padded with zeros
MOST_ELEMS: Final = 1 << 40
_KIND: Final = b"shoal/pk"
_VERSION: Final = 3
_DTYPES: Final = tuple(DType)


def pack(shape: Shape) -> bytes:
    """Return the message for an all-reduce of a view; UsageError for a name that is too long."""
    name = shape.algorithm.encode()
    body = number(len(name), 2) + name + number(shape.dtype, 1) + number(shape.op, 1)
    body += number(shape.codec.number, 1) + number(shape.codec.keep, 2)
    body += number(shape.n_elems, 8)
    body += number(shape.n_lanes, 1)
    sealed = seal(_KIND, _VERSION, body)
    if len(sealed) > N_BYTES - 2:
        raise UsageError(f"{shape.algorithm[:80]}... has a name of {len(name)} bytes: too long")
    return (number(len(sealed), 2) + sealed).ljust(N_BYTES, b"\0")


def unpack(message: bytes, rank: int, size: int) -> Shape:
    """Return the announced kind of call as server `rank` takes part in it, or ValueError."""
    outer = Unpacker(message)
    sealed = outer.take(outer.number(2, 1, N_BYTES - 2))
    if any(outer.rest()):
        raise ValueError("more than a message")
    version, body = unseal(_KIND, sealed)
    if version != _VERSION:
        raise ValueError(f"version {version}")
    unpacker = Unpacker(body)
    name = unpacker.take(unpacker.number(2, 1, N_BYTES)).decode("ascii")
    dtype, op = _DTYPES[unpacker.number(1, 0, len(_DTYPES) - 1)], Op(unpacker.number(1, 0, 255))
    codec = codec_of(unpacker.number(1, 0, 255), unpacker.number(2, 0, 65535))
    n_elems = unpacker.number(8, 1, MOST_ELEMS)
    n_lanes = unpacker.number(1, 1, MOST_CONNECTIONS)
    unpacker.end()
    return Shape(
        *("all_reduce", name, dtype, op, n_elems, rank, size),
        hosts=tuple(range(size)),
        codec=codec,
        rounds_own=codec.is_narrow,  # in every served call
        n_lanes=n_lanes,
    )
