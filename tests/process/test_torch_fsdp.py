"""`shoal.torch.fsdp.compress`, compared bitwise with training that NumPy rounds for all ranks."""

import hashlib
import math
import unittest
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from process.shared_ranks import Case, SharedRanks, cases_in, gloo_group, in_torch, shared_ranks
from process.stage import bytes_out, bytes_since
from process.staged import staging
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from wires import NARROW, Floats, rounded

import shoal.torch
from shoal.average import ErrorFeedback
from shoal.codec import top_k
from shoal.errors import UsageError

LR = 0.125  # products with it are exact, so every instruction set rounds a step equally

# Parameters that travel together; most lengths are no multiple of the ranks or of a block.
GROUPS = (("0.weight", "0.bias"), ("2.weight", "2.bias"), ("3.weight", "3.bias"))


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 41), nn.Tanh(), nn.Linear(41, 23), nn.Linear(23, 5))


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(100 * step + rank))


def loss_of(output: torch.Tensor) -> torch.Tensor:
    return output.float().square().mean()


def packed(tensors: Sequence[torch.Tensor], size: int) -> Floats:
    """Return, by rank, the concatenated shards of some parameters, padded to equal lengths."""
    rows = []
    for tensor in tensors:
        whole = torch.zeros(math.ceil(len(tensor) / size) * size, *tensor.shape[1:])
        whole[: len(tensor)] = tensor
        rows.append(whole.reshape(size, -1).numpy())
    return np.concatenate(rows, axis=1)


def unpacked(shards: Floats, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    size, at, found = len(shards), 0, []
    for tensor in like:
        n_rows = math.ceil(len(tensor) / size)
        n = n_rows * math.prod(tensor.shape[1:])
        whole = torch.from_numpy(shards[:, at : at + n].copy())
        found.append(whole.reshape(n_rows * size, *tensor.shape[1:])[: len(tensor)])
        at += n
    return found


@dataclass
class Expected:
    """The training of all ranks in this process.

    Args:
        gradients, weights: the wire of each.
        replicas: the groups of ranks that each hold a complete model.
        compute, reduce: the types of mixed precision.
        factor: multiplies each gradient, whose sums are then not divided; None: averages.
    """

    gradients: str = "identity"
    weights: str = "identity"
    replicas: Sequence[Sequence[int]] = ((0, 1),)
    compute: torch.dtype = torch.float32
    reduce: torch.dtype = torch.float32
    factor: float | None = None

    def __post_init__(self) -> None:
        self.net = net()
        self.master = {n: each.detach().clone() for n, each in self.net.named_parameters()}
        self.grads: dict[str, torch.Tensor] = {}

    @property
    def size(self) -> int:
        """The number of shards."""
        return len(self.replicas[0])

    def computed_with(self) -> dict[str, torch.Tensor]:
        """Return the parameters of the forward pass."""
        found = {}
        for names in GROUPS:
            given = [self.master[name].to(self.compute).float() for name in names]
            shards = [rounded(self.weights, shard) for shard in packed(given, self.size)]
            found |= dict(zip(names, unpacked(np.stack(shards), given), strict=True))
        return {name: each.to(self.compute) for name, each in found.items()}

    def backward(self, *steps: int) -> dict[int, list[torch.Tensor]]:
        """Average the summed gradients of these batches; return the losses by rank."""
        losses, found = {}, {}
        for rank in sorted(rank for ranks in self.replicas for rank in ranks):
            leaves = {n: each.requires_grad_() for n, each in self.computed_with().items()}
            losses[rank] = []
            for step in steps:
                given = batch(rank, step).to(self.compute)
                loss = loss_of(torch.func.functional_call(self.net, leaves, given))
                loss.backward()
                losses[rank].append(loss.detach())
            found[rank] = {n: each.grad.to(self.reduce).float() for n, each in leaves.items()}
        for names in GROUPS:
            averages = np.mean([self._summed(found, names, ranks) for ranks in self.replicas], 0)
            like = [self.master[name] for name in names]
            parts = [one.to(self.reduce).float() for one in unpacked(averages, like)]
            self.grads |= dict(zip(names, parts, strict=True))
        return losses

    def _summed(self, found: Any, names: Sequence[str], ranks: Sequence[int]) -> Floats:
        """Return the shards of the average; a rank's own part is neither sent nor rounded."""
        total = np.zeros(1, np.float32)
        for at, rank in enumerate(ranks):
            given = [found[rank][name] for name in names]
            if self.factor is not None:
                given = [each * self.factor for each in given]
            shards = packed(given, self.size)
            total = total + np.stack(
                [s if to == at else rounded(self.gradients, s) for to, s in enumerate(shards)]
            )
        return total / np.float32(1 if self.factor is not None else self.size)

    def step(self) -> None:
        for name, each in self.master.items():
            each.sub_(LR * self.grads[name])


def sharded(
    gradients: str | None = None, weights: str | None = None, mesh: Any = None, **options: Any
) -> nn.Sequential:
    module = net()
    mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),))
    for part in (module[0], module[2], module):
        fully_shard(part, mesh=mesh, **options)
    shoal.torch.fsdp.compress(module, gradients, weights)
    return module


