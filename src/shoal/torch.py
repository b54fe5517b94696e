"""What shoal has for torch beside the backend "shoal"; importing it makes torch know that.

For the backend alone it is needed only where torch loads no backends by itself, with
TORCH_DEVICE_BACKEND_AUTOLOAD=0 before torch 2.14, and `import shoal` comes before `import torch`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed  # noqa: F401 - without it register() would do nothing, and say nothing

from shoal._autoload import register

if TYPE_CHECKING:
    from shoal.frontend.torch.shrink import peer_lost, shrink_group

__all__ = ["peer_lost", "shrink_group"]

register()


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'shoal.torch' has no attribute {name!r}")
    from shoal.frontend.torch import shrink  # loads the native core

    return getattr(shrink, name)
