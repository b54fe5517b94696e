"""How long fusion buffers are: as the environment says, or as the planner does."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from shoal.average.layout import ALIGN_BYTES
from shoal.plan.fusion import choose_fusion
from shoal.plan.quantities import bytes_from

if TYPE_CHECKING:
    from shoal.plan import Planner

_LOG: Final = logging.getLogger("shoal")

_MOST_BYTES: Final = 1 << 40


def fusion_bytes_from(environ: Mapping[str, str]) -> int:
    """`SHOAL_FUSION_BYTES`; 0: the planner chooses.

    Raises:
        UsageError: it is no size as "25MiB", or out of range.
    """
    name, otherwise = "SHOAL_FUSION_BYTES", "the planner chooses"
    return bytes_from(environ, name, ALIGN_BYTES, _MOST_BYTES, otherwise) or 0


def fusion_bytes_for(
    total_bytes: int, planner: Planner, title: str, *, has_servers: bool = False
) -> int:
    """The longest that a buffer may be where so many bytes are averaged; the same on every rank.

    Args:
        title: of the averager and its rank, for the log.
        has_servers: servers may share in what is long enough.

    Raises:
        UsageError: `SHOAL_FUSION_BYTES` is wrong.
    """
    asked = fusion_bytes_from(os.environ)
    if asked:
        return asked
    fusion = choose_fusion(total_bytes, planner, has_servers=has_servers)
    _LOG.debug("%s: %s", title, fusion.why)
    return fusion.n_bytes
