"""`import shoal.torch` makes torch.distributed know the backend "shoal".

Needed only where torch loads no backends by itself, with TORCH_DEVICE_BACKEND_AUTOLOAD=0 before
torch 2.14, and `import shoal` comes before `import torch`.
"""

import torch.distributed  # noqa: F401 - without it register() would do nothing, and say nothing

from shoal._autoload import register

register()
