"""Lets all ranks agree once whether the GPUs of a group's hosts sum among themselves.

They do if every host has the same number of ranks, at least two, each on its own GPU, NCCL works
among them, and no rank has SHOAL_LOCAL_NCCL=no. All other calls use only host memory.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Final

from torch._C._distributed_c10d import PrefixStore

from shoal import threads
from shoal.dtypes import DType, Op
from shoal.frontend.torch.gpu.local_calls import LocalCalls
from shoal.frontend.torch.gpu.local_order import LocalOrder
from shoal.group.group import Group
from shoal.group.pool.rails import rail_of
from shoal.settings import local_nccl

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from shoal.frontend.torch.collectives import TorchCollective
    from shoal.frontend.torch.gpu.device import Device
    from shoal.frontend.torch.gpu.nccl import NcclCollectives
    from shoal.frontend.torch.layouts import Arguments
    from shoal.group.pool.rails import Rail

_LOG = logging.getLogger(__name__)

# Smaller calls take no longer than it takes the ranks of a host to agree on them, and pass through
# host memory in one piece. Not yet measured on a GPU.
LEAST_BYTES: Final = 4 << 20

# The dtypes that NCCL sums. shoal's average of integers is not the divided sum.
_FLOATS: Final = {DType.FLOAT16, DType.BFLOAT16, DType.FLOAT32, DType.FLOAT64}
_SUMS: Final = {*_FLOATS, DType.INT8, DType.UINT8, DType.INT32, DType.INT64}

_DIGEST_BYTES: Final = 16
_NONCE_BYTES: Final = 8


def takes(collective: TorchCollective, calls: Sequence[Arguments], rest: Arguments) -> bool:
    """Return True if an operation can run among the GPUs; the result is equal on every rank."""
    if collective.name != "all_reduce" or len(calls) != 1:
        return False
    (view,), (op,) = calls[0], rest
    dtypes = _SUMS if op is Op.SUM else _FLOATS if op is Op.AVG else ()
    return bool(view.n_bytes >= LEAST_BYTES and view.dtype in dtypes)


def rail_in(group: Group) -> Rail | None:
    """Return this rank's rail if all hosts have the same number of ranks, at least 2; else None.

    A group with servers has its own rails, for all its large sums.
    """
    if type(group) is not Group:
        return None
    rail = rail_of(group.planner.cluster.hosts, group.rank)
    return rail if rail is not None and rail.n_rails > 1 else None


def agreed_calls(
    group: Group, rail: Rail, device: Device, store: Store, timeout_s: float
) -> LocalCalls | None:
    """Return the calls among these GPUs; None, on every rank, if any of the GPUs cannot.

    Every rank of the group calls it, with a store that all can reach until it returns, and waits
    for the others. Raises ShoalError if the group has ended.
    """
    own = device.identity() if local_nccl(os.environ) else ""
    digest = hashlib.blake2b(own.encode(), digest_size=_DIGEST_BYTES).digest() if own else b""
    record = digest.ljust(_DIGEST_BYTES, b"\0") + os.urandom(_NONCE_BYTES)
    everyones = bytearray(group.size * len(record))
    group.all_gather(everyones, record, name="GPUs", timeout_s=timeout_s)
    records = [everyones[at : at + len(record)] for at in range(0, len(everyones), len(record))]
    why = why_not([each[:_DIGEST_BYTES] for each in records], group.planner.cluster.hosts)
    if why:
        _LOG.debug("%s: GPUs of a host do not work among themselves: %s", group, why)
        return None
    # The nonce distinguishes this group's keys from an earlier group's.
    nonce = bytes(records[rail.mates[0]][_DIGEST_BYTES:]).hex()
    mates_store = PrefixStore(f"shoal/gpus/{rail.mates[0]}/{nonce}", store)
    connect = functools.partial(
        device.collectives, mates_store, rail.place, rail.n_rails, timeout_s
    )
    collectives, reason = _attempt(connect, timeout_s)
    have_all = bytearray([collectives is not None])
    with contextlib.ExitStack() as unless_used:
        if collectives is not None:
            unless_used.callback(collectives.abort)
        # 3 times the limit: other ranks report only after their own deadlines.
        group.all_reduce(have_all, Op.MIN, name="GPUs connected", timeout_s=3 * timeout_s)
        if collectives is not None and have_all[0]:
            calls = _calls(group, rail, device, collectives)
            unless_used.pop_all()
            return calls
    _LOG.warning(
        "%s: NCCL does not work among the GPUs of %s host (%s); all-reduces go through host "
        "memory. Set SHOAL_LOCAL_NCCL=no to skip the attempt",
        *(group, "another" if collectives else "this", reason or "see its log"),
    )
    return None


def why_not(gpus: Sequence[bytes | bytearray], hosts: Sequence[int]) -> str:
    """Return the reason why the GPUs cannot sum among themselves; "" if they can.

    Args:
        gpus: the identity of each rank's GPU; zeros if it has no GPU or no NCCL.
    """
    without = [rank for rank, gpu in enumerate(gpus) if not any(gpu)]
    if without:
        return f"ranks {without[:8]} have no NCCL, or SHOAL_LOCAL_NCCL=no"
    places = {(host, bytes(gpu)) for host, gpu in zip(hosts, gpus, strict=True)}
    return "" if len(places) == len(gpus) else "ranks of a host share a GPU"


def _attempt(
    connect: Callable[[], NcclCollectives], timeout_s: float
) -> tuple[NcclCollectives | None, str]:
    """Return the result, or why it failed by the deadline: NCCL's own waits have no deadline."""
    outcome: Future[NcclCollectives] = Future()

    def run() -> None:
        try:
            outcome.set_result(connect())
        except BaseException as error:  # noqa: BLE001 - another rank may wait for it
            outcome.set_exception(error)

    threads.start("shoal-local-connect", run)
    try:
        return outcome.result(timeout_s), ""
    except Exception as error:  # noqa: BLE001 - calls then use host memory
        if not outcome.done():
            outcome.add_done_callback(_give_up)
            return None, f"no answer in {timeout_s:g} s"
        return None, f"{type(error).__name__}: {error}".rstrip(": ")


def _give_up(late: Future[NcclCollectives]) -> None:
    if late.exception() is None:
        late.result().abort()


def _calls(group: Group, rail: Rail, device: Device, collectives: NcclCollectives) -> LocalCalls:
    mates = group.subgroup(rail.mates, "GPUs of a host")
    along = group.subgroup(rail.members, f"GPUs of place {rail.place}")

    def abort(why: str) -> None:
        for each in (group, mates, along):
            each.abort(why)

    return LocalCalls(group, along, LocalOrder(mates), device, collectives, abort)
