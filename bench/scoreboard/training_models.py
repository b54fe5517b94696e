"""The models of timed trainings: small enough for two cores, with batches and losses.

They are modelled on Li et al., "PyTorch Distributed" (VLDB 2020), whose ResNet50 and BERT have 10
to 20 times as many parameters.
"""

from __future__ import annotations

import importlib.util
import itertools
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor, nn

_WIDTHS: Final = (1024, 4096, 1024, 2048, 64)
_WIDE: Final = 2048
_WIDE_LAYERS: Final = 14
_ROWS: Final = 8  # of a batch
_CLASSES: Final = 10
_WORDS: Final = 8192
_TOKENS: Final = (2, 64)
_PACED_LAYERS: Final = 32
_PACED_ELEMS: Final = 1 << 17
_SCRIPT: Final = Path("examples", "train_lm.py")

Batch = tuple[Tensor, ...]


class TrainedModel(NamedTuple):
    """A model with its batches, loss and optimizer.

    Args:
        batch: makes a batch of this rank with a generator.
        loss: returns the loss of the model, or of its wrapper, on a batch.
        optimizer: makes the optimizer of its parameters.
    """

    module: nn.Module
    batch: Callable[[torch.Generator], Batch]
    loss: Callable[[nn.Module, Batch], Tensor]
    optimizer: Callable[[Any], torch.optim.Optimizer]


class _Residual(nn.Module):
    """Two convolutions with batch norm, and a way around them (He et al., 2016)."""

    def __init__(self, n_in: int, n_out: int) -> None:
        super().__init__()
        stride = 1 if n_in == n_out else 2
        self.body = nn.Sequential(
            nn.Conv2d(n_in, n_out, 3, stride, 1, bias=False),
            nn.BatchNorm2d(n_out),
            nn.ReLU(),
            nn.Conv2d(n_out, n_out, 3, 1, 1, bias=False),
            nn.BatchNorm2d(n_out),
        )
        self.around = nn.Conv2d(n_in, n_out, 1, stride, bias=False) if stride > 1 else nn.Identity()

    def forward(self, images: Tensor) -> Tensor:
        """Return images of the same size, or of half the size."""
        return torch.relu(self.body(images) + self.around(images))


class _Encoder(nn.Module):
    """An encoder of words like BERT, with one table for input and prediction."""

    def __init__(self, width: int = 256, n_layers: int = 4) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(_WORDS, width), nn.Embedding(_TOKENS[1], width)
        nn.init.normal_(self.words.weight, std=0.02)
        layer = nn.TransformerEncoderLayer(
            width, width // 64, 4 * width, dropout=0.0, batch_first=True
        )
        self.layers = nn.TransformerEncoder(layer, n_layers, enable_nested_tensor=False)

    def forward(self, words: Tensor) -> Tensor:
        """Return the loss of predicting every word."""
        hidden = self.layers(self.words(words) + self.places.weight)
        return F.cross_entropy((hidden @ self.words.weight.T).flatten(0, 1), words.flatten())


class _Pause(torch.autograd.Function):
    """Sleeps forward and backward, like a computation elsewhere."""

    @staticmethod
    def forward(ctx: Any, data: Tensor, weight: Tensor, forward_s: float, back_s: float) -> Tensor:
        ctx.back_s, ctx.shape = back_s, weight.shape
        time.sleep(forward_s)
        return data.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        time.sleep(ctx.back_s)
        return gradient, torch.ones(ctx.shape), None, None


class _PacedLayer(nn.Module):
    """A layer of many parameters that sleeps instead of computing."""

    def __init__(self, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(_PACED_ELEMS))
        self._times_s = forward_s, backward_s

    def forward(self, data: Tensor) -> Tensor:
        """Return the input."""
        return _Pause.apply(data, self.weight, *self._times_s)  # type: ignore[no-any-return, no-untyped-call]


def resnet_like() -> TrainedModel:
    """Return a model like ResNet of 2.8 million parameters.

    Most arithmetic is in the first layers, and most parameters are in the last ones.
    """
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    layers += [_Residual(*ends) for ends in ((64, 64), (64, 64), (64, 128), (128, 128))]
    layers += [_Residual(*ends) for ends in ((128, 256), (256, 256))]
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, _CLASSES)]

    def batch(numbers: torch.Generator) -> Batch:
        images = torch.randn(_ROWS, 3, 16, 16, generator=numbers)
        return images, torch.randint(_CLASSES, (_ROWS,), generator=numbers)

    return TrainedModel(nn.Sequential(*layers), batch, _classified, _sgd(0.02))


