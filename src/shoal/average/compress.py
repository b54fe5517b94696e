"""What `compress=` takes: how the float32 arrays of an averager are rounded before they travel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from shoal.average.layout import FLOATS
from shoal.codec import Codec, parse_wire
from shoal.dtypes import DType
from shoal.errors import UsageError

if TYPE_CHECKING:
    from shoal.average.layout import ArraySpec

_GIVE: Final = 'give the name of a codec, ErrorFeedback("bf16") or None'


@dataclass(frozen=True, slots=True)
class ErrorFeedback:
    """Add what rounding took from a gradient in one step to the same gradient in the next step.

    Args:
        wire: the name of a codec, as `Group.all_reduce` takes it.

    Raises:
        UsageError: there is no such codec, or it does not round.

    Source: Seide et al. (Interspeech 2014); Karimireddy et al., "Error Feedback Fixes SignSGD"
    (ICML 2019).
    """

    wire: str

    def __post_init__(self) -> None:
        if parse_wire(self.wire) is Codec.IDENTITY:
            raise UsageError(f"{self} has no error to feed back; leave compress out")

    def codec(self, step: int) -> Codec:
        """The codec of all calls of a step, of which the first is 0."""
        return parse_wire(self.wire)


def parse_compress(
    compress: str | ErrorFeedback | None, wire: str | None, entries: Sequence[ArraySpec]
) -> tuple[str | None, ErrorFeedback | None]:
    """Return the wire of an averager's calls, and the scheme that rounds before it if there is one.

    Raises:
        UsageError: `compress` is of another type or no codec, stands beside `wire`, or cannot
            compress these arrays.
    """
    if compress is None:
        parse_wire(wire or "identity")
        return wire, None
    if wire is not None:
        raise UsageError(f"give either wire={wire!r} or compress={compress!r}, not both")
    _check_entries(compress, entries)
    if isinstance(compress, ErrorFeedback):
        return None, compress
    if not isinstance(compress, str):
        raise UsageError(f"compress={compress!r} is no way to compress: {_GIVE}")
    return str(parse_wire(compress)), None


def _check_entries(compress: Any, entries: Sequence[ArraySpec]) -> None:
    """Refuse floating-point arrays that no codec encodes; other types travel as they are."""
    for entry in entries:
        if entry.dtype in FLOATS and entry.dtype is not DType.FLOAT32:
            raise UsageError(
                f"compress={compress!r} is for float32, and {entry} would travel whole: keep that "
                "gradient in float32, or leave compress out"
            )
