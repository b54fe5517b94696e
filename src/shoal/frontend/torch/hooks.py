"""A communication hook for torch's DDP that halves the bytes: it sends gradients in bfloat16.

    model = DistributedDataParallel(net)
    model.register_comm_hook(None, bf16_hook)

DDP refuses torch's own bf16_compress_hook, by its name, if there is no GPU.
"""

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket

# NOT under `from __future__ import annotations`: DDP compares the hooks' annotations with types.

__all__ = ["bf16_hook"]


def bf16_hook(
    group: dist.ProcessGroup | None, bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket of gradients in bfloat16: the range of float32, 8 bits of precision.

    The bucket is first divided by the number of ranks in its own dtype, so each value is rounded
    once before it is sent, and sums stay in the range of the values. Sums are rounded to bfloat16.

    Args:
        group: the state passed to register_comm_hook, which is the group to average over; None is
            the default group.
        bucket: floating-point gradients.

    Returns:
        A future of the bucket's own buffer, averaged, in its own dtype. If the all-reduce fails,
        waiting for it raises torch's RuntimeError, which quotes the ShoalError.
    """
    group = dist.group.WORLD if group is None else group
    buffer = bucket.buffer()
    narrow = torch.empty_like(buffer, dtype=torch.bfloat16)
    torch.div(buffer, dist.get_world_size(group), out=narrow)
    work = dist.all_reduce(narrow, group=group, async_op=True)

    def widen(done: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        buffer.copy_(done.value()[0])
        return buffer

    future: torch.futures.Future[list[torch.Tensor]] = work.get_future()
    return future.then(widen)
