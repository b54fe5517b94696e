"""Form a group at a door: through a store that one of its members serves itself."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from shoal.errors import UsageError
from shoal.group.form import DEFAULT_TIMEOUT_S, form
from shoal.rendezvous.door import visit

if TYPE_CHECKING:
    from shoal.group.group import Group
    from shoal.rendezvous.door import Door


def form_at(
    door: Door,
    addresses: Sequence[str],
    uuid: str,
    *,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    name: str = "world",
    wire: str | None = None,
) -> Group:
    """Form the group of the processes whose doors have these addresses; ranks in their order.

    Needs no other store: the processes meet at the first of these doors. A process may be in other
    groups meanwhile, living or ended; they stay as they are.

    Args:
        door: this process's own.
        addresses: the `Door.address` of each member, in the same order on every one.
        uuid: a name for this meeting, the same on every member, that no earlier meeting had.
        timeout_s, name, wire: as for `form`.

    Raises (nothing is left open but the door):
        UsageError: as for `form`; or `addresses` lacks this door or repeats one.
        TimedOut: the process of the first address did not answer or did not call this, or others
            did not, which the message names.
        PeerLost: a member ended or failed while the group formed, or before.
        ShoalError: as for `form`.
    """
    if len(set(addresses)) != len(addresses) or door.address not in addresses:
        raise UsageError(
            f"the addresses {', '.join(addresses)} repeat one, or lack this process's own, "
            f"{door.address}"
        )
    rank, deadline = addresses.index(door.address), time.monotonic() + timeout_s
    if rank == 0:
        door.open(uuid)
    with visit(addresses[0], uuid, timeout_s) as store:
        left_s = max(0.001, deadline - time.monotonic())
        group = form(store, rank, len(addresses), timeout_s=left_s, name=name, wire=wire)
    group.timeout_s = timeout_s
    return group
