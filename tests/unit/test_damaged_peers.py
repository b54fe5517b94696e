"""A peer's random bytes cause an error that names it, or are ignored."""

import contextlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from shoal.average.agreeing import texts_of_all
from shoal.engine import HANDSHAKE_VERSION
from shoal.errors import ShoalError, UsageError
from shoal.group import agreeing, growing, view
from shoal.plan import Settings
from shoal.rendezvous import MemoryStore, announcing, attempt, record, roll, roster
from shoal.rendezvous.door import Door
from shoal.rendezvous.packing import seal
from shoal.rendezvous.store.client import TcpStoreClient
from shoal.rendezvous.store.wire import GET, SET

SIZE = 3


def random_bytes(rng: random.Random) -> bytes:
    """Return bytes that are random, or mostly zeros or ones, like damaged numbers."""
    n, kind = rng.choice([0, 1, 2, 7, 8, 12, 40, 80, 255, 600]), rng.randrange(4)
    if kind == 0:
        return rng.randbytes(n)
    fill = bytearray(b"\xff" * n if kind == 1 else bytes(n))
    for _ in range(rng.randrange(4) if n else 0):
        fill[rng.randrange(n)] = rng.randrange(256)
    return bytes(fill)


@dataclass
class Gathering:
    """A group whose other ranks send random bytes."""

    rng: random.Random
    size, rank = SIZE, 0

    def all_gather(self, out: Any, own: bytearray, timeout_s: float) -> None:
        whole, n = memoryview(b"" if isinstance(out, list) else out), len(out) // SIZE
        for rank in range(SIZE):
            part = out[rank] if isinstance(out, list) else whole[n * rank : n * (rank + 1)]
            data = bytes(own) if rank == 0 else random_bytes(self.rng)
            part[:] = data[: len(part)].ljust(len(part), b"\0")


def read_digests(rng: random.Random) -> None:
    settings = Settings.read({})
    digests = [agreeing.digest_of(settings), random_bytes(rng)]
    agreeing.difference(*digests)
    agreeing.agreed_planner(0, settings, ["one", "two"], digests, "group 'world'")


def one_number_wrong(rng: random.Random) -> None:
    """Return a digest of the same settings, with one of its numbers replaced."""
    settings = Settings.read({})
    own = agreeing.digest_of(settings)
    at = 8 * rng.randrange(9)
    other = own[:at] + random_bytes(rng)[:8].ljust(8, rng.choice([b"\0", b"\xff"])) + own[at + 8 :]
    agreeing.agreed_planner(0, settings, ["one", "two"], [own, other], "group 'world'")


def read_attempts(rng: random.Random) -> None:
    store = MemoryStore()
    store.set(attempt.ATTEMPT_KEY, seal(b"shoal/at", HANDSHAKE_VERSION, random_bytes(rng)))
    found = attempt.find_attempt(store, 1, "a host")
    attempt.meet_again(store, found.number, 1, "a host", "was started again")
    assert len(attempt.record_key(found.number, 1)) < 100


def sealed(magic: bytes, rng: random.Random) -> bytes:
    return seal(magic, HANDSHAKE_VERSION, random_bytes(rng))


def read_roll(rng: random.Random) -> None:
    part = roll.decode_part(sealed(b"shoal/ro", rng), SIZE)
    if part is not None:
        roll.decode([part], SIZE)


def read_size(rng: random.Random) -> None:
    assert 2 <= growing._number_in(random_bytes(rng), 2, 5) <= 5


def read_view(rng: random.Random) -> None:
    n = view.n_report_bytes(SIZE)
    found = view.decode(random_bytes(rng)[:n].ljust(n, b"\0"), SIZE)
    assert found.gone | found.gave_up <= frozenset(range(SIZE))
    if found.number <= view.MOST_NUMBER:
        agreement = view.Agreement(0, SIZE)
        agreement.ask(2)
        agreement.receive(1, found)
        assert len(agreement.own.encode(SIZE)) == n


def refusal_of(one: announcing.Announcement) -> str:
    return growing.refusal_of("world", one.digest, one)


READERS: dict[str, Callable[[random.Random], Any]] = {
    "agree": lambda rng: growing.agree(Gathering(rng), 1, "127.0.0.1:4000", (), 1.0),
    "end": lambda rng: attempt.decode_end(sealed(b"shoal/en", rng)).error(),
    "record": lambda rng: record.decode(sealed(b"shoal/rc", rng)),
    "announcement": lambda rng: announcing.judge(sealed(b"shoal/nw", rng), refusal_of),
    "roster": lambda rng: roster.decode(random_bytes(rng), frozenset(range(SIZE))),
    "answer": lambda rng: announcing.decode_answer(sealed(b"shoal/an", rng)),
    "digests": read_digests,
    "number": one_number_wrong,
    "attempts": read_attempts,
    "roll": read_roll,
    "size": read_size,
    "view": read_view,
}
# `TreeLinks` turns a ValueError of a roster into a lost link, `entering` one of an answer into a
# UsageError.
MAY_RAISE = dict.fromkeys(("roster", "answer"), (ShoalError, ValueError))


@pytest.mark.parametrize("name", READERS)
def test_random_bytes_are_read_or_refused(name: str) -> None:
    rng = random.Random(7)
    for _ in range(2000):
        with contextlib.suppress(*MAY_RAISE.get(name, (ShoalError,))):
            READERS[name](rng)


@pytest.mark.parametrize("number", [2**32 + 1, 2**64 - 1])
def test_a_damaged_number_of_a_view_names_the_rank_that_sent_it(number: int) -> None:
    class Damaged(Gathering):
        def all_gather(self, out: Any, own: bytearray, timeout_s: float) -> None:
            out[:] = own * 2 + bytearray(4) + number.to_bytes(8, "little")

    with pytest.raises(UsageError, match="rank 2 sent a damaged list of newcomers"):
        growing.agree(Damaged(random.Random(0)), 1, "127.0.0.1:4000", (), 1.0)  # type: ignore[arg-type]


@pytest.mark.parametrize("length", [-1, 2**62])
def test_a_damaged_length_of_a_text_names_the_rank_that_sent_it(length: int) -> None:
    class Damaged:
        size = SIZE

        def all_gather(self, out: Any, own: Any, **_: Any) -> None:
            out[2] = length

    with pytest.raises(ShoalError, match=f"rank 2 announced a text of {length} bytes"):
        texts_of_all(Damaged(), "a test", b"")  # type: ignore[arg-type]


def test_a_door_goes_on_after_random_requests() -> None:
    rng = random.Random(11)
    with Door({}) as door:
        door.take_newcomers(lambda _: "")
        door.open("meeting")
        host, port = door.address.rsplit(":", 1)
        for _ in range(300):
            with contextlib.closing(TcpStoreClient(host, int(port), timeout_s=20)) as client:
                body = random_bytes(rng)
                if rng.random() < 0.5:  # a key of the door
                    key = rng.choice([b"newcomer/", b"answer/", b"here/", b"open", b"\xff/"])
                    body = bytes([len(key)]) + bytes(rng.randrange(2)) + key + body
                with contextlib.suppress(ShoalError):
                    client._call("a test", rng.choice([SET, GET]), [body[:250]], 0.01)
        assert not door.newcomers
        with contextlib.closing(TcpStoreClient(host, int(port), timeout_s=20)) as client:
            number = "0" * 32
            own = announcing.Announcement("1", "world", "a host", b"")
            client.set(announcing.announcement_key(number), own.encode())
            assert [one.host_label for one in door.newcomers] == ["a host"]
