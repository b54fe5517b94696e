"""What a server is told, read strictly: nothing that arrives makes it do anything but refuse."""

import os
import random
import struct

import pytest

import shoal
from shoal.codec import Codec
from shoal.dtypes import DType, Op
from shoal.group.pool import announce, control
from shoal.group.pool.announce import N_BYTES, pack, unpack
from shoal.group.pool.protocol import (
    MAX_MESSAGE_BYTES,
    MOST_RANKS,
    Ask,
    Frames,
    Leaving,
    Meet,
    Message,
    Note,
    Reserve,
    Reserved,
    Status,
    encode,
    hello_of,
    is_for_server,
    key_id,
    server_key,
)
from shoal.limits import MOST_CONNECTIONS
from shoal.rendezvous.packing import number, seal
from shoal.rendezvous.record import Endpoint
from shoal.rendezvous.roster import Entry
from shoal.shapes import Shape

MESSAGES: list[Message] = [
    Ask(),
    Status('{"views": []}'),
    Reserve(shoal.__version__, "world of 10.0.0.1", 8),
    Reserved("", bytes(16)),
    Reserved("it is draining", bytes(range(16))),
    Reserved("", bytes(range(16)), b"an entry"),
    Meet(7, 8, 9, 12, b"a roster"),
    Leaving(),
    Note(7, "all_reduce of 25.0 MiB float32 sum", "sharded: not by servers, since they are slow"),
]
SHAPE = Shape("all_reduce", "sharded[3*1|2].servers", DType.BFLOAT16, Op.AVG, 1_000_003, 1, 4)
# A few seconds here; the soak does a million of each.
N_TIMES = 500_000 if os.environ.get("SHOAL_SOAK") else 4000


def framed(sealed: bytes) -> bytes:
    return struct.pack("<I", len(sealed)) + sealed


@pytest.mark.parametrize("message", MESSAGES)
def test_a_message_is_read_as_it_was_written_however_it_is_cut(message: Message) -> None:
    frame = encode(message)
    for cut in range(len(frame)):
        frames = Frames()
        assert frames.feed(frame[:cut]) == []
        assert frames.is_empty == (cut == 0)
        assert frames.feed(frame[cut:] + frame) == [message, message]


@pytest.mark.parametrize("message", MESSAGES)
def test_no_flipped_bit_gets_through(message: Message) -> None:
    frame = encode(message)
    for bit in range(32, 8 * len(frame)):
        damaged = bytearray(frame)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ValueError, match=r"damaged|another kind"):
            Frames().feed(bytes(damaged))


def test_a_frame_that_is_too_long_is_refused_before_it_has_come() -> None:
    with pytest.raises(ValueError, match="a frame of"):
        Frames().feed(struct.pack("<I", MAX_MESSAGE_BYTES + 1))
    with pytest.raises(ValueError, match="a message of"):
        encode(Status("x" * MAX_MESSAGE_BYTES))


def test_the_roster_of_the_largest_view_fits_with_four_paths_over_ipv6() -> None:
    paths = [
        Endpoint(f"fd00:1234:5678:9abc:def0:1234:5678:{at:04x}", 65535, f"enp{at}s0f1np1")
        for at in range(4)
    ]
    entry = Entry("f" * 36, "a-host-with-a-long-name-123456", bytes(64), tuple(paths))
    roster = b"".join(entry.encode(rank) for rank in range(MOST_RANKS))
    largest = Meet(1, MOST_RANKS - 1, MOST_RANKS - 1, MOST_RANKS, roster)
    assert Frames().feed(encode(largest)) == [largest]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        number(99, 1),
        number(0, 1) + b"x",
        number(2, 1) + b"\1a\1b",
        number(2, 1) + b"\1a\1b" + number(0, 2),
        number(2, 1) + b"\1a\1\n" + number(1, 2),
        number(3, 1) + b"\0\4abcd",
        number(4, 1) + number(1, 8) + number(3, 2) + number(2, 2) + number(4, 2) + b"\1h\1\0",
        number(4, 1) + number(1, 8) + number(3, 2) + number(3, 2) + number(3, 2) + b"\1h\1\0",
        number(4, 1) + number(1, 8) + number(3, 2) + number(3, 2) + number(4, 2) + b"\1h\0\0",
    ],
)
def test_sealed_nonsense_is_refused(body: bytes) -> None:
    with pytest.raises(ValueError, match=r".*"):
        Frames().feed(framed(seal(b"shoal/sv", 1, body)))


