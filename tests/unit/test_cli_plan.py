"""`shoal plan` and the arguments of `shoal tune`."""

import pytest

from shoal.cli import main
from shoal.cli.tune import sizes_between, table
from shoal.errors import UsageError
from shoal.plan import default_cluster
from shoal.plan.choose import choose
from shoal.plan.tuning import Tuning


def test_plan_prints_a_choice_and_a_reason_for_each_range_of_sizes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = "plan --hosts 8 --ranks-per-host 4 --link 25Gb --collective all_reduce"
    assert main(words.split()) == 0
    *lines, channels = capsys.readouterr().out.splitlines()
    assert channels.startswith("1 channel ")
    assert lines[0] == "all_reduce"
    assert len([line for line in lines[1:] if not line.startswith("      ")]) > 1
    assert "32 ranks on 8 hosts" in " ".join(lines)


def test_plan_shows_what_a_narrow_wire_changes(capsys: pytest.CaptureFixture[str]) -> None:
    words = "plan --hosts 4 --link 1Gb --wire bf16 --collective all_reduce --collective broadcast"
    assert main(words.split()) == 0
    out = capsys.readouterr().out
    assert out.startswith("all_reduce, in bf16 between hosts\n")
    assert "\nbroadcast\n" in out
    assert "256 MiB in bf16 over 4 ranks on 4 hosts: sharded takes" in " ".join(out.split())


def test_plan_shows_every_collective_by_default(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--ranks-per-host", "4"]) == 0
    out = capsys.readouterr().out
    for collective in ("all_reduce", "broadcast", "reduce", "gather", "all_to_all", "barrier"):
        assert f"\n{collective}\n" in f"\n{out}"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("plan --hosts 0", "at least one"),
        ("plan --hosts 2 --link fast", "cannot read the rate 'fast'"),
        ("plan --cores 0", "--cores must be at least 1, got 0"),
        ("plan --hosts 1000 --ranks-per-host 1000", "at most 65536 ranks, not 1000000"),
        ("plan --hosts 100000000 --ranks-per-host 1000", "more than 1000000"),
        ("plan --wire fp4", "unknown wire 'fp4'; give one of identity, bf16"),
        ("plan --tuning /nowhere", "cannot read the tuning file /nowhere"),
        ("tune --ranks 1", "--ranks must be at least 2, got 1"),
        ("tune --rounds 0", "--rounds must be at least 1, got 0"),
        ("tune --ranks 2 --out /nowhere/tuned", "cannot write the tuning file /nowhere/tuned"),
        ("tune --from 5MiB --to 6MiB", "is between them"),
        ("tune --collective ring", "invalid choice"),
    ],
)
def test_wrong_arguments_are_named(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words.split()) == 2
    assert message in capsys.readouterr().err


def test_sizes_grow_by_factors_of_four() -> None:
    assert sizes_between(4, 1024) == [4, 16, 64, 256, 1024]
    assert sizes_between(5, 64) == [16, 64]
    with pytest.raises(UsageError, match="none of 4 B, 16 B"):
        sizes_between(5, 6)


def test_the_table_of_tune_says_how_far_the_model_was_from_the_fastest() -> None:
    cluster = default_cluster((0, 0, 0, 0))
    chosen = choose("all_gather", 1 << 20, cluster).name
    other = next(name for name in ("ring", "direct") if name != chosen)
    times = {"all_gather": {1 << 20: {chosen: 150.0, other: 100.0}}}
    text = table(Tuning((0,) * 4, 2, times), cluster)
    assert f"model {chosen} 1.50  {other} 100 us, {chosen} 150 us" in text
    assert "within 10 % of the fastest at 0 of 1" in text
