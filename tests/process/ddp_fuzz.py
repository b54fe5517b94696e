"""Random training programs, run with shoal's DistributedDataParallel, torch's, and neither.

A program is data: a model's features, options, an optimizer and a list of actions. Leaving out
some of its parts yields another valid program.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from process.ddp_actions import ACTIONS, BETWEEN, GRADIENT, PASS, ZERO
from process.ddp_models import FEATURES, N_ROWS, OPTIMIZERS, WIDTH, MeanOfGradients, Net, loss_of
from torch import nn

# Each program ends with these actions: an error may arise one pass after its cause.
_LAST: Final = tuple(
    (name, 1000 + at)
    for at, name in enumerate(
        ("gradients_are_set_to_none", "a_pass_is_averaged", "the_optimizer_steps") * 2
    )
)

_BUCKET_BYTES: Final = (128, 512, 4096, None)

# Relative and absolute tolerance of sums in another order. Through norms, the different rounding of
# a narrow gradient reaches wide parameters.
_CLOSE: Final = {torch.float32: (1e-4, 1e-6), torch.float64: (1e-9, 1e-9)}
_ROUNDED: Final = (2e-2, 2e-2)
_BESIDE_ROUNDED: Final = (2e-2, 2e-4)
_NARROW: Final = {"beside", "widened", "largest"}

# torch 2.11's wrapper broadcasts buffers as changes that autograd counts: batch norm's statistics
# change between two forward passes, and the backward pass of both raises on every rank.
_COUNTS_BROADCASTS: Final = torch.__version__.startswith("2.11.")


class Program(NamedTuple):
    """A program for all ranks.

    Args:
        seed: of the model's weights and of the actions' draws.
        actions: names in the table, each with a number that seeds its draws.
    """

    seed: int
    size: int
    features: tuple[str, ...]
    options: dict[str, Any]
    optimizer: str
    actions: tuple[tuple[str, int], ...]

    @property
    def suits_torch(self) -> bool:
        """True if torch's wrapper handles the program correctly."""
        given = {name for name, value in self.options.items() if value} | {*self.features}
        actions = [ACTIONS[name] for name, _ in self.actions]
        finds_outputs = given.isdisjoint({"static_graph", "find_unused_parameters"})
        return (
            "weighted" not in given
            and (finds_outputs or "object" not in given)
            and all(one.torch and given.isdisjoint(one.torch_unless) for one in actions)
        )

    @property
    def may_be_refused(self) -> bool:
        return any(ACTIONS[name].may_be_refused for name, _ in self.actions)

    @property
    def sums_in_one_order(self) -> bool:
        """False if a gradient's strides differ between ranks, and so the order of its sums."""
        return all(name != "a_gradient_has_other_strides" for name, _ in self.actions)

    @property
    def all_actions(self) -> tuple[tuple[str, int], ...]:
        return self.actions + _LAST


def draw(seed: int, size: int) -> Program:
    """Return the program of a seed."""
    source = random.Random(f"program {seed}")
    outputs = source.choice([(), (), ("view",), ("object",), ("dict",)])
    others = [name for name in FEATURES if name not in ("view", "object", "dict")]
    features = (*(name for name in others if source.random() < 0.25), *outputs)
    options = _options(source)
    optimizer = source.choice(sorted(OPTIMIZERS))
    if "object" in outputs or not options.get("static_graph"):  # refused
        features = tuple(name for name in features if name != "reentrant")
    if options.get("find_unused_parameters"):
        features = tuple(name for name in features if name != "penalty")
    if "sparse" in features:
        options.pop("weighted", None)  # refused
    if "sparse" in features or "widened" in features:  # the others want one dense dtype
        optimizer = source.choice(["SGD", "Trusting"])
    elif options.get("gradient_as_bucket_view") and optimizer == "Previous":
        optimizer = "SGD with momentum"
    names = list(_actions(source, options))
    if _COUNTS_BROADCASTS and "convolution" in features:
        names = [name for name in names if name != "the_losses_of_two_forward_passes_are_added"]
    actions = tuple((name, at) for at, name in enumerate(names))
    return Program(seed, size, features, options, optimizer, actions)


