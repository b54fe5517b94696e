"""All ranks average the same arrays in the same way, or raise how they differ."""

from __future__ import annotations

import hashlib
import itertools
import json
from array import array
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from shoal.errors import UsageError

if TYPE_CHECKING:
    from shoal.average.layout import ArraySpec
    from shoal.group.group import Group

_N_DIGEST_BYTES: Final = 32
_MOST_RANKS: Final = 8  # that an error lists


def agree(group: Group, name: str, entries: Sequence[ArraySpec], options: dict[str, Any]) -> None:
    """Compare with all other ranks; every rank calls it. One small all-gather where all agree.

    Args:
        name: of the calls.
        options: other values that must be alike, by name; of JSON's types.

    Raises (on every rank; the group goes on):
        UsageError: they differ; names the first array or option, and the ranks.
    """
    arrays = {repr(entry.name): f"{entry.dtype}{list(entry.shape)}" for entry in entries}
    order = {f"array {at}": repr(entry.name) for at, entry in enumerate(entries)}
    given = arrays | order | {key: str(value) for key, value in options.items()}
    if found := difference_among(group, name, given):
        raise UsageError(f"{group}: {found}; give the same on every rank")


def difference_among(group: Group, name: str, values: Mapping[str, str]) -> str:
    """The first of these named values that differs among the ranks, and which ranks have what.

    Every rank calls it. A small all-gather of hashes, and of the values only where these differ.

    Args:
        name: of the calls.

    Returns:
        "" if all ranks have the same values in the same order.
    """
    text = json.dumps(values).encode()
    digest = bytearray(hashlib.blake2b(text, digest_size=_N_DIGEST_BYTES).digest())
    digests = bytearray(group.size * _N_DIGEST_BYTES)
    group.all_gather(digests, digest, name=name)
    if digests == digest * group.size:
        return ""
    return difference([json.loads(one) for one in texts_of_all(group, name, text)])


def texts_of_all(group: Group, name: str, text: bytes) -> list[bytes]:
    """The text of every rank, by rank; every rank calls it."""
    lengths = array("q", bytes(8 * group.size))
    group.all_gather(lengths, array("q", [len(text)]), name=name)
    texts = [bytearray(n_bytes) for n_bytes in lengths]
    group.all_gather(texts, bytearray(text), name=name)
    return [bytes(one) for one in texts]


def difference(given: Sequence[Mapping[str, str]]) -> str:
    """The first value that differs among ranks, and which ranks have what.

    Args:
        given: by rank: the values by name. They are not all the same.
    """
    for name in dict.fromkeys(itertools.chain.from_iterable(given)):
        by_value: dict[str, list[int]] = {}
        for rank, values in enumerate(given):
            by_value.setdefault(values.get(name, "none"), []).append(rank)
        if len(by_value) > 1:
            sides = ", ".join(f"{value} on {_named(ranks)}" for value, ranks in by_value.items())
            return f"{name} is not the same on all ranks: {sides}"
    return "the order of these names is not the same on all ranks"


def _named(ranks: Sequence[int]) -> str:
    named = ", ".join(map(str, ranks[:_MOST_RANKS])) + ", ..." * (len(ranks) > _MOST_RANKS)
    return f"rank{'s' * (len(ranks) > 1)} {named}"
