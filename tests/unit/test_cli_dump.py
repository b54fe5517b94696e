"""`shoal dump` on the command line."""

from pathlib import Path

import pytest
from unit.test_state import call, state, step

from shoal.cli import main
from shoal.state.files import write


def test_the_command_reads_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    waiting = state(0, [call([step(1, "data", 12.0)], absent=(1,))])
    files = [str(write(one, "", str(tmp_path))[0]) for one in (waiting, state(1, [], 4))]
    for given in (files, map(str, tmp_path.iterdir())):  # texts among them
        assert main(["dump", *given]) == 0
        assert "rank 1 on host-1 has not made" in capsys.readouterr().out
    assert main(["dump", "--text", files[0]]) == 0
    assert capsys.readouterr().out.startswith("shoal on host-0")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "is not a state of shoal; this shoal reads version 1"),
        ('{"shoal_dump": 2}', "has version 2; this shoal reads version 1"),
        ('{"shoal_dump": 1, "taken_at_s": 1, "worlds": [{}], "threads": []}', "is damaged"),
        (None, "No such file or directory"),
    ],
)
def test_a_file_that_is_none_of_ours_is_refused(
    content: str | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.json"
    if content is not None:
        path.write_text(content)
    assert main(["dump", str(path)]) == 2
    assert message in capsys.readouterr().err