def every_pass(size: int, options: dict[str, Any], *features: str) -> Program:
    """Return a program that makes each kind of pass that these options allow, and then steps."""
    names = [name for name in _actions_of(options, PASS) if not ACTIONS[name].may_be_refused]
    steps = [(name, "the_optimizer_steps", "gradients_are_set_to_none") for name in names]
    actions = tuple((name, at) for at, name in enumerate(itertools.chain(*steps)))
    return Program(1, size, features, {"bucket_cap_mb": 2.0**-13, **options}, "SGD", actions)


def _actions_of(options: dict[str, Any], *kinds: str) -> list[str]:
    return [
        name
        for name, one in ACTIONS.items()
        if one.kind in kinds and (one.static or not options.get("static_graph"))
    ]


def _options(source: random.Random) -> dict[str, Any]:
    n_bytes = source.choice(_BUCKET_BYTES)
    options: dict[str, Any] = {"bucket_cap_mb": n_bytes and n_bytes / (1 << 20)}
    unused, static = {"find_unused_parameters": True}, {"static_graph": True}
    options |= source.choice([{}, {}, unused, unused, static])
    views, own = {"gradient_as_bucket_view": True}, {"gradient_as_bucket_view": False}
    options |= source.choice([{}, views, own])
    return options | source.choice([{}, {}, {}, {"weighted": True}])


def _actions(source: random.Random, options: dict[str, Any]) -> Iterator[str]:
    """Draw steps: actions before a pass, the pass, actions before the step, and the step."""
    refuses = source.random() < 0.3

    def of_kinds(*kinds: str) -> list[str]:
        names = _actions_of(options, *kinds)
        return [name for name in names if refuses or not ACTIONS[name].may_be_refused]

    passes, between = of_kinds(PASS), of_kinds(BETWEEN, GRADIENT)
    for step in range(source.randint(2, 4)):
        if step:
            yield from source.sample(between, source.randint(0, 2))
            if source.random() < 0.8:
                yield source.choice(of_kinds(ZERO))
        yield source.choice([*passes, *["a_pass_is_averaged"] * len(passes)])
        yield from source.sample(of_kinds(GRADIENT), source.randint(0, 2))
        yield "the_optimizer_steps"