def whole(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor().detach().clone()


def gathered(module: Any) -> dict[str, torch.Tensor]:
    """Return the parameters that this rank computes with."""
    parts = [part for part in module.modules() if isinstance(part, FSDPModule)]
    for part in parts:
        part.unshard()
    found = {name: each.detach().clone() for name, each in module.named_parameters()}
    for part in parts:
        part.reshard()
    return found


def digest(tensors: dict[str, torch.Tensor]) -> str:
    data = b"".join(each.contiguous().view(torch.uint8).numpy() for each in tensors.values())
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, each in expected.items():
        assert torch.equal(found[name], each), name


def train(module: nn.Module, expected: Expected, n_steps: int = 3) -> str:
    """Train both, and compare after each step; return a digest of the shared values."""
    rank, optimizer = dist.get_rank(), torch.optim.SGD(module.parameters(), lr=LR)
    digests = []
    for step in range(n_steps):
        digests.append(digest(computed_with := gathered(module)))
        equal(computed_with, expected.computed_with())
        optimizer.zero_grad()
        loss = loss_of(module(batch(rank, step)))
        loss.backward()
        assert torch.equal(loss.detach(), expected.backward(step)[rank][0])
        equal({n: whole(each.grad) for n, each in module.named_parameters()}, expected.grads)
        optimizer.step()
        expected.step()
        equal({n: whole(each) for n, each in module.named_parameters()}, expected.master)
    return " ".join(digests)


hosts = shared_ranks(2, RANKS_PER_HOST="1")
four_hosts = shared_ranks(4, RANKS_PER_HOST="1")
three_in_a_host = shared_ranks(4, RANKS_PER_HOST="3")


def case_training_equals_the_one_that_numpy_rounds() -> str:
    digests = []
    for wire, reshards in (*((wire, True) for wire in NARROW), ("mxint8", False)):
        module = sharded(wire, wire, reshard_after_forward=reshards)
        digests.append(train(module, Expected(wire, wire)))
    digests.append(train(sharded(gradients="mxfp4"), Expected(gradients="mxfp4")))
    digests.append(train(sharded(weights="fp16"), Expected(weights="fp16")))
    return " ".join(digests)


def case_16_bit_values_of_mixed_precision_travel_in_fewer_bits() -> str:
    digests = []
    half = torch.bfloat16
    for wire in ("mxfp8", "mxint8", "mxfp4"):
        for reduce in (half, torch.float32):
            policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=reduce)
            expected = Expected(wire, wire, compute=half, reduce=reduce)
            digests.append(train(sharded(wire, wire, mp_policy=policy), expected))
    return " ".join(digests)


def case_a_codec_no_narrower_than_the_tensors_changes_nothing() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float16)
    optimizers, modules = [], [sharded(mp_policy=policy), sharded("bf16", "fp16", mp_policy=policy)]
    for module in modules:
        optimizers.append(torch.optim.SGD(module.parameters(), lr=LR))
        loss_of(module(batch(dist.get_rank(), 0))).backward()
        optimizers[-1].step()
    plain, narrow = ({n: whole(each) for n, each in m.named_parameters()} for m in modules)
    equal(narrow, plain)


