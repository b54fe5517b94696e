"""The values of `compress=`, which round an averager's float32 arrays before they are sent."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from shoal.average.layout import FLOATS
from shoal.codec import Codec, parse_wire, top_k
from shoal.dtypes import DType
from shoal.errors import Unsupported, UsageError

if TYPE_CHECKING:
    from typing import TypeAlias

    from shoal.average.layout import ArraySpec

    Scheme: TypeAlias = "ErrorFeedback | ChunkTopK"

_GIVE: Final = 'pass the name of a codec, ErrorFeedback("bf16"), ChunkTopK() or None'


@dataclass(frozen=True, slots=True)
class ErrorFeedback:
    """Add a gradient's rounding error in one step to the same gradient in the next step.

    For float32 arrays. Each rank rounds its values before they are sent, even if all ranks share a
    host, and keeps the errors of its own values (`Averager.state_dict`).

    Args:
        wire: the name of a codec that rounds: "bf16", "fp16", "mxfp8", "mxint8" or "mxfp4".

    Raises:
        UsageError: there is no such codec, or it does not round.

    Source: Seide et al. (Interspeech 2014); Karimireddy et al., "Error Feedback Fixes SignSGD"
    (ICML 2019).
    """

    wire: str

    def __post_init__(self) -> None:
        if not parse_wire(self.wire).is_narrow:
            raise UsageError(f"{self} has no error to feed back; leave compress out")

    def codec(self, step: int) -> Codec:
        """Return the codec of all calls of a step; steps count from 0."""
        return parse_wire(self.wire)


@dataclass(frozen=True, slots=True)
class ChunkTopK:
    """Send the largest values of each chunk of 4,096, and add the others to the next step's values.

    For float32 arrays. The rank that reduces a chunk sends back only the largest sums, and adds the
    others to the next step's sums. It divides sums by the number of all ranks, not of the ranks
    that sent the value.

    Args:
        share: the share of the values that are sent, more than 0 and at most 1; at least one value
            of each chunk is sent.
        bits: bits of a value: 8, or 2 for its sign and rough magnitude. An index takes 12 bits.
        warm_up: the number of steps that send more: shares of 1/4, 1/16, 1/64 and so on down to
            `share`, each in the same number of steps.

    Raises:
        UsageError: a number is out of its range.

    Source: Lin et al., "Deep Gradient Compression" (ICLR 2018); chunks as in arXiv 2508.15706.
    """

    share: float = 0.01
    bits: int = 8
    warm_up: int = 0

    def __post_init__(self) -> None:
        for name in ("share", "bits", "warm_up"):
            if not isinstance(value := getattr(self, name), (int, float)):
                raise UsageError(f"ChunkTopK: {name} must be a number, got {value!r}")
        for name, is_right, needed in (
            ("share", 0 < self.share <= 1, "more than 0 and at most 1"),
            ("bits", self.bits in (2, 8), "8 or 2"),
            ("warm_up", self.warm_up >= 0, "a number of steps, 0 or more"),
        ):
            if not is_right:
                raise UsageError(f"{self}: {name} must be {needed}")

    def codec(self, step: int) -> Codec:
        """Return the codec of all calls of a step; steps count from 0."""
        n_stages = math.ceil(math.log(1 / self.share, 4)) - 1  # powers of 1/4 above the share
        share = self.share
        if step < self.warm_up and n_stages > 0:
            share = 0.25 ** (1 + step * n_stages // self.warm_up)
        return top_k(share, self.bits)


def check_hosts(compress: object, hosts: Sequence[int]) -> None:
    """Refuse `ChunkTopK` if ranks share one of several hosts; `hosts` is by rank."""
    n_hosts = len(set(hosts))
    if isinstance(compress, ChunkTopK) and 1 < n_hosts < len(hosts):
        first = next(host for host in hosts if hosts.count(host) > 1)
        shared = ", ".join(str(rank) for rank, host in enumerate(hosts) if host == first)
        raise Unsupported(
            f"{compress}: ranks {shared} share a host, and its sum would be cut without feedback: "
            "start one rank on each host, or use ErrorFeedback"
        )


def parse_compress(
    compress: str | Scheme | None, wire: str | None, entries: Sequence[ArraySpec]
) -> tuple[str | None, Scheme | None]:
    """Return the wire of an averager's calls, and the scheme that rounds before it, or None.

    Raises:
        UsageError: `compress` has another type or names no codec, `wire` is given too, or these
            arrays cannot be compressed.
    """
    if compress is None:
        parse_wire(wire or "identity")
        return wire, None
    if wire is not None:
        raise UsageError(f"pass either wire={wire!r} or compress={compress!r}, not both")
    for entry in entries:  # NOT integers, which no codec changes
        if entry.dtype in FLOATS and entry.dtype is not DType.FLOAT32:
            raise UsageError(
                f"compress={compress!r} supports float32 only, and {entry} would be sent in full: "
                "keep that gradient in float32, or leave compress out"
            )
    if isinstance(compress, (ErrorFeedback, ChunkTopK)):
        return None, compress
    if not isinstance(compress, str):
        raise UsageError(f"compress={compress!r} is not a way to compress: {_GIVE}")
    return str(parse_wire(compress)), None
