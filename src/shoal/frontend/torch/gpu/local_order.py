"""The order in which the ranks of a host begin calls among their GPUs: the same on all ranks.

NCCL's kernels wait on the device for the kernels of other ranks. So the ranks of a host must queue
them in one order, and at about the same time, because a waiting kernel keeps a part of its GPU
busy. A turn begins when all ranks have reported ready for it; rank 0 chooses the next turn.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Final, NamedTuple

from shoal.dtypes import Op
from shoal.errors import InternalError, UsageError

if TYPE_CHECKING:
    from shoal.frontend.torch.gpu.staging import StagedCall
    from shoal.group.group import Group
    from shoal.group.work import Work

# Calls' timeouts until a decision times out: it follows all steps of a call, and their deadlines.
_DEADLINES: Final = 6

_DIGEST_BYTES: Final = 8


class Turn(NamedTuple):
    """A half of a call."""

    call: int
    half: int  # 0: begins in the order of the calls; 1: in any order


class _Ready(NamedTuple):
    """A report of this rank; `word` becomes the result of the all-reduce of `sent`."""

    work: Work
    word: bytearray
    sent: bytes
    what: str


class LocalOrder:
    """The order of calls on the ranks of a host. Only this uses `group`, on one thread."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._timeout_s = 0.0  # the longest timeout of a call
        self._n_calls = 0
        self._n_begun = 0  # halves of both kinds
        self._next_first = 0
        self._numbers: dict[Turn, int] = {}
        self._slots: dict[int, int] = {}  # numbers of the calls that broadcast decisions
        self._ready: dict[Turn, _Ready] = {}
        self._sent: list[Work] = []  # rank 0's decisions in flight
        self._awaited: tuple[bytearray, Work] | None = None  # the decision to be received next

    def add(self, timeout_s: float) -> int:
        """Return the number of a new call. Every rank adds the same calls."""
        first, second, *slots = self._group.reserve(4)
        self._timeout_s = max(self._timeout_s, timeout_s)
        call, self._n_calls = self._n_calls, self._n_calls + 1
        self._numbers |= {Turn(call, 0): first, Turn(call, 1): second}
        self._slots |= {2 * call + at: number for at, number in enumerate(slots)}
        return call

    def ready(self, turn: Turn, what: str, timeout_s: float) -> None:
        """Report that this rank can begin a turn; `what` describes it, equally on all ranks.

        The group ends if some ranks have not reported within `timeout_s`.
        """
        number = self._numbers.pop(turn)
        digest = hashlib.blake2b(what.encode(), digest_size=_DIGEST_BYTES).digest()
        # The AND of all ranks' words equals this one only if all digests are equal.
        sent = digest + bytes(255 - each for each in digest)
        word = bytearray(sent)
        work = self._group.all_reduce(
            word, Op.BAND, number=number, timeout_s=timeout_s, async_op=True
        )
        assert work is not None
        self._ready[turn] = _Ready(work, word, sent, what)

    def next(self) -> Turn | None:
        """Return the turn to begin now, or None.

        Raises UsageError if another rank is ready for another call; ShoalError if a rank is late.
        """
        turn = self._decided() if self._group.rank == 0 else self._received()
        if turn is not None:
            self._n_begun += 1
            self._next_first += turn.half == 0
            del self._ready[turn]
        return turn

    def close(self) -> None:
        """Close the group; calls in flight fail."""
        self._group.close()

    def _decided(self) -> Turn | None:
        self._sent = [work for work in self._sent if not is_over(work)]
        agreed = [turn for turn, each in self._ready.items() if self._is_agreed(each)]
        # First halves first: other hosts wait for them.
        first = Turn(self._next_first, 0)
        turn = first if first in agreed else min((t for t in agreed if t.half), default=None)
        if turn is not None:
            word = bytearray((2 * turn.call + turn.half).to_bytes(8, "little"))
            self._sent.append(self._slot(word))
        return turn

    def _received(self) -> Turn | None:
        if self._awaited is None:
            if self._n_begun not in self._slots:
                return None
            word = bytearray(8)
            self._awaited = word, self._slot(word)
        word, work = self._awaited
        if not is_over(work):
            for each in self._ready.values():
                self._is_agreed(each)  # raises if ranks disagree
            return None
        self._awaited = None
        turn = Turn(*divmod(int.from_bytes(word, "little"), 2))
        if turn not in self._ready:
            raise InternalError(f"{self._group}: rank 0 chose {turn}, which is not ready")
        return turn

    def _is_agreed(self, one: _Ready) -> bool:
        if not is_over(one.work):
            return False
        if bytes(one.word) != one.sent:
            raise UsageError(
                f"{self._group}: this rank has called {one.what}, but another rank of this host "
                "made a different call; every rank must make the same calls in the same order"
            )
        return True

    def _slot(self, word: bytearray) -> Work:
        number, timeout_s = self._slots.pop(self._n_begun), _DEADLINES * self._timeout_s
        work = self._group.broadcast(word, 0, number=number, timeout_s=timeout_s, async_op=True)
        assert work is not None
        return work


def is_over(work: Work | StagedCall) -> bool:
    """Return True if a call has ended; raise its error if it failed."""
    if not work.done():
        return False
    error = work.error()
    if error is not None:
        raise error
    return True
