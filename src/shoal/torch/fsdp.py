"""FSDP2 with fewer bytes: `shoal.torch.fsdp.compress`."""

from shoal.frontend.torch.fsdp import compress

__all__ = ["compress"]
