"""One rank's part of a check: publish facts, probe the other hosts in turn, report on rank 0."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from shoal.check import facts
from shoal.check.probe import PATIENCE_S, Answerer, Probe, probe
from shoal.check.report import Findings
from shoal.errors import ShoalError, TimedOut
from shoal.rendezvous import Store, job_key
from shoal.rendezvous.environment import LaunchInfo, find_place
from shoal.rendezvous.store.client import TcpStoreClient
from shoal.rendezvous.store.server import TcpStoreServer

if TYPE_CHECKING:
    from shoal.check.facts import Facts

# A round of probes: a few waits for each path; a rank that takes longer has died.
_ROUND_S: Final = 10 * PATIENCE_S
_END: Final = "check/end"


def check(timeout_s: float) -> Findings | None:
    """Check this job's machines, on every rank at once; return the findings on rank 0.

    Waits `timeout_s` for ranks that have not started. Raises UsageError for a wrong variable,
    interface or key; TimedOut if rank 0 does not answer.
    """
    place = find_place(otherwise="; or let --hosts host0,host1 start a rank on each host over ssh")
    with _store(place, timeout_s) as store:
        answerer = Answerer(place.master_addr, os.environ)
        try:
            own = facts.gather(place.rank, answerer.paths, answerer.token)
            store.set(f"check/facts/{place.rank}", own.encode())
            present = _all_facts(store, place, timeout_s)
            missing = [rank for rank in range(place.size) if rank not in present]
            found = Findings([present[rank] for rank in sorted(present)], missing, {})
            # The other ranks of a host share the interfaces of the lowest.
            found.probes.update(_probe_hosts(store, own, found.hosts))
            if place.rank:
                store.get(_END, _ROUND_S)
                return None
            store.set(_END, b"")
            return found
        finally:
            answerer.close()


@contextlib.contextmanager
def _store(place: LaunchInfo, timeout_s: float) -> Iterator[Store]:
    """Connect to the store of the job; rank 0 serves it, and stays until the others have left."""
    where = place.master_addr, place.master_port
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        from shoal.frontend.torch.launched import agent_store  # torchrun itself holds that port

        try:
            yield agent_store(*where, timeout_s)
        except ShoalError:
            raise
        except RuntimeError as error:  # torch's, in several lines
            why = str(error).partition("\n")[0].rstrip(".")
            raise ShoalError(
                f"torchrun's store at {where[0]}:{where[1]} failed: {why}; is torchrun still "
                "running there?"
            ) from None
        return
    key = job_key(os.environ)
    server = TcpStoreServer(*where, key=key) if place.rank == 0 else None
    client = TcpStoreClient(*where, timeout_s=timeout_s, key=key)
    try:
        yield client
    finally:
        client.close()
        if server is not None:
            server.await_leavers(PATIENCE_S)
            server.close()


def _all_facts(store: Store, place: LaunchInfo, timeout_s: float) -> dict[int, Facts]:
    """Collect the facts that ranks have published; rank 0 decides which ranks are present."""
    until = time.monotonic() + timeout_s
    if place.rank:
        here = int(store.get("check/here", 2 * timeout_s), 16)
        ranks = [rank for rank in range(place.size) if here >> rank & 1]
        return {rank: facts.decode(store.get(f"check/facts/{rank}", timeout_s)) for rank in ranks}
    present = {}
    for rank in range(place.size):
        with contextlib.suppress(TimedOut):
            left_s = max(0.001, until - time.monotonic())
            present[rank] = facts.decode(store.get(f"check/facts/{rank}", left_s))
    # A bit for each rank: a list of thousands would not fit in a value of the store.
    store.set("check/here", b"%x" % sum(1 << rank for rank in present))
    return present


def _probe_hosts(
    store: Store, own: Facts, hosts: list[Facts]
) -> dict[tuple[int, int], list[Probe]]:
    """Probe every other host, in rounds in which each host sends to one and receives from one.

    Returns probes by prober, answerer and path: on rank 0 all except dead ranks' probes.
    """
    found: dict[tuple[int, int], list[Probe]] = {}
    ranks, lost = [one.rank for one in hosts], set[int]()
    for shift in range(1, len(hosts)):
        if own.rank in ranks:
            to = hosts[(ranks.index(own.rank) + shift) % len(hosts)]
            made = [probe(path, to.token) for path in to.paths]
            store.set(f"check/round/{shift}/{own.rank}", json.dumps(made).encode())
        for index, rank in enumerate(ranks):
            to_rank = ranks[(index + shift) % len(hosts)]
            if rank in lost:
                continue  # else every round would wait for it
            try:
                value = store.get(f"check/round/{shift}/{rank}", _ROUND_S)
            except (ShoalError, RuntimeError):  # it died
                lost.add(rank)
            else:
                found[rank, to_rank] = [Probe(*one) for one in json.loads(value)]
    return found
