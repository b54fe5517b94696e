"""The programs that the native tests run are those of today's schedules."""

import programs

from shoal.schedule import ALGORITHMS, MESSAGE


def test_the_programs_of_the_native_tests_are_those_of_the_schedules() -> None:
    is_same = programs.FILE.read_text() == programs.written()  # apart: a diff of it says nothing
    assert is_same, (
        f"{programs.FILE.name} is not what the schedules say now: run `make programs`, "
        "run `make test-native`, and commit the file"
    )


def test_every_algorithm_of_the_table_is_among_the_programs() -> None:
    lines = programs.FILE.read_text().splitlines()
    titles = [line.split()[1:3] for line in lines if line.startswith("program ")]
    written = {(what, name) for what, name in titles if what != MESSAGE}
    table = {(what, name) for what, by in ALGORITHMS.items() for name in by}
    assert written - table == {("all_reduce", name) for name in programs.MORE_ALL_REDUCES}
    assert table <= written
