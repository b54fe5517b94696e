"""Check every collective on a device's tensors against results that torch computes itself.

Numbers are small integers, so sums are exact. Every rank runs each function whose name begins with
`check_`, in a new group.
"""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from ranks import failure_of
from torch import nn

Tensor = torch.Tensor

# Much longer than any call takes: 0.1 to 0.2 s at 1 to 2 GHz.
SLOW_CYCLES = 200_000_000


class Rank:
    """One rank, its group and its device.

    Args:
        longest: elements of the longest tensors.
    """

    def __init__(self, group: Any, device: str, longest: int) -> None:
        self.lengths = (1, 1000, longest)
        self.group = group
        self.device = torch.device(device, 0) if device == "cuda" else torch.device(device)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def given(self, n: int, rank: int | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the contribution of a rank, by default this one: elements from 0 to 3."""
        first = self.rank if rank is None else rank
        return ((torch.arange(n, device=self.device) + first) % 4).to(dtype)

    def all_given(self, n: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
        return [self.given(n, rank, dtype) for rank in range(self.size)]

    def total(self, n: int) -> Tensor:
        return torch.stack(self.all_given(n)).sum(0)

    def slow(self) -> None:
        """Keep the current stream busy."""
        if self.on_gpu:
            torch.cuda._sleep(SLOW_CYCLES)


def same(got: Tensor, expected: Tensor) -> None:
    """Check that two tensors are equal; the error counts the differences and locates the first."""
    if not torch.equal(got, expected):
        wrong = (got != expected).flatten().nonzero()
        raise AssertionError(f"{len(wrong)} of {got.numel()} wrong, first at {wrong[0].item()}")


def same_everywhere(it: Rank, tensor: Tensor) -> None:
    """Check that a tensor is equal on all ranks."""
    everyones = [torch.empty_like(tensor) for _ in range(it.size)]
    dist.all_gather(everyones, tensor, group=it.group)
    for other in everyones:
        same(other, tensor)


def near(got: list[float], expected: list[float], *why: object) -> None:
    """Check that losses differ only by rounding; the error shows `why`."""
    close = [abs(a - b) < 1e-5 for a, b in zip(expected, got, strict=True)]
    assert all(close), (*why, expected, got)


def check_all_reduce(it: Rank) -> None:
    for n in it.lengths:
        for async_op in (False, True):
            tensor = it.given(n)
            work = dist.all_reduce(tensor, group=it.group, async_op=async_op)
            if work is not None:
                work.wait()
            same(tensor, it.total(n))


def check_every_type_and_fold(it: Rank) -> None:
    folds = {
        dist.ReduceOp.SUM: lambda parts: parts.sum(0),
        dist.ReduceOp.MAX: lambda parts: parts.amax(0),
        dist.ReduceOp.MIN: lambda parts: parts.amin(0),
        dist.ReduceOp.PRODUCT: lambda parts: parts.prod(0),
    }
    names = "float16 bfloat16 float32 float64 int8 uint8 int32 int64"
    for name in names.split():
        dtype = getattr(torch, name)
        for op, fold in folds.items():
            tensor = it.given(1000, dtype=dtype) % 3
            dist.all_reduce(tensor, op=op, group=it.group)
            parts = torch.stack([part % 3 for part in it.all_given(1000, torch.float64)])
            same(tensor, fold(parts).to(dtype))
    averaged = it.given(1000, dtype=torch.float64)
    dist.all_reduce(averaged, op=dist.ReduceOp.AVG, group=it.group)
    # On the host: CUDA divides by multiplying with the reciprocal, which rounds twice.
    summed = torch.stack(it.all_given(1000, torch.float64)).sum(0).cpu()
    same(averaged.cpu(), summed / it.size)
    truths = it.given(1000) > 1
    dist.all_reduce(truths, op=dist.ReduceOp.MAX, group=it.group)
    same(truths, torch.stack(it.all_given(1000)).amax(0) > 1)


def check_strided_and_scaled(it: Rank) -> None:
    matrix = it.given(300 * 200).reshape(300, 200)
    dist.all_reduce(matrix.t()[::3], group=it.group)
    expected = it.given(300 * 200).reshape(300, 200)
    expected[:, ::3] = it.total(300 * 200).reshape(300, 200)[:, ::3]
    same(matrix, expected)
    scaled = it.given(it.lengths[-1])
    dist.all_reduce(scaled, op=dist._make_nccl_premul_sum(0.5), group=it.group)
    same(scaled, it.total(it.lengths[-1]) / 2)


def check_coalesced(it: Rank) -> None:
    tensors = [it.given(n) for n in (3, 70_000, 5)]
    with dist._coalescing_manager(it.group, it.device, async_ops=True) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor, group=it.group)
    manager.wait()
    for tensor in tensors:
        same(tensor, it.total(tensor.numel()))


def check_broadcast_and_reduce(it: Rank) -> None:
    for n in it.lengths:
        for root in {0, it.size - 1}:
            tensor = it.given(n)
            dist.broadcast(tensor, group_src=root, group=it.group)
            same(tensor, it.given(n, root))
            tensor = it.given(n)
            dist.reduce(tensor, group_dst=root, group=it.group)
            same(tensor, it.total(n) if it.rank == root else it.given(n))


def check_all_gather(it: Rank) -> None:
    for n in it.lengths:
        outputs = [torch.empty(n, device=it.device) for _ in range(it.size)]
        dist.all_gather(outputs, it.given(n), group=it.group)
        for output, expected in zip(outputs, it.all_given(n), strict=True):
            same(output, expected)
        whole = torch.empty(n * it.size, device=it.device)
        whole[it.rank * n : (it.rank + 1) * n] = it.given(n)
        own = whole[it.rank * n : (it.rank + 1) * n]
        dist.all_gather_into_tensor(whole, own, group=it.group)
        same(whole, torch.cat(it.all_given(n)))


def check_reduce_scatter(it: Rank) -> None:
    for n in it.lengths:
        total = it.total(n * it.size)[it.rank * n : (it.rank + 1) * n]
        output = torch.empty(n, device=it.device)
        dist.reduce_scatter_tensor(output, it.given(n * it.size), group=it.group)
        same(output, total)
        parts = list(it.given(n * it.size).chunk(it.size))
        dist.reduce_scatter(output.zero_(), parts, group=it.group)
        same(output, total)


def check_gather_and_scatter(it: Rank) -> None:
    for n in it.lengths:
        root = it.size - 1
        is_root = it.rank == root
        outputs = [torch.empty(n, device=it.device) for _ in range(it.size)] if is_root else None
        dist.gather(it.given(n), outputs, group_dst=root, group=it.group)
        for output, expected in zip(outputs or [], it.all_given(n), strict=False):
            same(output, expected)
        output = torch.empty(n, device=it.device)
        inputs = it.all_given(n) if is_root else None
        dist.scatter(output, inputs, group_src=root, group=it.group)
        same(output, it.given(n))


def check_all_to_all(it: Rank) -> None:
    for n in it.lengths[:2]:
        inputs = [it.given(n + other) for other in range(it.size)]
        outputs = [torch.empty(n + it.rank, device=it.device) for _ in range(it.size)]
        dist.all_to_all(outputs, inputs, group=it.group)
        for rank, output in enumerate(outputs):
            same(output, it.given(n + it.rank, rank))
        whole = it.given(n * it.size)
        dist.all_to_all_single(whole, whole.clone(), group=it.group)
        blocks = [each.chunk(it.size)[it.rank] for each in it.all_given(n * it.size)]
        same(whole, torch.cat(blocks))


def check_messages(it: Rank) -> None:
    right, left = (it.rank + 1) % it.size, (it.rank - 1) % it.size
    for n in it.lengths:
        got = torch.empty(n, device=it.device)
        calls = [
            dist.P2POp(dist.isend, it.given(n), group=it.group, group_peer=right),
            dist.P2POp(dist.irecv, got, group=it.group, group_peer=left),
        ]
        for work in dist.batch_isend_irecv(calls):
            work.wait()
        same(got, it.given(n, left))
    if it.rank == 0:
        # Both messages have the same tag, so they must arrive in order even though the first comes
        # from the device and the second from the host.
        it.slow()
        works = [dist.isend(it.given(10, 5), group_dst=1, group=it.group)]
        works.append(dist.isend(torch.full((10,), 9.0), group_dst=1, group=it.group))
        for work in works:
            work.wait()
    if it.rank == 1:
        first, second = torch.empty(10, device=it.device), torch.empty(10)
        dist.recv(first, group_src=0, group=it.group)
        dist.recv(second, group_src=0, group=it.group)
        same(first, it.given(10, 5))
        assert second.tolist() == [9.0] * 10


def check_objects_barrier_and_sparse(it: Rank) -> None:
    found: list[Any] = [None] * it.size
    dist.all_gather_object(found, {"rank": it.rank}, group=it.group)
    assert found == [{"rank": rank} for rank in range(it.size)]
    dist.barrier(group=it.group)
    at = torch.tensor([[it.rank, it.size]], device=it.device)
    entries = torch.sparse_coo_tensor(at, torch.ones(2, device=it.device), (it.size + 1,))
    dist.all_reduce(entries, group=it.group)
    expected = torch.ones(it.size + 1, device=it.device)
    expected[-1] = it.size
    same(entries.to_dense(), expected)


def check_inference_mode(it: Rank) -> None:
    with torch.inference_mode():
        tensor = it.given(it.lengths[-1])
        dist.all_reduce(tensor, group=it.group)
        same(tensor, it.total(it.lengths[-1]))


# ---- streams; on the CPU these checks prove nothing ----


def check_a_call_waits_for_what_makes_its_tensor(it: Rank) -> None:
    n = it.lengths[-1]
    tensor, seen = torch.empty(n, device=it.device), torch.empty(n, device=it.device)
    it.slow()
    tensor.copy_(it.given(n))
    begin_s = time.perf_counter()
    work = dist.all_reduce(tensor, group=it.group, async_op=True)
    issued_s = time.perf_counter() - begin_s
    if it.on_gpu:
        assert issued_s < 0.05, f"the call blocked for {issued_s:.3f} s"
    work.wait()
    seen.copy_(tensor)  # without waiting for the device
    same(seen, it.total(n))


def check_a_call_on_a_stream_of_the_users_own(it: Rank) -> None:
    n = it.lengths[-1]
    stream = torch.cuda.Stream() if it.on_gpu else None
    with torch.cuda.stream(stream):
        it.slow()
        tensor = it.given(n)
        dist.all_reduce(tensor, group=it.group)
        doubled = tensor * 2
    if stream is not None:
        stream.synchronize()
    same(doubled, it.total(n) * 2)


def check_results_do_not_overtake_those_who_read_the_old_ones(it: Rank) -> None:
    n = it.lengths[-1]
    whole = torch.full((n * it.size,), 7.0, device=it.device)
    given = it.given(n)
    it.slow()
    old = whole.clone()
    work = dist.all_gather_into_tensor(whole, given, group=it.group, async_op=True)
    work.wait()
    same(old, torch.full((n * it.size,), 7.0, device=it.device))
    same(whole, torch.cat(it.all_given(n)))


def check_futures_and_their_callbacks(it: Rank) -> None:
    for n in it.lengths:
        tensor = it.given(n)
        future = dist.all_reduce(tensor, group=it.group, async_op=True).get_future()
        doubled = future.then(lambda done: done.value()[0] * 2)
        same(doubled.wait(), it.total(n) * 2)
        same(future.wait()[0], it.total(n))


def check_a_tensor_that_is_dropped_at_once(it: Rank) -> None:
    n = it.lengths[-1]
    futures = []
    for _ in range(4):
        work = dist.all_reduce(it.given(n), group=it.group, async_op=True)
        futures.append(work.get_future())
        del work
        torch.full((n,), -1.0, device=it.device)  # may reuse the memory of a dropped tensor
    for future in futures:
        same(future.wait()[0], it.total(n))


def check_many_calls_in_flight(it: Rank) -> None:
    tensors = [it.given(1 + 1000 * k) for k in range(40)]
    works = [dist.all_reduce(tensor, group=it.group, async_op=True) for tensor in tensors]
    for work in reversed(works):
        work.wait()
    for tensor in tensors:
        same(tensor, it.total(tensor.numel()))


def check_a_graph_is_refused(it: Rank) -> None:
    if not it.on_gpu:
        return
    tensor = it.given(10)
    raised = ""
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            try:
                dist.all_reduce(tensor, group=it.group)
            except RuntimeError as error:
                raised = str(error)
            tensor + 1  # an empty graph warns
    finally:
        torch.cuda.synchronize()
    assert "inside a CUDA graph is not supported" in raised, raised


# ---- layers ----


def _model(device: torch.device) -> nn.Module:
    torch.manual_seed(1)
    layers = [nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 8)]
    return nn.Sequential(*layers).to(device)


def _train(model: nn.Module, it: Rank) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    source = torch.Generator().manual_seed(it.rank)
    losses = []
    for _ in range(5):
        data = torch.randn(16, 64, generator=source).to(it.device)
        optimizer.zero_grad()
        loss = model(data).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def check_ddp_trains_as_over_gloo(it: Rank) -> None:
    losses = []
    for group in (it.group, dist.new_group(backend="gloo")):
        for views in (False, True):
            wrapped = nn.parallel.DistributedDataParallel(
                _model(it.device),
                process_group=group,
                bucket_cap_mb=0.1,
                gradient_as_bucket_view=views,
            )
            losses.append(_train(wrapped, it))
    for other in losses[1:]:
        near(other, losses[0])


def check_shoals_own_wrapper_trains_as_torchs(it: Rank) -> None:
    from shoal.torch import DistributedDataParallel

    expected = _train(nn.parallel.DistributedDataParallel(_model(it.device)), it)
    for options in (
        {},
        {"gradient_as_bucket_view": True},
        {"find_unused_parameters": True},
        {"static_graph": True, "check_same": 2},
        {"bucket_cap_mb": 0.1},
        {"compress": "identity"},
    ):
        wrapped = DistributedDataParallel(_model(it.device), **options)
        near(_train(wrapped, it), expected, options)


def check_gradients_are_means_after_a_slow_backward(it: Rank) -> None:
    from shoal.torch import DistributedDataParallel

    class Slow(torch.autograd.Function):
        @staticmethod
        def forward(_ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(_ctx: Any, gradient: Tensor) -> Tensor:
            it.slow()
            return gradient.clone()

    for views in (False, True):
        model = nn.Linear(512, 512, bias=False).to(it.device)
        with torch.no_grad():
            model.weight.fill_(0.5)
        wrapped = DistributedDataParallel(model, gradient_as_bucket_view=views)
        kept = []
        for step in range(3):
            model.zero_grad()
            data = torch.full((1, 512), float(it.rank + step), device=it.device)
            Slow.apply(wrapped(data)).sum().backward()
            kept.append((model.weight.grad * 2, step))  # without waiting for the device
        for doubled, step in kept:
            mean = sum(rank + step for rank in range(it.size)) / it.size
            close = torch.allclose(doubled, torch.full_like(doubled, 2 * mean), rtol=1e-6)
            assert close, (views, step, doubled[0, 0].item(), 2 * mean)


def check_compressed_gradients_sum_to_the_means(it: Rank) -> None:
    """Check that with error feedback the sum over steps is near the sum of the means.

    They differ by one step's error and, between hosts, by the sums, which are rounded at random.
    """
    from shoal.average import ChunkTopK, ErrorFeedback
    from shoal.torch import DistributedDataParallel

    n, n_steps = 5000, 40
    # A block's largest element is 3. Random rounding to mxfp4 has a mean squared error of 1, so the
    # error is 6.3 after 40 steps, and 4 times as large for the worst of 5,000 elements.
    for method, bound in (
        (ErrorFeedback("bf16"), 0.1),
        (ErrorFeedback("mxfp8"), 6.0),
        (ErrorFeedback("mxfp4"), 25.0),
        (ChunkTopK(share=0.25, warm_up=0), 3.0 * 2 * 4),
    ):
        model = nn.Linear(n, 1, bias=False).to(it.device)
        wrapped = DistributedDataParallel(model, compress=method)
        summed = torch.zeros(n, dtype=torch.float64, device=it.device)
        for _ in range(n_steps):
            model.zero_grad()
            it.slow()
            wrapped(it.given(n)).sum().backward()
            summed += model.weight.grad[0]
        same_everywhere(it, summed)
        error = (summed - n_steps * it.total(n).double() / it.size).abs().max().item()
        assert error <= bound, (method, error)


def check_local_steps_average_parameters(it: Rank) -> None:
    from shoal.torch import DiLoCo, LocalSGD

    for kind, options in ((LocalSGD, {}), (DiLoCo, {"outer": 1.0}), (DiLoCo, {"outer": 0.5})):
        model = nn.Linear(1000, 1, bias=False).to(it.device)
        nn.init.zeros_(model.weight)
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        rate = options.get("outer", 1.0)
        outer = [torch.optim.SGD(model.parameters(), lr=rate)] if options else []
        with kind(model, inner, *outer, every=4) as local:
            for _ in range(4):
                inner.zero_grad()
                it.slow()
                model(it.given(1000)).sum().backward()
                inner.step()
            local.sync()
        mean = -4.0 * rate * it.total(1000).double().cpu() / it.size
        assert torch.allclose(model.weight[0].double().cpu(), mean, rtol=1e-6), (kind, rate)


def check_sparse_sums(it: Rank) -> None:
    own = torch.tensor([[it.rank, it.size, 3]], device=it.device)
    values = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], device=it.device)
    it.slow()
    tensor = torch.sparse_coo_tensor(own, values * (it.rank + 1), (it.size + 4, 2))
    dist.all_reduce(tensor, group=it.group)
    expected = torch.zeros(it.size + 4, 2, device=it.device)
    for rank in range(it.size):
        for row, each in zip((rank, it.size, 3), values * (rank + 1), strict=True):
            expected[row] += each
    same(tensor.to_dense(), expected)


def check_fsdp_trains_as_ddp(it: Rank) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    expected = _train(nn.parallel.DistributedDataParallel(_model(it.device)), it)
    model = _model(it.device)
    mesh = init_device_mesh(it.device.type, (it.size,))
    for layer in (model[0], model[2], model[4]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    near(_train(model, it), expected)


def check_formats_between_hosts_keep_ranks_equal(it: Rank) -> None:
    """Check that ranks keep equal weights, and losses near float32's; one host rounds nothing."""
    from torch.distributed.fsdp import fully_shard

    from shoal.torch import DistributedDataParallel
    from shoal.torch.fsdp import compress

    expected = _train(nn.parallel.DistributedDataParallel(_model(it.device)), it)
    for codec in ("bf16", "fp16", "mxfp8", "mxint8", "mxfp4"):
        sharded = _model(it.device)
        fully_shard(sharded)
        compress(sharded, gradients=codec, weights="bf16")
        for model in (DistributedDataParallel(_model(it.device), compress=codec), sharded):
            got = _train(model, it)
            close = [abs(a - b) < 0.1 * abs(a) for a, b in zip(expected, got, strict=True)]
            assert all(close), (codec, expected, got)
            for one in model.parameters():
                whole = one.full_tensor() if hasattr(one, "full_tensor") else one.detach()
                same_everywhere(it, whole)


CHECKS = {
    name.removeprefix("check_"): each
    for name, each in list(globals().items())
    if name.startswith("check_")
}


def checks(device: str, longest: int, apart: bool = False) -> dict[str, str]:
    """Run every check on this rank; return the traceback of each, or "" if it passed.

    Args:
        apart: True: each rank counts as a separate host.
    """
    _choose_host(apart)
    dist.init_process_group("shoal", timeout=timedelta(seconds=60))
    if device == "cuda":
        torch.cuda.set_device(0)

    def rank() -> Rank:
        return Rank(dist.new_group(timeout=timedelta(seconds=60)), device, longest)

    failures = {name: failure_of(check, rank()) for name, check in CHECKS.items()}
    dist.destroy_process_group()
    return failures


def _choose_host(apart: bool) -> None:
    if apart:
        os.environ["SHOAL_HOST_ID"] = f"host {os.environ['RANK']}"
        os.environ["SHOAL_SOCKET_IFNAME"] = "lo"


def lose_last(it: Rank, longest: int) -> dict[str, str]:
    """Kill the last rank in mid-call, and check that a call of each other rank raises PeerLost."""
    tensor = it.given(4 * longest)
    dist.all_reduce(tensor)
    if it.rank == it.size - 1:
        dist.all_reduce(tensor, async_op=True)
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        for _ in range(100):
            dist.all_reduce(tensor)
    except RuntimeError as error:
        if type(error).__name__ != "PeerLost":
            raise
    else:
        raise AssertionError("no call raised PeerLost")
    if it.on_gpu:
        torch.cuda.synchronize()  # returns only if no kernel waits for the lost rank any more
    dist.destroy_process_group()
    return {"a_peer_lost_in_mid_call": ""}


def lost_peer(device: str, longest: int, apart: bool = False) -> dict[str, str]:
    """Form a group on this rank, and run `lose_last`."""
    _choose_host(apart)
    dist.init_process_group("shoal", timeout=timedelta(seconds=60))
    return lose_last(Rank(dist.group.WORLD, device, longest), longest)
