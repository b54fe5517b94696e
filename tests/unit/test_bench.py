"""The arithmetic and the text of the tables, without measuring anything."""

from pathlib import Path

import pytest

from shoal.bench.contest import Case, Contestant, Row, Section, run_section, summary_of
from shoal.bench.failure import Failure
from shoal.bench.goals import Below, Faster, Within
from shoal.bench.sections import SECTIONS
from shoal.bench.table import align, render, show_memory, show_size, show_time
from shoal.bench.teams import Settings, Teams


def seconds(value: float) -> str:
    return f"{value:g} s"


@pytest.fixture
def teams() -> Teams:
    return Teams(Settings(n_rounds=3, openmpi=Path("nowhere")))


def section_of(*contestants: Contestant, goals: tuple[Faster, ...] = ()) -> Section:
    cases = (Case(2, 1024, goals), Case(4, 25 * 1024 * 1024, goals))
    return Section("toy", "a toy", ("made up",), contestants, cases, seconds)


def drifting(label: str, values: list[float]) -> Contestant:
    """A contestant that gives the values one after another, over and over."""
    turns: list[float] = []

    def measure(_teams: Teams, _case: Case) -> float:
        turns.append(0)
        return values[(len(turns) - 1) % len(values)]

    return Contestant(label, measure)


def failing(label: str) -> Contestant:
    def measure(_teams: Teams, _case: Case) -> float:
        raise Failure("it is not installed")

    return Contestant(label, measure)


def test_the_contestants_take_turns_in_every_round(teams: Teams) -> None:
    turns: list[str] = []

    def logging(label: str) -> Contestant:
        def measure(_teams: Teams, case: Case) -> float:
            turns.append(f"{label}{case.n_ranks}")
            return 1.0

        return Contestant(label, measure)

    run_section(section_of(logging("a"), logging("b")), teams, lambda _text: None)
    assert turns == ["a2", "b2"] * 3 + ["a4", "b4"] * 3


def test_a_number_is_the_median_over_the_rounds(teams: Teams) -> None:
    section = section_of(drifting("a", [1.0, 100.0, 2.0]))
    rows = run_section(section, teams, lambda _text: None)
    assert [row.medians() for row in rows] == [{"a": 2.0}, {"a": 2.0}]


def test_a_contestant_that_failed_once_has_no_number_and_no_further_turn(teams: Teams) -> None:
    turns = 0

    def measure(_teams: Teams, _case: Case) -> float:
        nonlocal turns
        turns += 1
        if turns == 2:
            raise Failure("rank 1 died")
        return 1.0

    rows = run_section(section_of(Contestant("a", measure)), teams, lambda _text: None)
    assert turns == 2 + 3  # of three in the first case, and all in the second
    assert [row.medians() for row in rows] == [{}, {"a": 1.0}]
    assert rows[0].failures == {"a": "rank 1 died"}


def test_what_does_not_drift_is_measured_once(teams: Teams) -> None:
    contestant = drifting("a", [1.0, 2.0])
    case = Case(2, 4)
    section = Section("toy", "", (), (contestant,), (case,), seconds, in_rounds=False)
    assert run_section(section, teams, lambda _text: None) == [Row(case, {"a": [1.0]})]


@pytest.mark.parametrize(
    ("goal", "medians", "text"),
    [
        (Faster("we", "they", 4), {"we": 2.0, "they": 8.0}, "they/we 4.00 >= 4 met"),
        (Faster("we", "they", 4), {"we": 2.0, "they": 7.9}, "they/we 3.95 >= 4 MISSED"),
        (Faster("we", "they", 1.3), {"we": 2.0}, "they/we ? >= 1.3 not measured"),
        (Faster("we", "they", 4), {"they": 2.0}, "they/we ? >= 4 not measured"),
        (Within("we", "floor", 1.5), {"we": 3.0, "floor": 2.0}, "we/floor 1.50 <= 1.5 met"),
        (Within("we", "floor", 1.5), {"we": 3.2, "floor": 2.0}, "we/floor 1.60 <= 1.5 MISSED"),
        (Within("we", "floor", 1.5), {"we": 3.0}, "we/floor ? <= 1.5 not measured"),
        (Below("we", 20.0), {"we": 20.0}, "we 20 s <= 20 s met"),
        (Below("we", 20.0), {"we": 21.0}, "we 21 s <= 20 s MISSED"),
        (Below("we", 20.0), {}, "we ? <= 20 s not measured"),
    ],
)
def test_a_goal_is_met_missed_or_not_measured(
    goal: Faster | Within | Below, medians: dict[str, float], text: str
) -> None:
    assert str(goal.judge(medians, seconds)) == text


