"""Models and optimizers for random training programs, and an oracle that averages.

A model is composed of features, which can be left out to shrink a failing program.
"""

import contextlib
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

N_ROWS: Final = 3  # of each rank's batch
WIDTH: Final = 8
_N_LAYERS: Final = 3

FEATURES: Final = {
    "tied": "the last layer has the weight of the first",
    "convolution": "a convolution and a batch norm come before the layers",
    "sparse": "an embedding has sparse gradients",
    "frozen": "the second layer is frozen before the model is wrapped",
    "beside": "parameters of other dtypes, with strides, without elements and without dimensions",
    "widened": "a bfloat16 parameter has float32 gradients",
    "largest": "a float16 gradient is near the largest float16",
    "checkpoint": "every second layer is computed again in the backward pass",
    "reentrant": "the second layer is used twice more, and computed again in nested passes",
    "penalty": "the loss has a term of parameters, whose gradients come before the output's",
    "view": "the model returns a view, and the loss works on it in place",
    "object": "the model returns an object of a class of the program's",
    "dict": "the model returns tensors in a dict and a list",
}


class Answer:
    """An output type that torch does not search for tensors."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


class Net(nn.Module):
    """Layers called in any order, plus the parts that the features ask for."""

    def __init__(self, features: Iterable[str], source: random.Random) -> None:
        super().__init__()
        self.features = frozenset(features)
        float64: Any = {"dtype": torch.float64}
        self.layers = nn.ModuleList(
            nn.Linear(WIDTH, WIDTH, bias=at != 1, **float64) for at in range(_N_LAYERS)
        )
        if "tied" in self.features:
            self.layers[-1].weight = self.layers[0].weight
        if "convolution" in self.features:
            self.convolution = nn.Conv2d(2, 2, 2, padding=1, **float64)
            self.norm = nn.BatchNorm2d(2, **float64)
        if "sparse" in self.features:
            self.words = nn.Embedding(16, WIDTH, sparse=True, **float64)
        self.only = nn.ParameterList()
        if "penalty" in self.features:
            self.only.append(torch.zeros(64, **float64))
        self.beside = nn.ParameterList(self._beside())
        generator = torch.Generator().manual_seed(source.randrange(1 << 30))
        for parameter in self.parameters():
            values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.data.copy_(values.div_(3))
        if "frozen" in self.features:
            self.layers[1].requires_grad_(False)
        if "widened" in self.features:
            self.beside[-1].grad_dtype = torch.float32

    def _beside(self) -> Iterator[torch.Tensor]:
        if "beside" in self.features:
            for dtype in (torch.bfloat16, torch.float16, torch.complex64, torch.float32):
                yield torch.zeros(WIDTH, dtype=dtype)
            yield torch.zeros(WIDTH, 2 * WIDTH, dtype=torch.float64).t()[::2]
            yield torch.zeros(0, 3)
            yield torch.zeros((), dtype=torch.float64)
        if "largest" in self.features:
            yield torch.zeros(4, dtype=torch.float16)
        if "widened" in self.features:
            yield torch.zeros(WIDTH, dtype=torch.bfloat16)

    def forward(self, data: torch.Tensor, order: Sequence[int]) -> Any:
        data = data.to(self.layers[0].weight.dtype)
        total = self._total_beside(data)
        if "sparse" in self.features:
            total = total + self.words((data.abs() * 5).long() % 16).sum()
        if "convolution" in self.features:
            data = self.norm(self.convolution(data.view(-1, 2, 2, 2)))
            data = data.flatten(1)[:, :WIDTH]
        for at, index in enumerate(order):
            layer = self.layers[index]
            if "checkpoint" in self.features and at % 2:
                data = checkpoint(layer, data, use_reentrant=False)
            else:
                data = layer(data)
            data = torch.tanh(data)
        for _ in range(2 if "reentrant" in self.features else 0):
            data = checkpoint(self.layers[1], data, use_reentrant=True)
        # Its value is zero: numbers near the largest float16 in a sine would be noise.
        return self._output(data, total - total.detach())

    def penalty(self) -> torch.Tensor:
        """Return a term of the loss that no forward pass computes."""
        return sum((parameter**2).mean() for parameter in self.only)  # type: ignore[return-value]

    def _total_beside(self, data: torch.Tensor) -> torch.Tensor:
        total = torch.zeros((), dtype=torch.float64)
        factor = 1 + data.mean().item()
        for parameter in self.beside:
            wide = parameter.float() if parameter.grad_dtype == torch.float32 else parameter
            part = (wide * factor).sum()
            total = total + (part.real.double() if part.is_complex() else part.double())
        if "largest" in self.features:
            parameter = self.beside[-2 if "widened" in self.features else -1]
            share = 30_000.0 * (dist.get_rank() + 1) / dist.get_world_size()
            total = total + 2 * (parameter.double() * share).sum()
        return total

    def _output(self, data: torch.Tensor, total: torch.Tensor) -> Any:
        if "dict" in self.features:
            return {"left": data[:, :2], "right": [data[:, 2:], total]}
        data = data * 1.5 + total
        if "view" in self.features:
            return data[:, : WIDTH // 2]
        return Answer(data) if "object" in self.features else data


def loss_of(output: Any, *, in_place: bool) -> torch.Tensor:
    """Return a scalar that depends on every tensor of an output."""
    if isinstance(output, dict):
        right, total = output["right"]
        return (output["left"] ** 2).mean() + right.sin().mean() + total
    if isinstance(output, Answer):
        return output.value.mean() + output.value.sin().mean()
    if in_place:
        output.mul_(0.5)
    return output.mean() + output.sin().mean()  # type: ignore[no-any-return]


class Previous(torch.optim.Optimizer):
    """Keeps a reference to each gradient as the previous one."""

    def __init__(self, parameters: Iterable[torch.Tensor], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for parameter in [p for p in self.param_groups[0]["params"] if p.grad is not None]:
            state = self.state[parameter]
            difference = parameter.grad - state.get("previous", 0)
            parameter.sub_((parameter.grad + difference) * self.param_groups[0]["lr"])
            state["previous"] = parameter.grad


class Trusting(torch.optim.Optimizer):
    """Scales steps by the norms of all gradients and parameters, as LAMB and LARS do."""

    def __init__(self, parameters: Iterable[torch.Tensor], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        trained = [p for p in self.param_groups[0]["params"] if p.grad is not None]
        if not trained:
            return
        sizes = [p.abs().double().sum() for p in trained]
        slopes = [p.grad.to_dense().abs().double().sum() for p in trained]
        trust = float((1 + sum(sizes)) / (1 + sum(slopes)))
        for parameter in trained:
            step = parameter.grad.to_dense() * (self.param_groups[0]["lr"] * trust)
            parameter.sub_(step.to(parameter.dtype))


_RATE: Final = 2.0**-6

OPTIMIZERS: Final[dict[str, Callable[[list[torch.Tensor]], Any]]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=_RATE),
    "SGD with momentum": lambda p: torch.optim.SGD(p, lr=_RATE, momentum=0.5, foreach=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=_RATE, foreach=False),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=_RATE, eps=1e-3, foreach=True),
    "Previous": lambda p: Previous(p, lr=_RATE),
    "Trusting": lambda p: Trusting(p, lr=_RATE),
}


class MeanOfGradients(nn.Module):
    """The contract of a wrapper, done literally: every rank reads all ranks' gradients.

    After an averaged pass, a gradient computed on any rank since the last average is the
    mean over ranks; a rank without one counts as zero. Other gradients do not change.

    Attributes:
        group: exchanges the gradients; NOT a shoal group.
    """

    group: dist.ProcessGroup

    def __init__(self, module: nn.Module, *, weighted: bool = False, **_options: object) -> None:
        super().__init__()
        self.module = module
        self._is_weighted, self._weight = weighted, 1.0
        self._averages = self._is_expecting = True
        self._divides_by_size = False
        self._n_passes = 0

    def forward(self, *inputs: Any) -> Any:
        for parameter in self.module.parameters():
            if parameter.requires_grad and not hasattr(parameter, "is_ready"):
                parameter.is_ready = False  # type: ignore[attr-defined]
                parameter.register_post_accumulate_grad_hook(_note)  # type: ignore[no-untyped-call]
        self._is_expecting = self._averages
        return self.module(*inputs)

    def weigh(self, weight: float) -> None:
        self._weight = weight

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        self._averages = False
        yield
        self._averages = True

    @contextlib.contextmanager
    def join(self, *, divide_by_initial_world_size: bool) -> Iterator[None]:
        self._divides_by_size = divide_by_initial_world_size
        self._n_passes = 0
        yield
        while any(given is not None for given in self._gathered(None)):
            pass
        self._divides_by_size = False
        states = self._gathered((self._n_passes, self.module.state_dict()))
        _, last = max(states, key=lambda state: state[0])
        self.module.load_state_dict(last)

    def least(self, number: int) -> int:
        """Return the minimum over ranks."""
        return min(self._gathered(number))

    def average(self) -> None:
        """Called after each backward pass."""
        if not self._is_expecting:
            return
        self._n_passes += 1
        named = {name: p for name, p in self.module.named_parameters() if hasattr(p, "is_ready")}
        own = {name: (p.is_ready, _wide(p.grad)) for name, p in named.items()}  # type: ignore[attr-defined]
        given = [one for one in self._gathered((own, self._weight)) if one is not None]
        total = sum(weight for _, weight in given)
        if self._divides_by_size and not self._is_weighted:
            total = dist.get_world_size()
        for name, parameter in named.items():
            every = [(gradients[name][1], weight / total) for gradients, weight in given]
            there = [torch.from_numpy(one) * share for one, share in every if one is not None]
            if there and any(gradients[name][0] for gradients, _ in given):
                _give(parameter, sum(there))
            parameter.is_ready = False  # type: ignore[attr-defined]

    def _gathered(self, given: Any) -> list[Any]:
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, given, group=self.group)
        return every


def _note(parameter: Any) -> None:
    parameter.is_ready = True


def _wide(gradient: torch.Tensor | None) -> Any:
    """Widen to a NumPy array, which pickles faster; None stays None."""
    if gradient is None:
        return None
    dtype = torch.complex128 if gradient.is_complex() else torch.float64
    wide = gradient.to_dense().to(dtype, copy=True)  # an array holds on to its storage
    return wide.resolve_conj().resolve_neg().numpy()


@torch.no_grad()
def _give(parameter: torch.Tensor, mean: Any) -> None:
    if parameter.grad is None or parameter.grad.is_sparse:
        parameter.grad = mean.to(parameter.grad_dtype or parameter.dtype)
    else:
        parameter.grad.copy_(mean)