def case_float16_gradients_are_divided_as_in_torch_and_infinities_arrive() -> None:
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float16)
    module, expected = sharded("mxfp8", mp_policy=policy), Expected("mxfp8", reduce=torch.float16)
    loss_of(module(batch(dist.get_rank(), 0))).backward()
    expected.backward(0)
    for name, each in module.named_parameters():
        torch.testing.assert_close(whole(each.grad), expected.grads[name], rtol=2e-3, atol=1e-6)
    module.zero_grad()
    (loss_of(module(batch(dist.get_rank(), 0))) * 1e9).backward()
    assert any(not whole(each.grad).isfinite().all() for each in module.parameters())


def case_accumulated_gradients_are_rounded_once() -> None:
    module, expected = sharded("mxfp4", "mxfp8"), Expected("mxfp4", "mxfp8")
    for step in (0, 1, 2):
        module.set_requires_gradient_sync(step == 2)
        loss_of(module(batch(dist.get_rank(), step))).backward()
        assert (module[0].weight.grad is None) == (step < 2)
    expected.backward(0, 1, 2)
    equal({n: whole(each.grad) for n, each in module.named_parameters()}, expected.grads)


def case_clipped_gradients_are_the_rounded_averages() -> None:
    module, expected = sharded("mxfp8", "mxfp8"), Expected("mxfp8", "mxfp8")
    loss_of(module(batch(dist.get_rank(), 0))).backward()
    expected.backward(0)
    norm = torch.nn.utils.clip_grad_norm_(module.parameters(), 0.01)
    right = torch.stack([each.square().sum() for each in expected.grads.values()]).sum().sqrt()
    torch.testing.assert_close(norm.full_tensor(), right)
    for name, each in module.named_parameters():
        torch.testing.assert_close(whole(each.grad), expected.grads[name] * (0.01 / right))


def case_saved_parameters_are_not_rounded_and_can_be_loaded() -> None:
    module, expected = sharded("mxfp4", "mxfp4"), Expected("mxfp4", "mxfp4")
    train(module, expected, 2)
    state = module.state_dict()
    equal({name: whole(each) for name, each in state.items()}, expected.master)
    other = sharded("mxfp4", "mxfp4")
    other.load_state_dict(state)
    train(other, expected, 1)


def case_sums_and_other_divisors_are_as_in_torch() -> None:
    for factor, only_sums in ((3.0, False), (None, True), (3.0, True), (2.0, False)):
        module = sharded("mxint8", "mxint8")
        for part in (module[0], module[2], module):
            if factor is not None:
                part.set_gradient_divide_factor(factor)
            part.set_force_sum_reduction_for_comms(only_sums)
        multiplied = 1 / 3.0 if factor == 3.0 and not only_sums else None
        expected = Expected("mxint8", "mxint8", factor=multiplied)
        loss_of(module(batch(dist.get_rank(), 0))).backward()
        expected.backward(0)
        for name, each in module.named_parameters():
            right = expected.grads[name]
            right = right * 2 / 3 if factor == 3.0 and only_sums else right
            torch.testing.assert_close(whole(each.grad), right, rtol=3e-7, atol=0)


def case_an_unshard_in_the_background_is_rounded_too() -> None:
    policies = None, MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for policy, compute in zip(policies, (torch.float32, torch.bfloat16), strict=True):
        options = {} if policy is None else {"mp_policy": policy}
        module = sharded(weights="mxfp8", **options)
        handle = module[0].unshard(async_op=True)
        assert handle is not None
        handle.wait()
        expected = Expected(weights="mxfp8", compute=compute).computed_with()
        assert torch.equal(module[0].weight, expected["0.weight"])


