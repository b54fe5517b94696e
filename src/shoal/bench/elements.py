"""Element types and operations under the names of nccl-tests, and the exact range of each type."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from shoal.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence


@dataclass(frozen=True)
class ElementType:
    """A type of elements.

    Args:
        name: its name in shoal, NumPy and torch.
        nccl: its name in nccl-tests, or shoal's name if there is none.
        storage: the NumPy dtype of its bytes; another for bfloat16, which NumPy does not have.
        exact: the largest integer up to which all integers are exact.
        epsilon: the distance from 1 to the next value; 0 for integers.
    """

    name: str
    nccl: str
    storage: str
    n_bytes: int
    exact: int
    epsilon: float = 0.0

    @property
    def is_float(self) -> bool:
        """True if sums may be rounded."""
        return self.epsilon > 0


def _integer(name: str, nccl: str, n_bytes: int, n_bits: int) -> ElementType:
    return ElementType(name, nccl, name, n_bytes, 2**n_bits - 1)


_TYPES: Final = (
    _integer("int8", "int8", 1, 7),
    _integer("uint8", "uint8", 1, 8),
    _integer("int16", "int16", 2, 15),
    _integer("int32", "int32", 4, 31),
    _integer("uint32", "uint32", 4, 32),
    _integer("int64", "int64", 8, 63),
    _integer("uint64", "uint64", 8, 64),
    ElementType("float16", "half", "float16", 2, 2**11, 2.0**-10),
    ElementType("float32", "float", "float32", 4, 2**24, 2.0**-23),
    ElementType("float64", "double", "float64", 8, 2**53, 2.0**-52),
    ElementType("bfloat16", "bfloat16", "uint16", 2, 2**8, 2.0**-7),
)

ELEMENTS: Final[Mapping[str, ElementType]] = MappingProxyType({one.name: one for one in _TYPES})
"""The element types by shoal's names."""

OPERATIONS: Final[Mapping[str, str]] = MappingProxyType(
    {"sum": "sum", "product": "prod", "max": "max", "min": "min", "avg": "avg"}
)
"""The names of nccl-tests by shoal's; operations on bits have none there."""

_ALL: Final = "all"


def elements_of(text: str) -> Sequence[ElementType]:
    """Return the types that `-d` names (one, several, or all); UsageError for unknown ones."""
    known = {one.nccl: one for one in _TYPES} | dict(ELEMENTS)
    names = [one.nccl for one in _TYPES] if text == _ALL else text.split(",")
    return [known[name] for name in _checked(names, known, "-d", "datatype")]


def operations_of(text: str) -> Sequence[str]:
    """Return the operations that `-o` names, by shoal's names; UsageError for unknown ones."""
    known = {theirs: ours for ours, theirs in OPERATIONS.items()} | {n: n for n in OPERATIONS}
    names = list(OPERATIONS) if text == _ALL else text.split(",")
    return [known[name] for name in _checked(names, known, "-o", "operation")]


def _checked(names: Sequence[str], known: Iterable[str], flag: str, what: str) -> Sequence[str]:
    for name in names:
        if name not in set(known):
            raise UsageError(f"{flag} {name}: no such {what}; known are {', '.join(known)}, {_ALL}")
    return names
