"""The process group over shoal for torchft's Manager: `shoal.torch.torchft.ProcessGroupShoal`."""

from shoal.frontend.torch.torchft import ProcessGroupShoal

__all__ = ["ProcessGroupShoal"]
