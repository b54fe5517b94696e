"""The parts of shoal for torch besides the backend "shoal"; importing this registers the backend.

The backend itself needs this import only with TORCH_DEVICE_BACKEND_AUTOLOAD=0 before torch 2.14, if
`import shoal` precedes `import torch`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed  # noqa: F401 - without it register() would silently do nothing

from shoal._autoload import register
from shoal.lazy import attributes

if TYPE_CHECKING:
    from shoal.frontend.torch.ddp.wrapper import DistributedDataParallel
    from shoal.frontend.torch.diloco import DiLoCo, LocalSGD
    from shoal.frontend.torch.grow import grow_group, join_address, join_group
    from shoal.frontend.torch.launched import init_process_group
    from shoal.frontend.torch.shrink import peer_lost, shrink_group
    from shoal.frontend.torch.sync_state import sync_state
    from shoal.torch import fsdp

__all__ = [
    "DistributedDataParallel",
    "DiLoCo",
    "LocalSGD",
    "fsdp",
    "grow_group",
    "init_process_group",
    "join_address",
    "join_group",
    "peer_lost",
    "shrink_group",
    "sync_state",
]

# The first attribute used loads the native core.
__getattr__ = attributes(
    __name__,
    {
        "DistributedDataParallel": "shoal.frontend.torch.ddp.wrapper",
        "DiLoCo": "shoal.frontend.torch.diloco",
        "LocalSGD": "shoal.frontend.torch.diloco",
        "fsdp": "shoal.torch.fsdp",
        "grow_group": "shoal.frontend.torch.grow",
        "join_address": "shoal.frontend.torch.grow",
        "init_process_group": "shoal.frontend.torch.launched",
        "join_group": "shoal.frontend.torch.grow",
        "peer_lost": "shoal.frontend.torch.shrink",
        "shrink_group": "shoal.frontend.torch.shrink",
        "sync_state": "shoal.frontend.torch.sync_state",
    },
)

register()
