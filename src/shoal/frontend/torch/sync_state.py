"""`shoal.torch.sync_state`: copy the state of a model and its optimizer from one rank to all."""

from __future__ import annotations

import ctypes
import hashlib
import io
import itertools
import zlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

import shoal.frontend.torch as frontend
from shoal.average.agreeing import difference_among, shared_by
from shoal.errors import ShoalError, UsageError
from shoal.frontend.torch.tensor_buffers import is_expanded, kind_of

if TYPE_CHECKING:
    from shoal.group.group import Group

_CHUNK_BYTES: Final = 16 << 20
_NAME: Final = "sync_state"
_UNSENDABLE: Final = "the first value that cannot be sent"
_NOTHING: Final = "none"
_PLAIN: Final = (type(None), bool, int, float, complex, str, bytes)

Progress = Callable[[int, int], None]


def sync_state(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    from_rank: int = 0,
    group: dist.ProcessGroup | None = None,
    progress: Progress | None = None,
) -> int:
    """Copy the parameters, the buffers and the optimizer's state of one rank to every rank.

    Every rank of the group calls it between two steps. Ranks first compare hashes, of 32 bits for
    each tensor. Ranks that hold the state already return at once; the others receive it in chunks
    of 16 MiB, and compare hashes again at the end. A rank that has returned waits for the others in
    its next collective.

    Args:
        model: the same on every rank, or a wrapper of it. Non-persistent buffers and the extra
            state of modules are sent too; gradients are not.
        optimizer: has the model's parameters. It may have no state yet on a receiving rank, which
            loads the state with `load_state_dict`.
        from_rank: the sender's rank in the group.
        group: a shoal process group; None is the default group.
        progress: called after each chunk with the bytes so far and in total, on the sender and on
            receiving ranks. If it raises, the copy ends on all of them.

    Returns:
        The number of bytes of tensors that this rank sent or received; 0 if it held the state.

    Raises:
        UsageError: models or optimizers differ between ranks (the text names the first tensor or
            parameter group), a value cannot be sent, `from_rank` differs or is out of range, or the
            group is not shoal's. No state has moved.
        ShoalError: a rank's state differs from the sent state; the text names the first entry. Or
            as for every call of the group. The state of receiving ranks is undefined: sync again.
    """
    members = frontend.group_for("sync_state", group)
    state = _State(model, optimizer)
    described = state.described() | {"from_rank": str(from_rank)}
    if found := difference_among(members, _NAME, described):
        raise UsageError(f"sync_state: {found}; build the same model and optimizer on every rank")
    if not 0 <= from_rank < members.size:
        raise UsageError(f"sync_state: from_rank must be 0 to {members.size - 1}, got {from_rank}")
    if (unsendable := described[_UNSENDABLE]) != _NOTHING:
        raise UsageError(f"sync_state: {unsendable}, which cannot be sent")
    texts = state.texts()
    own = hashlib.blake2b(repr(texts).encode(), digest_size=8).digest()
    digests = bytearray(8 * members.size)
    members.all_gather(digests, bytearray(own), name=_NAME)
    every = [digests[at : at + 8] for at in range(0, len(digests), 8)]
    ranks = [from_rank, *(rank for rank, one in enumerate(every) if one != every[from_rank])]
    number = next(shared_by(members).names)
    if len(ranks) == 1 or members.rank not in ranks:
        return 0
    some = members.subgroup(ranks, f"{_NAME} {number}")
    try:
        return state.share(some, ranks, texts, progress)
    except BaseException as error:
        some.abort(f"sync_state failed on rank {members.rank}: {error}")
        raise
    finally:
        some.close()


