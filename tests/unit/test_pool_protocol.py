"""Messages from elsewhere are parsed strictly: each is read as written, or refused."""

import os
import random

import pytest

import shoal
from shoal.codec import codec_of, top_k
from shoal.dtypes import DType, Op
from shoal.engine import Hello
from shoal.group.pool import announce, protocol
from shoal.group.pool.announce import N_BYTES, pack, unpack
from shoal.group.pool.protocol import Ask, Leaving, Meet, Message, Reserve, Reserved, Status
from shoal.limits import MOST_CONNECTIONS
from shoal.rendezvous.packing import number
from shoal.rendezvous.record import Endpoint
from shoal.rendezvous.roster import Entry
from shoal.shapes import Shape

decode, encode, MOST_RANKS = protocol.decode, protocol.encode, protocol.MOST_RANKS
LONG = "x" * 1000
PATHS = tuple(
    Endpoint(f"fd00:1234:5678:9abc:def0:1234:5678:{at:04x}", 65535, f"enp{at}s0f1np1")
    for at in range(MOST_CONNECTIONS)
)
ENTRY = Entry("f" * 36, "a-host-with-a-long-name-123456", bytes(64), PATHS)
ROSTER = b"".join(ENTRY._replace(listens_at=PATHS[:4]).encode(at) for at in range(MOST_RANKS))
MESSAGES: list[Message] = [
    Ask(),
    Status('{"views": []}'),
    Reserve(shoal.__version__, "world of 10.0.0.1", 8),
    Reserve(LONG[:255], LONG[:255], MOST_RANKS),
    Reserved("", bytes(16)),
    Reserved("it is draining", bytes(range(16))),
    Reserved(LONG[:255], bytes(range(16)), ENTRY.encode(0)),
    Meet(7, 8, 9, 12, b"a roster"),
    Meet(2**63, MOST_RANKS - 1, MOST_RANKS - 1, MOST_RANKS, ROSTER),
    Leaving(),
]
SHAPE = Shape("all_reduce", "sharded[3*1|2].servers", DType.BFLOAT16, Op.AVG, 1_000_003, 1, 4)
# A few seconds here; the soak does a million of each.
N_TIMES = 500_000 if os.environ.get("SHOAL_SOAK") else 4000


class Bounds:
    """A peer that records the kinds it may send."""

    def __init__(self, *types: type[Message]) -> None:
        self.most: dict[int, int] = {}
        protocol.expect(self, types)  # type: ignore[arg-type]

    def expect(self, kind: int, most_bytes: int) -> None:
        self.most[kind] = most_bytes


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_is_read_as_it_was_written_and_fits_its_bound(message: Message) -> None:
    kind, body = encode(message)
    assert decode(kind, body) == message
    assert len(body) <= Bounds(type(message)).most[kind]


def test_each_end_accepts_the_kinds_of_the_other_and_refuses_its_own() -> None:
    workers, servers = Bounds(*protocol.FROM_WORKERS).most, Bounds(*protocol.FROM_SERVERS).most
    assert workers.keys().isdisjoint(servers)
    assert max(*workers.values(), *servers.values()) < (2 << 20) + 20
    assert max(servers.values()) < 1 << 16