def case_types_without_a_codec_travel_unchanged_with_a_warning() -> None:
    test = unittest.TestCase()
    warned = test.assertLogs if dist.get_rank() == 0 else test.assertNoLogs
    modules = [net().double(), net()]
    modules[1][0].bias = nn.Parameter(modules[1][0].bias.detach().bfloat16(), requires_grad=False)
    modules[1][0].register_forward_pre_hook(lambda part, _: setattr(part, "seen", part.bias))
    for module, kind in zip(modules, ("float64", "uint8"), strict=True):
        fully_shard(module)
        shoal.torch.fsdp.compress(module, weights="mxfp8")
        with warned("shoal", "WARNING") as caught:
            found = [gathered(module), gathered(module)]
        masters = {name: whole(each) for name, each in module.named_parameters()}
        for each in found:
            equal(each, masters)
        if caught is not None:
            (line,) = caught.output
            assert f"sends them as torch.{kind}" in line
            assert "the parameters of the model are not sent in mxfp8" in line


def case_bytes() -> None:
    """A step sends the parameters twice and the gradients once, in the bytes of the format."""
    found, parts = {}, 4 * 128 * 257  # elements that each of two ranks sends in one collective
    for wire in ("identity", *NARROW):
        module = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
        for part in (*module, module):
            fully_shard(part)
        shoal.torch.fsdp.compress(module, wire, wire)
        dist.barrier()
        before = bytes_out()
        module(torch.ones(1, 256)).sum().backward()
        dist.barrier()
        found[wire] = bytes_since(before)
        dist.barrier()  # no rank closes its connections before both have counted
    bits = {"identity": 32, "bf16": 16, "fp16": 16, "mxfp8": 8.25, "mxint8": 8.25, "mxfp4": 4.25}
    for wire, n_bytes in found.items():
        payload = 3 * parts * bits[wire] / 8
        assert payload <= n_bytes < 1.05 * payload + 4000, (wire, found)


def refused(why: str, module: nn.Module, *args: Any, **how: Any) -> None:
    with pytest.raises(UsageError, match=why):
        shoal.torch.fsdp.compress(module, *args, **how)


def case_modules_that_cannot_be_compressed_are_refused_and_do_not_change() -> None:
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather

    refused("no sharded parameters: apply fully_shard", net(), "mxfp8")
    module = sharded()
    before = vars(module._get_fsdp_state()._fsdp_param_group).copy()
    refused("unknown wire 'fp4'; give one of identity, bf16", module, "fp4")
    refused("unknown wire 'fp4'", module, "mxfp8", "fp4")
    why = r"gradients=ErrorFeedback\(wire='mxfp8'\): FSDP keeps no residuals"
    refused(why, module, ErrorFeedback("mxfp8"))  # type: ignore[arg-type]
    refused("FSDP keeps no residuals", module, top_k(0.01, 8))

    class Another(DefaultAllGather):
        pass

    module[2].set_custom_all_gather(Another())
    refused("module '2' has the collective Another in place of torch's", module, "mxfp8", "mxfp8")
    assert vars(module._get_fsdp_state()._fsdp_param_group) == before
    shoal.torch.fsdp.compress(module, "mxfp8")  # which replaces no all-gather
    why = "the model is sharded over a process group whose backend is not shoal"
    with gloo_group() as gloo:
        refused(why, fully_shard(net(), mesh=DeviceMesh.from_group(gloo, "cpu")), "bf16")


def case_replicated_modules_and_modules_on_several_meshes_are_refused() -> None:
    from torch.distributed._composable.replicate_with_fsdp import replicate
    from torch.distributed.fsdp._fully_shard import _fsdp_common as common

    copied = replicate(net(), mesh=init_device_mesh("cpu", (2,)))
    refused("the model is replicated, not sharded", copied, "mxfp8")
    if not hasattr(common, "ShardPlacementResult"):  # torch supports one mesh per module
        return
    other = common.FSDPMeshInfo(DeviceMesh.from_group(dist.new_group(), "cpu"), shard_mesh_dim=0)

    def place(parameter: nn.Parameter) -> Any:
        return common.ShardPlacementResult(Shard(0), other) if parameter.ndim == 1 else None

    module = nn.Sequential(fully_shard(nn.Linear(8, 8)), nn.Linear(8, 8))
    fully_shard(module[1], shard_placement_fn=place)
    why = "module '1' has parameters on 2 meshes .*fully_shard to each of its parts"
    refused(why, module, "mxfp8")
    first = module[0]._get_fsdp_state()._fsdp_param_groups[0]
    assert type(first._reduce_scatter_comm).__name__ == "DefaultReduceScatter"


