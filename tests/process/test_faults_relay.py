"""A relay between two hosts that damages what it forwards: no wrong sum, no hang, a named peer."""

import contextlib
import os
import random
import socket

import numpy as np
import pytest
from process.ranks import Outcome, start_ranks
from process.relay import (
    HANDSHAKE_BYTES,
    HEADER_BYTES,
    Detour,
    Fault,
    Relay,
    cut,
    drop,
    flip,
    inject,
    repeat,
    say_again,
    shorten,
    swap,
)
from process.stage import Stage, pretend_hosts

import shoal
from shoal.errors import PeerLost

SOAK = os.environ.get("SHOAL_SOAK") == "1"
N_ELEMS = 300_007
N_CALLS = 6
DEADLINE_S = 40.0
N_CHALLENGE_BYTES = 28
FRAMES_A_CALL = 38  # of data, from each end
LATE = 45  # a frame of the second call


def reduce_over_relay(is_told: bool = False) -> tuple[int, Exception | None]:
    """How many calls were right, and what ended them; a wrong one raises AssertionError."""
    pretend_hosts(1)
    os.environ["SHOAL_SOCKET_IFNAME"] = "lo"
    rank = int(os.environ["RANK"])
    stage = Stage.from_environment()
    with shoal.init(Detour(stage), rank, 2, timeout_s=20) as group:
        places = np.arange(N_ELEMS, dtype=np.float32)
        for turn in range(N_CALLS):
            data = places + rank + turn
            try:
                group.all_reduce(data)
            except shoal.ShoalError as error:
                return turn, error
            assert (data == 2 * places + 1 + 2 * turn).all(), f"wrong sum in call {turn}"
            if turn == 1 and is_told:
                stage.cue(f"rank {rank} has called")
                stage.await_cue("go on")
    return N_CALLS, None


def run_through(who: str, fault: Fault) -> list[Outcome]:
    with (
        Stage() as stage,
        Relay(stage, who, fault),
        start_ranks(reduce_over_relay, 2, env=stage.env) as ranks,
    ):
        return ranks.wait(DEADLINE_S)


def check(outcomes: list[Outcome], what: str) -> None:
    for outcome in outcomes:
        assert outcome.value is not None, (what, str(outcome))
        n_right, error = outcome.value
        assert (n_right == N_CALLS) == (error is None), (what, str(outcome))
        if error is not None:
            assert isinstance(error, PeerLost), (what, str(outcome))
            assert error.rank == 1 - outcome.rank, (what, str(outcome))


FAULTS = {
    "flips a bit of a header": ("client", flip(LATE, 30)),
    "flips a bit of a payload": ("server", flip(LATE, HEADER_BYTES + 1000)),
    "drops a frame": ("client", drop(LATE)),
    "repeats a frame": ("server", repeat(LATE)),
    "loses a byte": ("client", shorten(LATE, HEADER_BYTES + 1000)),
    "injects bytes": ("server", inject(LATE, bytes(HEADER_BYTES))),
    "swaps two frames": ("client", swap(LATE)),
    "says an old frame again": ("server", say_again(LATE, 1)),
    "cuts within a frame": ("client", cut(LATE, HEADER_BYTES + 1000)),
}


@pytest.mark.parametrize("what", FAULTS)
def test_whatever_a_relay_does_no_sum_is_wrong_and_nobody_hangs(what: str) -> None:
    outcomes = run_through(*FAULTS[what])
    check(outcomes, what)
    assert all(outcome.value[0] >= 1 for outcome in outcomes), "the relay itself is at fault"


def test_a_conversation_that_is_said_again_is_not_listened_to() -> None:
    with (
        Stage() as stage,
        Relay(stage, "client", repeat(-2)) as relay,
        start_ranks(reduce_over_relay, 2, True, env=stage.env) as ranks,
    ):
        stage.await_cue("rank 1 has called")
        # The handshake alone: whoever closes with more unread resets, and its answer may be lost.
        handshake = bytes(relay.said[: HANDSHAKE_BYTES["client"]])
        answer = said_again_to(relay.target(), handshake)
        stage.cue("go on")
        outcomes = ranks.wait(DEADLINE_S)
    assert len(relay.said) > HANDSHAKE_BYTES["client"] + N_ELEMS
    assert len(answer) == N_CHALLENGE_BYTES  # and no WELCOME: the proof is for another challenge
    assert [outcome.value for outcome in outcomes] == [(N_CALLS, None)] * 2, outcomes


def said_again_to(address: tuple[str, int], words: bytes) -> bytes:
    """All that whoever listens there answers; nothing if nobody does."""
    answer = b""
    with (
        contextlib.suppress(ConnectionError),
        socket.create_connection(address, timeout=DEADLINE_S) as sock,
    ):
        sock.sendall(words)
        while piece := sock.recv(4096):
            answer += piece
    return answer


def swept() -> list[tuple[str, Fault]]:
    """Every fault at many places; the same ones in every run."""
    dice = random.Random(5)
    found: list[tuple[str, Fault]] = []
    for _ in range(40):
        number, at = dice.randrange(FRAMES_A_CALL * N_CALLS), dice.randrange(2000)
        kinds = {
            "flip": flip(number, at, 1 << dice.randrange(8)),
            "drop": drop(number),
            "repeat": repeat(number),
            "shorten": shorten(number, at),
            "inject": inject(number, dice.randbytes(1 + at)),
            "swap": swap(number),
            "say_again": say_again(number + 2, number),
            "cut": cut(number, at),
        }
        found += [(f"{name} {number} {at}", fault) for name, fault in kinds.items()]
    return found


@pytest.mark.skipif(not SOAK, reason="NOT TESTED: minutes; `make test-soak` runs it")
@pytest.mark.timeout(3600)
def test_whatever_a_relay_does_at_any_place_no_sum_is_wrong_and_nobody_hangs() -> None:
    for turn, (what, fault) in enumerate(swept()):
        check(run_through(("client", "server")[turn % 2], fault), what)
