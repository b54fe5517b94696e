"""Why a rank has left the meeting, told through the store to those who would wait for it.

A store may outlive a meeting, and a rank may be started again. So a farewell names the record that
stood under its rank's key, and counts no more once that rank publishes anew; and it names the
records of the others, and counts only for ranks that had published theirs by then.
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Final, NamedTuple

from shoal.errors import PeerLost, ShoalError, UsageError
from shoal.rendezvous.handshake import VERSION
from shoal.rendezvous.options import JoinOptions
from shoal.rendezvous.packing import Unpacker, field, number, seal, text_field, unseal
from shoal.rendezvous.record import MAX_SIZE, decode, record_key
from shoal.rendezvous.store import MAX_VALUE_BYTES
from shoal.rendezvous.store.asking import Asking

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from shoal.rendezvous.store import Store

_KIND: Final = b"shoal/fw"
FAREWELL_KEY: Final = "shoal/farewell"  # one for all, so that waiting for it costs one question
# How long a join that has failed already waits for the store: to say what is lacking, and to tell
# the others why we leave. A thousand records are read in half of it.
LAST_WORDS_S: Final = 0.5
_N_REASON: Final = 500  # characters
_N_LABEL: Final = 64
# Of each nonce, so that those of a thousand ranks fit into one value. With 2 bytes one leftover in
# 65536 is taken for news.
_MAX_PREFIX: Final = 8


class Farewell(NamedTuple):
    """What a rank that failed to join leaves behind.

    Args:
        is_usage: whether its error was a `UsageError`.
        nonce: of the record under its key; empty if there was none.
        seen: by rank, equally many first bytes of its nonce; zeros where there was no record.
    """

    rank: int
    host_label: str
    reason: str
    is_usage: bool
    nonce: bytes
    seen: bytes
    size: int

    def knew(self, rank: int, nonce: bytes) -> bool:
        """Whether this rank had published the record with this nonce by then."""
        n_bytes = len(self.seen) // self.size
        return n_bytes > 0 and self.seen[rank * n_bytes :][:n_bytes] == nonce[:n_bytes]

    def error(self) -> ShoalError:
        """What the others raise."""
        if self.is_usage:
            who = f"rank {self.rank} on {self.host_label}"
            return UsageError(f"{who} cannot join, so nobody can: {self.reason}")
        reason = f"has left the meeting: {self.reason}"
        return PeerLost(self.rank, self.host_label, "", "joining", reason)

    def encode(self) -> bytes:
        """As a value for the store."""
        body = number(self.rank, 4) + number(self.size, 4) + number(self.is_usage, 1)
        body += text_field(self.host_label) + field(self.nonce)
        reason = self.reason.encode()
        body += number(len(reason), 2) + reason
        return seal(_KIND, VERSION, body + self.seen)


def decode_farewell(value: bytes) -> Farewell | None:
    """The farewell, or None if these bytes are none that we can read."""
    try:
        version, body = unseal(_KIND, value)
        if version != VERSION:
            return None
        data = Unpacker(body)
        rank, size = data.number(4, 0, MAX_SIZE), data.number(4, 1, MAX_SIZE)
        is_usage, label, nonce = bool(data.number(1, 0, 1)), data.text(), data.field()
        reason = data.take(data.number(2, 0, len(value))).decode()
        seen = data.rest()
    except ValueError:
        return None
    if rank >= size or len(seen) % size or not reason.isprintable():
        return None
    return Farewell(rank, label, reason, is_usage, nonce, seen, size)


@contextlib.contextmanager
def telling(store: Store, rank: int, size: int) -> Iterator[None]:
    """Tell the others, as `join` does, if what a rank does in here before it joins fails."""
    try:
        yield
    except BaseException as error:
        with contextlib.closing(Asking(store, 0.0)) as asked:
            tell(asked, rank, size, None, JoinOptions().label, error)
        raise


def tell(
    asked: Asking, rank: int, size: int, own: bytes | None, label: str, error: BaseException
) -> None:
    """Say farewell if there is somebody to say it to, and the store takes it in time."""
    if size > 1 and 0 <= rank < size:
        asked.deadline = time.monotonic() + LAST_WORDS_S
        with contextlib.suppress(Exception):  # the store may be gone, or even be the reason
            send_farewell(asked, rank, size, own, label, error)


def send_farewell(
    store: Store, rank: int, size: int, own: bytes | None, label: str, error: BaseException
) -> None:
    """Tell the others that this rank will not come, and why.

    Args:
        own: the nonce that it has published; None if it has not come so far.
    """
    nonces = _nonces(store, size)
    if own is not None and nonces[rank] != own:
        return  # another process has taken our place: this rank will come
    is_usage = isinstance(error, UsageError)
    why = str(error) if isinstance(error, ShoalError) else f"{type(error).__name__} {error}"
    empty = Farewell(
        rank, _ascii(label, _N_LABEL), _ascii(why, _N_REASON), is_usage, nonces[rank], b"", size
    )
    room = MAX_VALUE_BYTES - len(empty.encode())
    n_bytes = min(_MAX_PREFIX, room // size)
    seen = b"".join(nonce[:n_bytes].ljust(n_bytes, b"\0") for nonce in nonces)
    store.set(FAREWELL_KEY, empty._replace(seen=seen).encode())


def _nonces(store: Store, size: int) -> Sequence[bytes]:
    """By rank, the nonce of the record that is there; empty where there is none."""
    keys = [record_key(rank) for rank in range(size)]
    values = store.try_get_all(keys) or [store.try_get(key) or b"" for key in keys]
    records = [decode(value) for value in values]
    return [b"" if record is None else record.nonce for record in records]


def _ascii(text: str, n_chars: int) -> str:
    """One line of printable ASCII."""
    text = " ".join(text.split()).encode("ascii", "replace").decode("ascii")
    return "".join(char if char.isprintable() else "?" for char in text)[:n_chars]