def bert_like() -> TrainedModel:
    """Return a model like BERT of 5.3 million parameters.

    Two fifths of them are in a table whose gradient is ready last.
    """

    def batch(numbers: torch.Generator) -> Batch:
        return (torch.randint(_WORDS, _TOKENS, generator=numbers),)

    return TrainedModel(_Encoder(), batch, _own_loss, _sgd(0.02))


def linear_layers() -> TrainedModel:
    """Return a model of 10.6 million parameters that computes little."""
    layers: list[nn.Module] = []
    for n_in, n_out in itertools.pairwise(_WIDTHS):
        layers += [nn.Linear(n_in, n_out), nn.ReLU()]

    def batch(numbers: torch.Generator) -> Batch:
        data = torch.randn(_ROWS, _WIDTHS[0], generator=numbers)
        return data, data[:, : _WIDTHS[-1]].sin()

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return F.mse_loss(model(batch[0]), batch[1])

    return TrainedModel(nn.Sequential(*layers[:-1]), batch, loss, _sgd(0.05))


def wide_layers() -> TrainedModel:
    """Return a model of 58.7 million parameters in equal layers.

    A copy of its gradients is larger than the staging memory.
    """
    layers = [nn.Linear(_WIDE, _WIDE, bias=False) for _ in range(_WIDE_LAYERS)]

    def batch(numbers: torch.Generator) -> Batch:
        return (torch.randn(_ROWS, _WIDE, generator=numbers),)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return cast("Tensor", model(*batch).square().mean())

    return TrainedModel(nn.Sequential(*layers), batch, loss, _sgd(0.01))


def paced(forward_s: float = 0.0, backward_s: float = 0.0) -> TrainedModel:
    """Return a model of 4.2 million parameters in 32 layers that together sleep for these times."""
    times_s = forward_s / _PACED_LAYERS, backward_s / _PACED_LAYERS
    layers = [_PacedLayer(*times_s) for _ in range(_PACED_LAYERS)]

    def batch(_numbers: torch.Generator) -> Batch:
        return (torch.zeros(1, requires_grad=True),)

    return TrainedModel(
        nn.Sequential(*layers), batch, lambda model, batch: model(*batch).sum(), _sgd(0.01)
    )


def demo_model(width: int = 128, rows: int = 32768) -> TrainedModel:
    """Return the demo's model and text: 8.9 million parameters, most of them in tables.

    Raises:
        FileNotFoundError: the current folder is not the project's.
    """
    script = demo_script()
    args = Namespace(width=width, rows=rows, context=128, layers=2, batch=8)
    text, _held_out = script.read_corpus()

    def batch(numbers: torch.Generator) -> Batch:
        starts = torch.randint(len(text) - args.context, (args.batch,), generator=numbers)
        return (script.windows(text, starts, args.context),)

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, 1e-3, betas=(0.9, 0.95), fused=True)

    return TrainedModel(script.ByteModel(args), batch, _own_loss, optimizer)


def demo_script() -> Any:
    """Return the module of the demo's training script.

    Raises:
        FileNotFoundError: the current folder is not the project's.
    """
    if not _SCRIPT.exists():
        raise FileNotFoundError(f"no {_SCRIPT}, the demo's model: run in the project's folder")
    spec = importlib.util.spec_from_file_location("train_lm", _SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    sys.modules["train_lm"] = script
    spec.loader.exec_module(script)
    return script


def _classified(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def _own_loss(model: nn.Module, batch: Batch) -> Tensor:
    loss: Tensor = model(*batch)
    return loss


def _sgd(lr: float) -> Callable[[Any], torch.optim.Optimizer]:
    return lambda parameters: torch.optim.SGD(parameters, lr=lr)


MODELS: Final[Mapping[str, Callable[..., TrainedModel]]] = {
    "linear": linear_layers,
    "wide": wide_layers,
    "resnet": resnet_like,
    "bert": bert_like,
    "demo": demo_model,
    "demo small": lambda: demo_model(width=64, rows=2048),
    "paced": paced,
}