def case_ranks_with_different_codecs_get_an_error_that_names_both() -> str:
    module = sharded(gradients=("mxfp8", "mxfp4")[dist.get_rank()])
    with pytest.raises(UsageError, match=r"in mxfp8 between hosts.*in mxfp4") as raised:
        loss_of(module(batch(0, 0))).backward()
    assert "reduce_scatter" in str(raised.value)


def case_identity_ends_compression() -> None:
    module = sharded("mxfp4", "mxfp4")
    shoal.torch.fsdp.compress(module, weights="identity")
    shoal.torch.fsdp.compress(module)  # as before
    train(module, Expected(gradients="mxfp4"), 1)
    shoal.torch.fsdp.compress(module, gradients="identity")
    loss_of(module(batch(dist.get_rank(), 1))).backward()


def case_tensors_of_a_device_go_through_host_memory_with_the_same_bits() -> str:
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    expected = Expected("mxfp4", "mxfp8", compute=torch.bfloat16, reduce=torch.bfloat16)
    with staging(piece_bytes=1024) as device:
        digests = train(sharded("mxfp4", "mxfp8"), Expected("mxfp4", "mxfp8"))
        digests += train(sharded("mxfp4", "mxfp8", mp_policy=half), expected)
    assert device.n_copies > 100
    return digests


@pytest.mark.parametrize("case", cases_in(globals()))
def test_fsdp2(case: Case, hosts: SharedRanks) -> None:
    assert len({*map(str, hosts.run(case))}) == 1


def halves() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


@in_torch("four_hosts")
def test_averages_over_replicas_are_as_in_torch() -> str:
    expected = Expected("mxfp8", "mxfp4", [(0, 1), (2, 3)])
    return train(sharded("mxfp8", "mxfp4", halves()), expected)


@in_torch("four_hosts")
def test_groups_with_rounded_weights_do_not_round_them_again() -> str:
    """Gather in groups of two in the backward pass, with the same weights."""
    module = sharded(weights="mxfp4", reshard_after_forward=2)
    expected = Expected(weights="mxfp4", replicas=[(0, 1, 2, 3)])
    output = module(batch(dist.get_rank(), 0))
    assert len(module[0].weight.to_local()) in (21, 20)  # half of the rows
    found = gathered(module)
    equal(found, expected.computed_with())
    loss_of(output).backward()
    expected.backward(0)
    for name, each in module.named_parameters():
        torch.testing.assert_close(whole(each.grad), expected.grads[name])
    return digest(found)


def each_half_for_itself() -> str:
    """Ranks 0 and 1 are in one host, ranks 2 and 3 in two."""
    ranks = (0, 1) if dist.get_rank() < 2 else (2, 3)
    wires = ("identity", "identity") if dist.get_rank() < 2 else ("mxfp4", "mxfp8")
    mesh = halves()["shard"]
    return train(sharded("mxfp4", "mxfp8", mesh), Expected(*wires, replicas=[ranks]))


def test_nothing_is_rounded_inside_a_host(three_in_a_host: SharedRanks) -> None:
    digests = three_in_a_host.run(each_half_for_itself)
    assert digests == [digests[0], digests[0], digests[2], digests[2]]


@in_torch("three_in_a_host")
def test_replicas_are_refused_if_only_some_would_round() -> None:
    why = r"replica on ranks \[0, 1\] of one host and another on ranks \[2, 3\] of several"
    refused(why, sharded(mesh=halves()), "mxfp8", "mxfp8")
    shoal.torch.fsdp.compress(module := sharded(mesh=halves()), "mxfp8", "identity")
    loss_of(module(batch(dist.get_rank(), 0))).backward()
