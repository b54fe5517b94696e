"""The command `shoal`: its frame, and what every subcommand shares."""

import subprocess
import sys
from pathlib import Path

import pytest

import shoal
from shoal import UsageError
from shoal.cli.options import hosts_of, write


def test_the_module_runs_the_command() -> None:
    argv = [sys.executable, "-m", "shoal", "--version"]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert done.stdout == f"shoal {shoal.__version__}\n"


def test_a_command_imports_no_other() -> None:
    code = "import sys\nfrom shoal.cli import main\nassert main(['server']) == 2\n"
    code += "print(*(name for name in sys.modules if name.startswith('shoal')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "shoal.cli.server" in done.stdout.split()
    assert not {"shoal.bench", "shoal.lab", "shoal.analysis"} & set(done.stdout.split())


@pytest.mark.parametrize(
    ("text", "hosts"),
    [("2x3", (0, 0, 0, 1, 1, 1)), ("2,1", (0, 0, 1)), ("1x1", (0,))],
)
def test_hosts_are_read(text: str, hosts: tuple[int, ...]) -> None:
    assert hosts_of(text) == hosts


@pytest.mark.parametrize(
    "text",
    ["", "3", "two", "2x", "0x4", "2x0", "-2x4", "2x2x2", "4,0", "4,,4", "4,", "04x2", "٣x٤"],
)
def test_hosts_that_make_no_sense_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="2 hosts of 4 ranks"):
        hosts_of(text)


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot write .*nowhere.*: No such file or directory"):
        write("text", tmp_path / "nowhere" / "file")


def test_a_reader_that_goes_away_ends_the_command_quietly() -> None:
    argv = [sys.executable, "-m", "shoal", "trace", "ring", "--ranks", "32"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as command:
        assert command.stdout is not None
        assert command.stderr is not None
        assert command.stdout.readline() == b"all_reduce ring: 32 ranks, 62 rounds\n"
        command.stdout.close()
        assert command.stderr.read() == b""
        assert command.wait() == 1