def test_another_version_is_refused() -> None:
    with pytest.raises(ValueError, match="version 1"):
        Frames().feed(framed(seal(b"shoal/sv", 1, number(0, 1))))


def test_random_bytes_in_a_right_seal_give_a_message_or_a_value_error() -> None:
    draw = random.Random(7)
    n_refused = 0
    for _ in range(N_TIMES):
        body = number(draw.randrange(7), 1) + draw.randbytes(draw.randrange(60))
        try:
            (message,) = Frames().feed(framed(seal(b"shoal/sv", 2, body)))
        except ValueError:
            n_refused += 1
        else:
            assert Frames().feed(encode(message)) == [message]
    assert n_refused > N_TIMES // 2


def test_a_key_is_named_without_being_told_and_proved_under_another_name() -> None:
    key, other = b"k" * 32, b"l" * 32
    assert key_id(key) != key_id(other)
    assert server_key(key) not in (key, server_key(other))
    assert is_for_server(hello_of(key))
    assert hello_of(key).epoch == key_id(key)


# Announcements.


def test_an_announced_call_is_the_same_for_the_server_but_for_its_rank() -> None:
    for n_lanes in (1, 3):
        message = pack(SHAPE._replace(n_lanes=n_lanes))
        assert len(message) == N_BYTES
        wanted = SHAPE._replace(rank=3, hosts=(0, 1, 2, 3), n_lanes=n_lanes)
        assert unpack(message, 3, 4) == wanted


def test_a_name_that_does_not_fit_is_refused_where_it_is_sent() -> None:
    weights = ",".join(str(w) for w in range(1000, 2000))
    with pytest.raises(shoal.UsageError, match="too long"):
        pack(SHAPE._replace(algorithm=f"sharded[{weights}|1].servers"))


def test_random_announcements_give_a_shape_or_a_value_error() -> None:
    draw = random.Random(8)
    n_refused = 0
    for _ in range(N_TIMES):
        name = draw.choice([b"sharded[3*1|2].servers", draw.randbytes(draw.randrange(40))])
        body = number(len(name), 2) + name + draw.randbytes(draw.choice([11, 12, 13]))
        sealed = seal(b"shoal/pk", 2, body)
        message = (number(len(sealed), 2) + sealed).ljust(N_BYTES, b"\0")
        try:
            shape = unpack(message, 3, 4)
        except ValueError:
            n_refused += 1
        else:
            assert shape.codec in Codec
            assert 1 <= shape.n_lanes <= MOST_CONNECTIONS
            assert 1 <= shape.n_elems <= announce.MOST_ELEMS
    assert n_refused > 0


def test_damaged_announcements_are_refused() -> None:
    message = pack(SHAPE)
    n_bytes = 2 + int.from_bytes(message[:2], "little")
    for at in range(n_bytes):
        damaged = bytearray(message)
        damaged[at] ^= 0x20
        with pytest.raises(ValueError, match=r".*"):
            unpack(bytes(damaged), 3, 4)
    with pytest.raises(ValueError, match="more than a message"):
        unpack(message[:-1] + b"x", 3, 4)


# Commands.


@pytest.mark.parametrize(
    "command",
    [
        control.Form(3),
        control.End(3, is_lost=True),
        control.End(4, is_lost=False),
    ],
)
def test_a_command_is_read_as_it_was_written(command: control.Command) -> None:
    assert control.decode(control.encode(command)) == command
