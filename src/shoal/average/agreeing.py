"""All ranks average the same arrays in the same way, or hear how they differ."""

from __future__ import annotations

import hashlib
import itertools
import json
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from shoal.average.layout import ArraySpec
from shoal.dtypes import parse_dtype
from shoal.errors import UsageError

if TYPE_CHECKING:
    from shoal.group.group import Group

_N_DIGEST_BYTES: Final = 32


def agree(group: Group, name: str, entries: Sequence[ArraySpec], options: dict[str, Any]) -> None:
    """Compare with all other ranks; every rank calls it. One small all-gather where all agree.

    Args:
        name: of the calls.
        options: what else must be alike, by its name; of JSON's types.

    Raises (on every rank; the group goes on):
        UsageError: they differ; names the first array or option, and the ranks.
    """
    texts = texts_that_differ(group, name, _told(entries, options))
    if texts:
        raise UsageError(f"{group}: {difference([_read(text) for text in texts])}")


def texts_that_differ(group: Group, name: str, text: bytes) -> list[bytes]:
    """What each rank gives, where they differ; empty where all give the same.

    Every rank calls it. A small all-gather of hashes, and only where these differ of the texts.

    Args:
        name: of the calls.
    """
    if group.size == 1:
        return []
    digest = bytearray(hashlib.blake2b(text, digest_size=_N_DIGEST_BYTES).digest())
    digests = bytearray(group.size * _N_DIGEST_BYTES)
    group.all_gather(digests, digest, name=name)
    return [] if digests == digest * group.size else _all(group, name, text)


_Told = tuple[list[ArraySpec], dict[str, Any]]


def _told(entries: Sequence[ArraySpec], options: dict[str, Any]) -> bytes:
    rows = [[entry.name, entry.shape, str(entry.dtype)] for entry in entries]
    return json.dumps([rows, options], sort_keys=True).encode()


def _read(text: bytes) -> _Told:
    rows, options = json.loads(text)
    return [ArraySpec(name, tuple(shape), parse_dtype(kind)) for name, shape, kind in rows], options


def _all(group: Group, name: str, text: bytes) -> list[bytes]:
    """What every rank tells, by rank."""
    lengths = array("q", bytes(8 * group.size))
    group.all_gather(lengths, array("q", [len(text)]), name=name)
    told = [bytearray(n_bytes) for n_bytes in lengths]
    group.all_gather(told, bytearray(text), name=name)
    return [bytes(one) for one in told]


def difference(told: Sequence[_Told]) -> str:
    """How ranks differ in what they average: the first array or option, and who has which."""
    by_name = [{entry.name: entry for entry in entries} for entries, _ in told]
    for name in dict.fromkeys(itertools.chain.from_iterable(by_name)):
        specs = [named.get(name) for named in by_name]
        if found := unlike([f"{one.dtype}{list(one.shape)}" if one else "none" for one in specs]):
            return (
                f"{name!r} is not the same on all ranks: {found}; give the same names, shapes and "
                "types on every rank"
            )
    for at, row in enumerate(zip(*(entries for entries, _ in told), strict=False)):
        if found := unlike([repr(entry.name) for entry in row]):
            return (
                f"array {at} is not the same on all ranks: {found}; name them in the same order on "
                "every rank"
            )
    for key in told[0][1]:
        if found := unlike([options.get(key) for _, options in told]):
            return f"{key} is not the same on all ranks: {found}; give them all the same"
    return "what is averaged is not told in the same way: install the same shoal on all hosts"


def unlike(values: Sequence[Any]) -> str:
    """Which ranks have what, where they differ; empty: they do not."""
    by_value: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        by_value.setdefault(str(value), []).append(rank)
    if len(by_value) == 1:
        return ""
    return ", ".join(f"{value} on {_ranks(ranks)}" for value, ranks in by_value.items())


def _ranks(ranks: Sequence[int]) -> str:
    named = ", ".join(map(str, ranks[:8])) + ", ..." * (len(ranks) > 8)
    return f"rank{'s' * (len(ranks) > 1)} {named}"
