"""How shoal is compiled: warnings are errors for developers, not for users."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CMAKE = Path(sys.executable).with_name("cmake")


def commands(where: Path, *options: str) -> list[str]:
    tools = ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={CMAKE.with_name('ninja')}"]
    command = [CMAKE, "-S", ROOT, "-B", where, *tools, *options]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    found = json.loads((where / "compile_commands.json").read_text())
    return [entry["command"] for entry in found]


@pytest.mark.skipif(not CMAKE.exists(), reason="cmake is not in this environment")
def test_a_warning_fails_a_developers_build_and_not_a_users(tmp_path: Path) -> None:
    user = commands(tmp_path / "user")
    developer = commands(tmp_path / "developer", "-DSHOAL_WERROR=ON")
    assert len(user) == len(developer) > 20
    assert all("-Wall" in command and "-Werror" not in command for command in user)
    assert all("-Wall" in command and "-Werror" in command for command in developer)
