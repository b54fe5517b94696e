"""The built-in base of each error, and the attributes of PeerLost."""

import pickle

import pytest

from shoal import errors
from shoal.errors import PeerLost, TimedOut


def test_errors_are_builtin_and_runtime_errors() -> None:
    bases = {"UsageError": ValueError, "TimedOut": TimeoutError, "Unsupported": NotImplementedError}
    for name in (*bases, "PeerLost", "Closed", "ProofError", "InternalError"):
        wanted = (errors.ShoalError, RuntimeError, bases.get(name, Exception))
        assert all(issubclass(getattr(errors, name), one) for one in wanted)
    assert issubclass(errors.Unsupported, errors.UsageError)


def test_peer_lost_names_the_rank_the_host_the_cause_and_the_call() -> None:
    lost = PeerLost(3, "node7", "10.0.0.7:4711", "recv 65536 B, chunk 5", reason="closed the link")
    for fact in ("rank 3", "node7", "10.0.0.7:4711", "closed the link", "recv 65536 B", "shrink"):
        assert fact in str(lost)
    assert "unknown rank" in str(PeerLost(-1))
    assert "-1" not in str(PeerLost(-1))


@pytest.mark.parametrize(
    "reason", ["has left the meeting: KeyboardInterrupt", "no longer serves the store: reset"]
)
def test_an_error_before_there_is_a_group_does_not_suggest_shrink(reason: str) -> None:
    text = str(PeerLost(0, "node7", "", "joining", reason))
    assert text.startswith(f"rank 0 on node7 {reason} ")
    assert "shrink" not in text


def test_errors_survive_pickling() -> None:
    late = TimedOut("all_reduce float32[3]: rank 2 did not come")
    assert str(late) == "timed out: all_reduce float32[3]: rank 2 did not come"
    lost = PeerLost(3, "node7", "10.0.0.7:4711", "recv", reason="stalled")
    lost.remedy = "configure the next quorum"  # of a front end whose users do not shrink groups
    assert str(lost).endswith("; configure the next quorum")
    for error in (late, lost):
        again = pickle.loads(pickle.dumps(error))
        assert type(again) is type(error)
        assert str(again) == str(error)
        assert vars(again) == vars(error)
