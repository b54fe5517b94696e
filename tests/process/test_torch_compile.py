"""Compiled programs make the same collectives. `SHOAL_SOAK=1` compiles to machine code too."""

import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
from process.ranks import run_ranks
from process.shared_ranks import in_torch

if shutil.which("g++") is None:
    pytest.skip("torch.compile needs g++", allow_module_level=True)

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn

# Inductor's C++ compiler takes half a minute of CPU; the collectives in the graph are the same.
BACKEND = "inductor" if os.environ.get("SHOAL_SOAK") else "aot_eager"
# A few small kernels do not repay precompiled headers or a trial per instruction set.
QUICK = {"compile_threads": 1, "cpp_cache_precompile_headers": False, "cpp.vec_isa_ok": True}


def combine(tensor: torch.Tensor) -> torch.Tensor:
    world = dist.group.WORLD
    total = functional.all_reduce(tensor * 2, "sum", world)
    gathered = functional.all_gather_tensor(total + 1, 0, world)
    return functional.reduce_scatter_tensor(gathered, "avg", 0, world).cos()


def compile_collectives() -> None:
    warnings.simplefilter("ignore")  # the compiler's own
    dist.init_process_group("shoal")
    tensor = torch.arange(6.0) + dist.get_rank()
    compiled = torch.compile(combine, fullgraph=True, backend=BACKEND)
    with torch._inductor.config.patch(QUICK):
        torch.testing.assert_close(compiled(tensor), combine(tensor))
    dist.destroy_process_group()


@pytest.mark.timeout(300)  # half a minute of two cores in the soak, even on busy ones
def test_compiled_collectives_give_the_results_of_plain_ones(tmp_path: Path) -> None:
    env = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    run_ranks(compile_collectives, 2, env=env, deadline_s=280)


class Layer(nn.Module):
    """Not a Sequential: torch does not compile its own modules where another one calls them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(6, 2)

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        return self.linear(data).tanh()


def train(wrapped: nn.Module) -> list[torch.Tensor]:
    data = torch.randn(4, 6, generator=torch.Generator().manual_seed(dist.get_rank()))
    for _ in range(2):
        wrapped(data).square().mean().backward()
    return [parameter.grad.clone() for parameter in wrapped.parameters()]


@in_torch("ranks")
def test_a_compiled_wrapper_compiles_its_model_as_torchs_does() -> None:
    import shoal.torch

    torchs, ours = nn.parallel.DistributedDataParallel, shoal.torch.DistributedDataParallel
    graphs: dict[type, list[list[str]]] = {torchs: [], ours: []}
    for wrapper, compiled in graphs.items():
        torch._dynamo.reset()

        def note(graph: Any, _inputs: object, compiled: list[list[str]] = compiled) -> Any:
            compiled.append([str(node.target) for node in graph.graph.nodes if node.op != "output"])
            return graph.forward

        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            gradients = train(torch.compile(wrapper(Layer()), backend=note))
        unknown = [one for one in warned if "does not know" in str(one.message)]
        assert wrapper is torchs or not unknown
        torch.testing.assert_close(gradients, train(wrapper(Layer())))
    assert graphs[torchs]  # the model
    assert graphs[ours] == graphs[torchs]
