"""Communication hooks for DDP that halve what travels: gradients cross the wire in 16 bits.

    model = DistributedDataParallel(net)
    model.register_comm_hook(None, bf16_hook)

torch's own bf16_compress_hook is refused by DDP, by its name, wherever there is no GPU.

Each bucket is divided by the number of ranks, rounded to 16 bits, summed over all ranks, and
widened again. Dividing comes first, and in the bucket's own type: each value is rounded once on its
way out, and the sum stays in the range that the values have. Sums are rounded to 16 bits.

With bf16 (range of float32, 8 bits of precision) nothing is lost but precision. With fp16 (11 bits)
magnitudes above 65,504 become infinite and those below 6e-8 vanish: scale the loss.
"""

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket

# NOT under `from __future__ import annotations`: DDP compares the hooks' annotations with types.

__all__ = ["bf16_hook", "fp16_hook"]


def bf16_hook(
    group: dist.ProcessGroup | None, bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket of gradients in bfloat16.

    Args:
        group: the state given to register_comm_hook: the group to average over; None takes the
            default group.
        bucket: of floating-point gradients.

    Returns:
        a future of the bucket's own buffer, averaged, in its own dtype.
    """
    return _averaged(group, bucket, torch.bfloat16)


def fp16_hook(
    group: dist.ProcessGroup | None, bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket of gradients in float16; otherwise like `bf16_hook`."""
    return _averaged(group, bucket, torch.float16)


def _averaged(
    group: dist.ProcessGroup | None, bucket: GradBucket, dtype: torch.dtype
) -> torch.futures.Future[torch.Tensor]:
    group = dist.group.WORLD if group is None else group
    buffer = bucket.buffer()
    narrow = torch.empty_like(buffer, dtype=dtype)
    torch.div(buffer, dist.get_world_size(group), out=narrow)
    work = dist.all_reduce(narrow, group=group, async_op=True)

    def widen(done: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        buffer.copy_(done.value()[0])
        return buffer

    future: torch.futures.Future[list[torch.Tensor]] = work.get_future()
    return future.then(widen)
