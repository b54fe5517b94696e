"""`shoal.empty`: memory that peers on the same host can map, so it is never copied."""

from __future__ import annotations

import ctypes
import math
import operator
import sys
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

from shoal.dtypes import DType, parse_dtype
from shoal.errors import ShoalError, UsageError


def empty(shape: int | Sequence[int], dtype: Any = "float32") -> Any:
    """Return zeroed memory for `shape` elements that collectives inside a host use in place.

    The caller owns the memory. The pages are reserved at once, shared with ranks of the host when a
    collective first uses them, and freed with the last array or tensor that views them.

    A forked child can read them, and its writes are its own. Pages that it has not written show
    later writes of the parent and the host's other ranks: copy values that must not change.

    Args:
        shape: as NumPy's; an int is one dimension.
        dtype: a name or NumPy dtype gives a NumPy array, a torch dtype a CPU tensor.

    Raises:
        UsageError: a negative dimension, an unknown dtype, the name of a dtype that NumPy does not
            have (bfloat16: pass torch.bfloat16), or NumPy is not installed.
        ShoalError: the machine or container has too little memory; gives the sizes.
    """
    sizes = tuple(shape) if isinstance(shape, Iterable) else (operator.index(shape),)
    if any(size < 0 for size in sizes):
        raise UsageError(f"shape {sizes} has a negative dimension")
    kind = parse_dtype(dtype)
    n_bytes = math.prod(sizes) * kind.n_bytes
    memory = allocate(n_bytes, f"shoal.empty({sizes}, {kind})")
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(dtype, torch.dtype):
        return torch.frombuffer(memory, dtype=torch.uint8)[:n_bytes].view(dtype).view(sizes)
    return _numpy_array(memory, sizes, kind)


def stream_copy(to: int, source: int, n_bytes: int) -> None:
    """Copy between ranges that do not overlap, bypassing the caches. For long copies."""
    from shoal import engine

    engine.stream_copy(to, source, n_bytes)


def allocate(n_bytes: int, what: str) -> ctypes.Array[ctypes.c_byte]:
    """Return zeroed shared memory, freed with the object; ShoalError, naming `what`, if none."""
    from shoal import engine  # the native core loads with the first use, not with `import shoal`

    try:
        address = engine.allocate(n_bytes)
    except MemoryError as error:
        raise ShoalError(f"{what}: {error}") from error
    memory = (ctypes.c_byte * max(n_bytes, 1)).from_address(address)
    weakref.finalize(memory, engine.release, address).atexit = False
    return memory


def _numpy_array(memory: ctypes.Array[ctypes.c_byte], sizes: tuple[int, ...], kind: DType) -> Any:
    try:
        import numpy as np
    except ImportError:
        raise UsageError(
            "shoal.empty makes NumPy arrays or torch tensors; NumPy is not installed"
        ) from None
    if kind is DType.BFLOAT16:
        raise UsageError("NumPy has no bfloat16; use torch.bfloat16, or uint16 for the bits")
    name = "bool_" if kind is DType.BOOL else str(kind)
    flat = np.frombuffer(memoryview(memory).cast("B"), dtype=np.uint8)[
        : math.prod(sizes) * kind.n_bytes
    ]
    return flat.view(getattr(np, name)).reshape(sizes)
