"""Registers the backend during `import torch`: `init_process_group("shoal")` needs no import.

`import torch` calls `register` wherever shoal is installed, also in programs that never use it. It
only registers a name. A failure here must NOT break `import torch`; `init_process_group("shoal")`
then raises torch's error for an unknown backend.

TORCH_DEVICE_BACKEND_AUTOLOAD=0 prevents this call. torch 2.14 and later call it anyway when the
name is first used; earlier versions need `import shoal` after `import torch`, or `import
shoal.torch` anywhere.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from shoal.lazy import load

if TYPE_CHECKING:
    import torch.distributed as dist

__all__ = ["register"]


def register() -> None:
    """Register the backend "shoal" with torch.distributed. Idempotent; never raises."""
    try:
        import torch
        import torch.distributed as dist

        if not dist.is_available() or "shoal" in dist.Backend.backend_list:
            return
        dist.Backend.register_backend(
            "shoal",
            _create_process_group,
            extended_api=True,
            # ShardedTensor puts its data on the first of these that is not the CPU. NOT a string:
            # torch 2.11 and 2.13 read one letter by letter.
            devices=["cpu", "cuda"] if _has_gpu(torch) else ["cpu"],
        )
    except Exception:  # a foreign program's `import torch` must go on
        import logging

        logging.getLogger("shoal").debug("the torch backend was not registered", exc_info=True)


def _has_gpu(torch: Any) -> bool:
    """True if torch is built for CUDA, a driver is loaded, and no variable hides the GPUs.

    NOT torch.cuda.is_available(): it loads the driver, which a process forked later cannot use.
    """
    is_built = getattr(getattr(torch, "version", None), "cuda", None) is not None
    is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    return is_built and not is_hidden and any(map(os.path.exists, _DRIVER_FILES))


_DRIVER_FILES = ("/dev/nvidiactl", "/dev/dxg")  # Linux; Linux under Windows


def _create_process_group(dist_backend_opts: Any, backend_options: Any) -> dist.ProcessGroup:
    frontend = load("shoal.frontend.torch")
    made: dist.ProcessGroup = frontend.create_process_group(dist_backend_opts, backend_options)
    return made