class Run:
    """A running program, as its actions see it.

    Attributes:
        source, own: random generators of actions; equal on all ranks, and different.
        kept: gradients that the program keeps by reference.
        is_averaged: gradients are equal on all ranks, and no step has used them.
    """

    def __init__(self, program: Program, wrapper: Callable[..., Any]) -> None:
        self.program = program
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.source = random.Random(f"model {program.seed}")
        self.own = random.Random()
        self.net = Net(program.features, self.source)
        self.has_views = bool(program.options.get("gradient_as_bucket_view"))
        self.kept: list[torch.Tensor] = []
        self.is_averaged = False
        self.weight = 1.0
        self._wrapper = wrapper
        self.wrap()
        self.make_optimizer()

    def wrap(self) -> None:
        self.wrapped = self._wrapper(self.net, **self.program.options)

    def another(self) -> Run:
        """Return a run of a second equal model, in its own wrapper."""
        return Run(self.program, self._wrapper)

    @property
    def is_oracle(self) -> bool:
        return isinstance(self.wrapped, MeanOfGradients)

    def make_optimizer(self) -> None:
        self.optimizer = OPTIMIZERS[self.program.optimizer](self.parameters())

    def act(self, name: str, number: int) -> None:
        """Perform one action."""
        self.source.seed(f"{self.program.seed} {number}")
        self.own.seed(f"{self.program.seed} {number} {self.rank}")
        self.weight = self.own.choice([1.0, 2.0, 4.0])
        ACTIONS[name].call(self)

    def later_seeds(self) -> tuple[float, float]:
        """Draw seeds for the rest of an action whose number of draws differs by rank."""
        return self.source.random(), self.own.random()

    def loss(self, module: Any = None, order: Sequence[int] | None = None) -> torch.Tensor:
        """Return the loss of a pass over this rank's data, through the wrapper or a module."""
        generator = torch.Generator().manual_seed(self.own.randrange(1 << 30))
        data = torch.randn(N_ROWS, WIDTH, generator=generator, dtype=torch.float64)
        module = module or self.wrapped
        is_averaged = getattr(module, "require_backward_grad_sync", True)
        if self.program.options.get("weighted") and module is not self.net and is_averaged:
            module.weigh(self.weight)
        output = module(data, self._order() if order is None else order)
        return loss_of(output, in_place="view" in self.program.features) + self.net.penalty()

    def _order(self) -> list[int]:
        """Return the layers to call; they differ by rank where some may be unused."""
        order = [0, 1, 2]
        if self.program.options.get("static_graph"):
            return order
        if self.source.random() < 0.3:
            self.source.shuffle(order)
        if self.program.options.get("find_unused_parameters"):
            order = [index for index in order if self.own.random() < 0.7]
            return order if set(order) - {1} else [0, *order]
        return order + order[:1] if self.source.random() < 0.3 else order

    def backward(self, loss: torch.Tensor, *, retain_graph: bool = False) -> None:
        loss.backward(retain_graph=retain_graph)
        if self.is_oracle:
            self.wrapped.average()
        self.is_averaged = True

    def acts_here(self) -> bool:
        """True if this rank acts: all ranks do or one does, and all do if gradients are equal."""
        everywhere, rank = self.source.random() < 0.5, self.source.randrange(self.size)
        return everywhere or self.is_averaged or rank == self.rank

    def factor(self) -> float:
        return self.source.choice([1.0, 0.5])

    def parameters(self) -> list[Any]:
        return [parameter for parameter in self.net.parameters() if parameter.requires_grad]

    def dense(self) -> list[Any]:
        sparse = self.net.words.weight if "sparse" in self.program.features else None
        return [parameter for parameter in self.parameters() if parameter is not sparse]

    def with_gradients(self) -> list[Any]:
        """Return parameters whose gradients to change; none where this rank does not act."""
        every = self.dense()
        chosen = self.source.sample(every, self.source.choice([1, 2, len(every)]))
        acts = self.acts_here()
        return [parameter for parameter in chosen if acts and parameter.grad is not None]

    def record(self) -> dict[str, torch.Tensor | None]:
        """Return every value that a program can see."""
        found: dict[str, torch.Tensor | None] = {}
        if not self.is_oracle:  # the oracle leaves buffers to each rank
            found = {f"buffer {name}": buffer for name, buffer in self.net.named_buffers()}
        for name, parameter in self.net.named_parameters():
            gradient = parameter.grad
            found[f"parameter {name}"] = parameter.detach()
            found[f"gradient of {name}"] = None if gradient is None else gradient.to_dense()
        if not self.has_views:
            found |= {f"kept gradient {at}": kept for at, kept in enumerate(self.kept)}
        return {name: one if one is None else one.clone() for name, one in found.items()}


class Trace(NamedTuple):
    """The values of a program after each action, and the error that ended it, or None."""

    records: list[dict[str, torch.Tensor | None]]
    error: Exception | None

    def digests(self) -> list[str]:
        """Return digests of the parameters after each action."""
        return [_digest(record) for record in self.records]


def traced(program: Program, wrapper: Callable[..., Any]) -> Trace:
    """Run a program with gradients averaged by a wrapper."""
    records = []
    try:
        run = Run(program, wrapper)
        for name, number in program.all_actions:
            run.act(name, number)
            records.append(run.record())
    except Exception as error:  # noqa: BLE001 - a wrapper may raise anything
        return Trace(records, error)
    return Trace(records, None)


