"""The parts of shoal for torch beside the backend "shoal"; importing this registers the backend.

The backend alone needs this import only with TORCH_DEVICE_BACKEND_AUTOLOAD=0 before torch 2.14, if
`import shoal` comes before `import torch`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed  # noqa: F401 - without it register() would silently do nothing

from shoal._autoload import register

if TYPE_CHECKING:
    from shoal.frontend.torch.ddp.wrapper import DistributedDataParallel
    from shoal.frontend.torch.shrink import peer_lost, shrink_group

__all__ = ["DistributedDataParallel", "peer_lost", "shrink_group"]

# The module of each name, imported at first use, with the native core.
_MODULES = {
    "DistributedDataParallel": "shoal.frontend.torch.ddp.wrapper",
    "peer_lost": "shoal.frontend.torch.shrink",
    "shrink_group": "shoal.frontend.torch.shrink",
}

register()


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module 'shoal.torch' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_MODULES[name]), name)
