"""Error texts about missing gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from torch._C._distributed_c10d import DebugLevel, get_debug_level

from shoal.average.lacking import named

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch


class Missing(NamedTuple):
    """The gradients missing on a rank: their indices into all names and parameters."""

    indices: Sequence[int]
    names: Sequence[str]
    parameters: Sequence[torch.nn.Parameter]
    rank: int

    def for_others(self) -> str:
        """Describe the error for ranks that have all gradients."""
        names = named([self.names[index] for index in self.indices])
        return (
            f"no gradient of parameter {names} arrived on rank {self.rank}: use it in the loss "
            f"there, or wrap the model with find_unused_parameters=True{self._frozen()}"
        )

    def here(self, is_static: bool, go_on: str) -> str:
        """Describe the error for this rank.

        Args:
            go_on: what to do first if other ranks have waited.
        """
        names = ", ".join(self.names[index] for index in self.indices)
        indices = " ".join(map(str, self.indices))
        why = _NOT_STATIC if is_static else _NOT_USED
        return (
            "Expected to have finished reduction in the prior iteration before starting a new one. "
            f"{why}\nParameter indices which did not receive grad for rank {self.rank}: {indices}. "
            f"Parameters which did not receive grad for rank {self.rank}: {names}{self._frozen()}"
            f"{go_on}{_MORE if get_debug_level() == DebugLevel.OFF else ''}"
        )

    def _frozen(self) -> str:
        """Name the missing gradients whose parameters do not require one any more."""
        frozen = [self.names[i] for i in self.indices if not self.parameters[i].requires_grad]
        if not frozen:
            return ""
        return (
            f". Of these {', '.join(frozen)} required a gradient when the model was wrapped, but "
            "do not now: wrap `model.module` again, on every rank"
        )


# These begin with torch's own words, because programs and users search for them.
_NOT_USED: Final = (
    "This error indicates that your module has parameters that were not used in producing loss, "
    "and the averages of other parameters wait for their gradients. If you intend this, "
    "enable it by passing the keyword argument `find_unused_parameters=True` to "
    "`shoal.torch.DistributedDataParallel`; if not, make sure that all `forward` "
    "function outputs participate in calculating loss."
)
_NOT_STATIC: Final = (
    "This error indicates that your training graph has changed in this iteration, e.g., one "
    "parameter is used in first iteration, but then got unused in the second iteration. this is "
    "not compatible with static_graph set to True."
)
_MORE: Final = (
    ". For more details of what ranks do, set the environment variable TORCH_DISTRIBUTED_DEBUG to "
    "either INFO or DETAIL"
)