class _State:
    """The model and the optimizer of one rank."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        is_wrapped = isinstance(model, torch.nn.parallel.DistributedDataParallel)
        self._model: Any = model.module if is_wrapped else model
        self._optimizer = optimizer

    def described(self) -> dict[str, str]:
        """Return the properties that must be equal on every rank before anything is sent."""
        found: dict[str, str] = {}
        first: dict[int, str] = {}
        for name, one in self._tensors(remove_duplicate=False):
            is_first = first.setdefault(id(one), name) == name
            found[name] = _kind(one) if is_first else f"tied to {first[id(one)]}"
        found["optimizer"] = type(self._optimizer).__name__
        for at, group in enumerate(self._optimizer.param_groups if self._optimizer else ()):
            held = [first.get(id(one), _kind(one)) for one in group["params"]]
            found[f"parameter group {at}"] = ", ".join(held)
        unsendable = (f"{n} is {_kind(one)}" for n, one in self._leaves() if not _can_send(one))
        return found | {_UNSENDABLE: next(unsendable, _NOTHING)}

    def texts(self) -> dict[str, str]:
        """Return every value as text; a tensor as its hash."""
        return {n: _hashed(one) if _is_tensor(one) else repr(one) for n, one in self._leaves()}

    def share(
        self,
        group: Group,
        ranks: Sequence[int],
        texts: dict[str, str],
        progress: Progress | None,
    ) -> int:
        """Send this state on rank 0 of the group, or receive it; return its number of bytes.

        Args:
            ranks: the group's ranks as numbered in the caller's group.
            texts: the result of `texts()`.
        """
        is_sender, tree = group.rank == 0, self._tree()
        saved = io.BytesIO()
        if is_sender:
            torch.save((pytree.tree_map(lambda one: _like(one, "meta"), tree), texts), saved)
        length = array("q", [saved.tell()])
        group.broadcast(length, name=_NAME)
        header = bytearray(saved.getvalue() if is_sender else length[0])
        group.broadcast(header, name=_NAME)
        sent, wanted = torch.load(io.BytesIO(header), weights_only=True)
        tree = tree if is_sender else pytree.tree_map(lambda one: _like(one, "cpu"), sent)
        values = [*(one for _, one in self._tensors()), *pytree.tree_leaves(tree)]
        n_bytes = _stream(group, list(filter(_is_tensor, values)), progress)
        if not is_sender:
            for name, value in tree["extra state"].items():
                self._model.get_submodule(name).set_extra_state(value)
            if self._optimizer is not None:
                self._optimizer.load_state_dict(tree["optimizer"])
            texts = self.texts()
        differing = (at for at, name in enumerate(wanted) if texts.get(name) != wanted[name])
        found = array("q", bytes(8 * group.size))
        group.all_gather(found, array("q", [next(differing, -1)]), name=_NAME)
        for rank, at in zip(ranks, found, strict=True):
            if at >= 0:
                raise ShoalError(
                    f"sync_state: the state of rank {rank} differs from the state that rank "
                    f"{ranks[0]} sent; the first different value is {list(wanted)[at]}: was it "
                    "changed meanwhile, or by load_state_dict?"
                )
        return n_bytes

    def _tensors(self, *, remove_duplicate: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
        named = self._model.named_parameters, self._model.named_buffers
        return itertools.chain(*(one(remove_duplicate=remove_duplicate) for one in named))

    def _tree(self) -> dict[str, Any]:
        """Return all values but the model's tensors: nested dicts, lists and tuples."""
        unset = torch.nn.Module.get_extra_state
        named = self._model.named_modules()
        extra = {n: one.get_extra_state() for n, one in named if type(one).get_extra_state != unset}
        optimizer = self._optimizer.state_dict() if self._optimizer is not None else {}
        return {"extra state": extra, "optimizer": optimizer}

    def _leaves(self) -> Iterator[tuple[str, Any]]:
        yield from self._tensors()
        for path, value in pytree.tree_leaves_with_path(self._tree()):
            # A scheduler may leave a NumPy float64, which is a subclass of float.
            yield pytree.keystr(path), float(value) if isinstance(value, float) else value


def _like(value: Any, device: str) -> Any:
    """Return an uninitialized tensor for a tensor; return other values as they are."""
    if not _is_tensor(value):
        return float(value) if isinstance(value, float) else value
    return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=device)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _can_send(value: Any) -> bool:
    """Return True for plain values, and for tensors with separate memory for each element.

    Return False for sparse, quantized, meta, sharded and expanded tensors.
    """
    if not _is_tensor(value):
        return type(value) in _PLAIN
    has_bytes = type(value.data) is torch.Tensor and value.layout is torch.strided
    if not has_bytes or value.is_meta or value.is_quantized:
        return False
    return not is_expanded(value)


def _kind(value: Any) -> str:
    if not _is_tensor(value):
        return f"a {type(value).__name__}"
    return f"a {type(value.data).__name__} {kind_of(value)}"


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements in order: the tensor's own memory, or a copy in host memory."""
    whole = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return whole.reshape(-1).view(torch.uint8)


def _hashed(tensor: torch.Tensor) -> str:
    flat = _bytes_of(tensor)
    memory = (ctypes.c_char * len(flat)).from_address(flat.data_ptr()) if len(flat) else b""
    return f"{_kind(tensor)} of hash {zlib.crc32(memory):08x}"


@torch.no_grad()
def _stream(group: Group, tensors: Sequence[torch.Tensor], progress: Progress | None) -> int:
    """Broadcast tensors from rank 0, a chunk at a time; return their number of bytes."""
    n_sent, total = 0, sum(one.nbytes for one in tensors)
    for one in tensors:
        flat = _bytes_of(one)
        for chunk in torch.split(flat, _CHUNK_BYTES) if len(flat) else ():
            group.broadcast(chunk, name=_NAME)
            n_sent += len(chunk)
            if progress is not None:
                progress(n_sent, total)
        if group.rank and flat.data_ptr() != one.data_ptr():
            one.copy_(flat.view(one.dtype).view(one.shape))
    return total