def test_a_ratio_just_short_of_the_goal_is_missed_even_if_it_prints_like_it() -> None:
    verdict = Faster("we", "they", 4).judge({"we": 1.0, "they": 3.999}, seconds)
    assert (str(verdict), verdict.is_met) == ("they/we 4.00 >= 4 MISSED", False)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.7e-6, "0.70 us"),
        (18.24e-6, "18.2 us"),
        (0.66e-3, "660 us"),
        (9.996e-6, "10.0 us"),
        (99.96e-6, "100 us"),
        (2.7e-3, "2.70 ms"),
        (0.329, "329 ms"),
    ],
)
def test_times_have_three_digits(value: float, text: str) -> None:
    assert show_time(value) == text


@pytest.mark.parametrize(
    ("n_bytes", "text"),
    [(4, "4 B"), (1024, "1 KiB"), (1500, "1500 B"), (65536, "64 KiB"), (25 * 2**20, "25 MiB")],
)
def test_sizes_read_as_people_say_them(n_bytes: int, text: str) -> None:
    assert show_size(n_bytes) == text


def test_memory_is_shown_in_mebibytes() -> None:
    assert show_memory(60 * 2**20) == "60.0 MiB"


def test_columns_are_as_wide_as_their_widest_cell_and_the_last_one_is_text() -> None:
    lines = [["ranks", "gloo", "goals"], ["2", "16.1 ms", "met"], ["4", "-", ""]]
    assert align(lines) == [
        "  ranks     gloo  goals",
        "      2  16.1 ms  met",
        "      4        -",
    ]


def test_a_table_shows_numbers_goals_and_why_a_number_is_missing(teams: Teams) -> None:
    goals = (Faster("we", "they", 4), Faster("we", "nobody", 2))
    contestants = (drifting("we", [2.0]), drifting("they", [9.0]), failing("nobody"))
    section = section_of(*contestants, goals=goals)
    assert render(section, run_section(section, teams, lambda _text: None)).splitlines() == [
        "# toy: a toy",
        "# made up",
        "  ranks    size   we  they  nobody  goals",
        "      2   1 KiB  2 s   9 s       -  they/we 4.50 >= 4 met | nobody/we ? >= 2 not measured",
        "      4  25 MiB  2 s   9 s       -  they/we 4.50 >= 4 met | nobody/we ? >= 2 not measured",
        "# no nobody: it is not installed",
    ]


def test_the_summary_counts_goals(teams: Teams) -> None:
    goals = (Faster("we", "they", 4), Faster("we", "they", 5), Faster("we", "nobody", 2))
    section = section_of(drifting("we", [2.0]), drifting("they", [9.0]), goals=goals)
    rows = run_section(section, teams, lambda _text: None)
    assert summary_of([(section, rows)]) == "goals: 2 met, 2 missed, 2 not measured"


def test_a_library_that_is_not_installed_is_a_failure_and_is_not_tried_again(
    teams: Teams,
) -> None:
    with teams:
        for _ in range(2):
            with pytest.raises(Failure, match="make bench"):
                teams.sample("openmpi", Case(2, 4))


def test_every_goal_speaks_of_columns_of_its_own_table() -> None:
    for section in SECTIONS:
        labels = {contestant.label for contestant in section.contestants}
        for case in section.cases:
            for goal in case.goals:
                medians = dict.fromkeys(labels, 1.0)
                assert goal.judge(medians, section.show).is_met is not None


def test_sections_have_names_of_their_own() -> None:
    names = [section.name for section in SECTIONS]
    assert len(set(names)) == len(names)