def _digest(record: dict[str, torch.Tensor | None]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for name, tensor in record.items():
        if name.startswith("parameter") and tensor is not None:
            digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def difference(ours: Trace, expected: Trace, program: Program) -> str:
    """Describe the first difference of two traces; empty if there is none."""
    beside_narrow = not _NARROW.isdisjoint(program.features)
    every = zip(program.all_actions, ours.records, expected.records, strict=False)
    for (name, _), own, other in every:
        if ours.error is not None and ACTIONS[name].may_be_refused:
            break  # refused at the next pass, for one
        for what in own.keys() & other.keys():
            apart = _apart(own[what], other[what], beside_narrow=beside_narrow)
            if apart:
                return f"after {name}, {what} {apart}"
    return ""


def _apart(one: torch.Tensor | None, other: torch.Tensor | None, *, beside_narrow: bool) -> str:
    """Describe how two tensors differ; empty if they are within tolerance."""
    if one is None or other is None or (one.shape, one.dtype) != (other.shape, other.dtype):
        return "" if one is other else f"is {one}, and should be {other}"
    if torch.equal(one, other):
        return ""
    relative, absolute = _CLOSE.get(one.dtype, _ROUNDED)
    if beside_narrow and one.dtype in _CLOSE:
        relative, absolute = _BESIDE_ROUNDED
    close = torch.isclose(one, other, relative, absolute, equal_nan=True).flatten()
    if close.all():
        return ""
    own, expected = one.flatten()[~close], other.flatten()[~close]
    return f"has {own[:3].tolist()} in {len(own)} places, and should have {expected[:3].tolist()}"


class Finding(NamedTuple):
    """One rank's findings about a program.

    Args:
        error: text of the error of shoal's wrapper, and its action.
        difference: from the expected values.
        digests: parameters after each action.
        expected: the digests with the mean of gradients.
    """

    error: str
    difference: str
    digests: list[str]
    expected: list[str]


def find(program: Program, wrapper: Callable[..., Any], gloo: dist.ProcessGroup) -> Finding:
    """Run a program with a wrapper, with torch's and with none, and compare."""
    MeanOfGradients.group = gloo
    mean = traced(program, MeanOfGradients)
    if mean.error is not None:
        raise mean.error
    ours = traced(program, wrapper)
    found = difference(ours, mean, program)
    if program.suits_torch:
        group = dist.new_group(backend="gloo")  # an error may leave calls in the group
        torchs = functools.partial(nn.parallel.DistributedDataParallel, process_group=group)
        found = found or difference(ours, traced(program, torchs), program)
        dist.barrier(gloo)  # a rank that ran no program could leave while another still connects
        dist.destroy_process_group(group)
    error = ""
    if ours.error is not None:
        at = program.all_actions[len(ours.records)][0]
        error = f"{type(ours.error).__name__} at {at}: {ours.error}"
    return Finding(error, found, ours.digests(), mean.digests())


def judged(program: Program, findings: Sequence[Finding]) -> str:
    """Describe the fault in all ranks' findings; empty if there is none."""
    errors = [f"rank {rank}: {one.error}" for rank, one in enumerate(findings) if one.error]
    for rank, one in enumerate(findings):
        if one.difference:
            return f"rank {rank}: {one.difference}"
    if errors and (
        not program.may_be_refused
        or len(errors) < len(findings)
        or any("TimedOut" in error for error in errors)
    ):
        return "; ".join(errors)
    every = zip(*(one.digests for one in findings), strict=False)
    expected = zip(*(one.expected for one in findings), strict=False)
    for (name, _), own, other in zip(program.all_actions, every, expected, strict=False):
        if errors and ACTIONS[name].may_be_refused:
            break
        if len(set(own)) > 1 and len(set(other)) == 1 and program.sums_in_one_order:
            return f"after {name}, parameters differ between ranks"
    return ""
