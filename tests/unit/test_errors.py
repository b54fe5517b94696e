"""Which built-in exception each error also is, and that PeerLost keeps what it knows."""

import pickle

import pytest

from shoal import errors
from shoal.errors import PeerLost, TimedOut


@pytest.mark.parametrize(
    ("name", "builtin"),
    [
        ("UsageError", ValueError),
        ("Unsupported", NotImplementedError),
        ("PeerLost", RuntimeError),
        ("TimedOut", TimeoutError),
        ("Closed", RuntimeError),
        ("ProofError", Exception),
        ("InternalError", Exception),
    ],
)
def test_each_error_is_a_shoal_error_and_the_builtin_of_its_meaning(
    name: str, builtin: type[Exception]
) -> None:
    assert issubclass(getattr(errors, name), errors.ShoalError)
    assert issubclass(getattr(errors, name), builtin)


def test_unsupported_is_a_usage_error() -> None:
    assert issubclass(errors.Unsupported, errors.UsageError)


def test_peer_lost_says_who_where_how_and_what_was_waited_for() -> None:
    lost = PeerLost(3, "node7", "10.0.0.7:4711", "recv 65536 B, chunk 5", reason="closed the link")
    for fact in ("rank 3", "node7", "10.0.0.7:4711", "closed the link", "recv 65536 B", "shrink"):
        assert fact in str(lost)


def test_peer_lost_leaves_out_what_is_not_known() -> None:
    assert "unknown rank" in str(PeerLost(-1))
    assert "-1" not in str(PeerLost(-1))


@pytest.mark.parametrize(
    "reason", ["has left the meeting: KeyboardInterrupt", "no longer serves the store: reset"]
)
def test_a_rank_lost_before_there_is_a_group_is_no_reason_to_shrink_one(reason: str) -> None:
    text = str(PeerLost(0, "node7", "", "joining", reason))
    assert text.startswith(f"rank 0 on node7 {reason} ")
    assert "shrink" not in text


def test_peer_lost_survives_pickling() -> None:
    lost = PeerLost(3, "node7", "10.0.0.7:4711", "recv", reason="stalled")
    again = pickle.loads(pickle.dumps(lost))
    assert str(again) == str(lost)
    assert vars(again) == vars(lost)


@pytest.mark.parametrize("name", [name for name in errors.__all__ if name != "PeerLost"])
def test_each_error_is_what_code_around_torchs_collectives_catches(name: str) -> None:
    """Every error of a collective over Gloo or NCCL is a RuntimeError."""
    with pytest.raises(RuntimeError, match="what happened"):
        raise getattr(errors, name)("what happened")
    with pytest.raises(RuntimeError):
        raise PeerLost(0)


def test_what_timed_out_says_so_in_these_words_and_survives_pickling() -> None:
    late = TimedOut("all_reduce float32[3]: rank 2 did not come")
    again = pickle.loads(pickle.dumps(late))
    assert type(again) is TimedOut
    assert str(again) == str(late) == "timed out: all_reduce float32[3]: rank 2 did not come"