@pytest.mark.parametrize("text", ["", "é" * 600, "é" * 127])
def test_an_overlong_text_is_cut_between_characters(text: str) -> None:
    wanted = Reserve(text, text, 1)
    assert decode(*encode(wanted)) == Reserve(text[: 255 // 2], text[: 255 // 2], 1)


def meet(view: int, *numbers: int) -> bytes:
    return number(view, 8) + b"".join(number(one, 2) for one in numbers)


MALFORMED: dict[type[Message], list[bytes]] = {
    Ask: [b"x"],
    Reserve: [b"", b"\1a\1b", b"\1a\1b" + number(0, 2), b"\1a\1b" + number(1, 2) + b"x"],
    Reserved: [b"\0\4abcd", b"\1\xff" + bytes(16)],
    Status: [b"\xff"],
    Meet: [meet(1, 0, 0, 4), meet(1, 3, 2, 4), meet(1, 3, 3, 3), meet(1, 3, 3, MOST_RANKS + 1)],
}
MALFORMED[Reserve] += [b"\1a\1\n" + number(1, 2), b"\1a\1\x1b" + number(1, 2)]
MALFORMED[Meet].append(meet(2**63 + 1, 3, 3, 4))


@pytest.mark.parametrize(("of", "body"), [(of, each) for of in MALFORMED for each in MALFORMED[of]])
def test_malformed_messages_are_refused(of: type[Message], body: bytes) -> None:
    (kind,) = Bounds(of).most
    with pytest.raises(ValueError, match=r".*"):
        decode(kind, body)


def test_unknown_kinds_are_refused() -> None:
    kinds = {encode(message)[0] for message in MESSAGES}
    for kind in set(range(256)) - kinds:
        with pytest.raises(ValueError, match=str(kind)):
            decode(kind, b"")


def test_random_bytes_give_a_message_or_a_value_error() -> None:
    draw = random.Random(7)
    kinds = [*Bounds(*protocol.FROM_WORKERS, *protocol.FROM_SERVERS).most]
    n_refused = 0
    for _ in range(N_TIMES):
        kind, body = draw.choice(kinds), draw.randbytes(draw.randrange(60))
        try:
            message = decode(kind, body)
        except ValueError:
            n_refused += 1
        else:
            assert decode(*encode(message)) == message
    assert n_refused > N_TIMES // 2


def test_a_keys_name_does_not_reveal_it_and_differs_from_its_proof() -> None:
    key, other = b"k" * 32, b"l" * 32
    assert protocol.key_id(key) != protocol.key_id(other)
    assert protocol.server_key(key) not in (key, protocol.server_key(other))
    assert protocol.is_for_server(protocol.hello_of(key))
    assert protocol.hello_of(key).epoch == protocol.key_id(key)
    older = Hello(protocol.key_id(key), protocol.VERSION - 1, 0, protocol.hello_of(key).path)
    assert not protocol.is_for_server(older)


def test_an_announced_call_is_equal_on_the_server_except_for_the_rank() -> None:
    for n_lanes, codec in ((1, SHAPE.codec), (3, SHAPE.codec), (1, top_k(0.01, 8))):
        shape = SHAPE._replace(n_lanes=n_lanes, codec=codec)
        message = pack(shape)
        assert len(message) == N_BYTES
        wanted = shape._replace(rank=3, hosts=(0, 1, 2, 3), rounds_own=codec.is_narrow)
        assert unpack(message, 3, 4) == wanted


def test_an_overlong_name_is_refused_by_its_sender() -> None:
    weights = ",".join(str(w) for w in range(1000, 2000))
    with pytest.raises(shoal.UsageError, match="too long"):
        pack(SHAPE._replace(algorithm=f"sharded[{weights}|1].servers"))


def test_random_announcements_give_a_shape_or_a_value_error() -> None:
    draw, n_refused = random.Random(8), 0
    for _ in range(N_TIMES):
        name = draw.choice([b"sharded[3*1|2].servers", draw.randbytes(draw.randrange(40))])
        kind = draw.choice([bytes(5), draw.randbytes(5)]) + draw.randbytes(9)
        message = (number(len(name), 2) + kind + name).ljust(N_BYTES, b"\0")
        try:
            shape = unpack(message, 3, 4)
        except ValueError:
            n_refused += 1
        else:
            assert shape.codec == codec_of(shape.codec.number, shape.codec.keep)
            assert 1 <= shape.n_lanes <= MOST_CONNECTIONS
            assert 1 <= shape.n_elems <= announce.MOST_ELEMS
    assert n_refused > 0
    with pytest.raises(ValueError, match="bytes follow the message"):
        unpack(pack(SHAPE)[:-1] + b"x", 3, 4)
