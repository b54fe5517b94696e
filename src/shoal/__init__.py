"""shoal averages gradients across machines.

`import torch` loads this module (through the entry point of `shoal._autoload`), so it must stay
quick and must NOT import a framework, NumPy or the native library when it is imported.
"""

import sys
from typing import TYPE_CHECKING

from shoal.errors import (
    Closed,
    InternalError,
    PeerLost,
    ProofError,
    ShoalError,
    TimedOut,
    Unsupported,
    UsageError,
)
from shoal.lazy import attributes

if TYPE_CHECKING:
    from shoal.dtypes import DType, Op
    from shoal.group.buffers import BufferView
    from shoal.group.group import Group
    from shoal.group.memory import empty
    from shoal.group.work import Work
    from shoal.launch import init
    from shoal.state import Dump, dump

__version__ = "0.1.0"

if "torch.distributed" in sys.modules:  # torch's own loading of backends may be switched off
    from shoal._autoload import register

    register()

# Attributes that load further modules.
__getattr__ = attributes(
    __name__,
    {
        "init": "shoal.launch",
        "empty": "shoal.group.memory",
        "Group": "shoal.group.group",
        "Work": "shoal.group.work",
        "BufferView": "shoal.group.buffers",
        "DType": "shoal.dtypes",
        "Op": "shoal.dtypes",
        "dump": "shoal.state",
        "Dump": "shoal.state",
    },
)

__all__ = [
    "init",
    "empty",
    "Group",
    "Work",
    "BufferView",
    "DType",
    "Op",
    "dump",
    "Dump",
    "ShoalError",
    "UsageError",
    "Unsupported",
    "PeerLost",
    "TimedOut",
    "Closed",
    "ProofError",
    "InternalError",
    "__version__",
]
