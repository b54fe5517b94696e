"""The command `shoal`: its frame, and the shared code of subcommands."""

import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

import shoal
from shoal.cli import main
from shoal.cli.options import hosts_of
from shoal.errors import TimedOut, UsageError
from shoal.lab import names
from shoal.lab.cluster import Lab
from shoal.lab.job import Job, private_key, server_command, tasks_of
from shoal.lab.names import check_powers
from shoal.lab.output import Lines, Output
from shoal.rendezvous import job_key


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"shoal {shoal.__version__}\n"


def test_a_command_does_not_import_the_others() -> None:
    code = "import sys\nfrom shoal.cli import main\nassert main(['server']) == 2\n"
    code += "print(*(name for name in sys.modules if name.startswith('shoal')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "shoal.cli.server" in done.stdout.split()
    assert not {"shoal.bench", "shoal.lab", "shoal.analysis"} & set(done.stdout.split())


def test_hosts_are_read_or_refused() -> None:
    for text, hosts in (("2x3", (0, 0, 0, 1, 1, 1)), ("2,1", (0, 0, 1)), ("1x1", (0,))):
        assert hosts_of(text) == hosts
    grids = ["", "3", "two", "2x", "0x4", "2x0", "-2x4", "2x2x2", "04x2", "٣x٤"]
    for text in (*grids, "4,0", "4,,4", "4,"):
        with pytest.raises(UsageError, match="2 hosts of 4 ranks"):
            hosts_of(text)


def test_a_reader_that_closes_its_pipe_ends_the_command_quietly() -> None:
    argv = [sys.executable, "-m", "shoal", "trace", "ring", "--ranks", "32"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as command:
        assert command.stdout.readline() == b"all_reduce ring: 32 ranks, 62 rounds\n"
        command.stdout.close()
        assert command.stderr.read() == b""
        assert command.wait() == 1


def test_a_full_disk_is_reported_in_one_line_and_no_standard_output_is_needed() -> None:
    argv = [sys.executable, "-m", "shoal", "trace", "ring"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(argv, check=False, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.stderr == "shoal: cannot write the output: No space left on device\n"
    assert done.returncode == 1
    argv = ["sh", "-c", 'exec "$@" >&-', "sh", sys.executable, "-m", "shoal", "trace", "ring"]
    done = subprocess.run(argv, check=False, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_an_interrupt_ends_a_command_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("shoal.cli.draw._run", Mock(side_effect=KeyboardInterrupt))
    assert main(["draw", "ring"]) == 130
    assert capsys.readouterr().err == "shoal: interrupted\n"


def test_without_root_the_lab_names_sudo(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    for argv in (["run", "--hosts", "2", "--", "true"], ["cut", "x", "0", "1"], ["heal", "x", "0"]):
        assert main(["lab", *argv]) == 2
        assert "needs root: run it with sudo" in capsys.readouterr().err


def test_without_iproute2_the_lab_names_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match="ip and tc not found: install iproute2"):
        check_powers()


def test_a_tool_of_iproute2_that_does_not_end_is_killed_and_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "ip").write_text("#!/bin/sh\nkill -STOP $$\n")
    (tmp_path / "ip").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(names, "_TOOL_S", 0.05)
    with pytest.raises(TimedOut, match=r"`ip netns pids h0` did not end within 0.05 s and was kil"):
        names.ip("netns", "pids", "h0")


def test_the_last_hosts_are_servers_known_to_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_KEY", "a secret of the surroundings")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    lab = Lab(4, apart={3: [100]})
    tasks = tasks_of(Job(["train"], 2, 1, "/key"), lab)
    labels = {"server2": 2, "server3": 3, "host0": 0, "host1": 1}
    assert [(task.label, task.host) for task in tasks] == list(labels.items())
    servers, workers = tasks[:2], tasks[2:]
    for task in servers:
        assert task.argv == server_command("/key")
        assert "RANK" not in task.environ
    for task in workers:
        assert "10.77.0.3,10.77.0.4" in task.environ.values()
        assert task.environ["SHOAL_KEY_FILE"] == "/key"
        assert task.environ["SHOAL_LINK"].startswith("1000Mb")  # of the workers, which must agree
    for task in tasks:
        assert "SHOAL_KEY" not in task.environ
        assert "TORCHELASTIC_USE_AGENT_STORE" not in task.environ


def test_a_generated_key_is_valid_and_removed_with_the_lab() -> None:
    with private_key() as path, private_key() as other:
        keys = {job_key({"SHOAL_KEY_FILE": each}) for each in (path, other)}
    assert {len(key or b"") for key in keys} == {64}
    assert len(keys) == 2
    with pytest.raises(UsageError, match="cannot be read"):
        job_key({"SHOAL_KEY_FILE": path})
    with private_key("the key that was given") as path:
        assert job_key({"SHOAL_KEY_FILE": path}) == b"the key that was given"


def test_a_line_without_end_is_passed_on_in_pieces() -> None:
    (source, sink), (reader, writer) = os.pipe(), os.pipe()
    os.set_blocking(reader, False)
    output = Output(writer)
    lines = Lines(os.fdopen(source, "rb"), output, "h")
    for _ in range(2):
        os.write(sink, b"x" * 60_000)
        lines.read()
    lines.end()
    output.write()
    assert os.read(reader, 1 << 20).startswith(b"h | xxx")
    while output.is_pending:
        output.write()
        os.read(reader, 1 << 20)
    for end in (sink, reader, writer):
        os.close(end)


def test_draining_a_pipe_ends_though_a_child_still_writes() -> None:
    source, sink = os.pipe()

    class Echo(Output):
        """Writes another line for each received one, as a child that outlives its parent."""

        n_lines = 0

        def add(self, label: str, line: bytes) -> None:
            self.n_lines += 1
            assert self.n_lines < 100, "this would never end"
            os.write(sink, b"y\n")

    echo = Echo(1)
    lines = Lines(os.fdopen(source, "rb"), echo, "h")
    os.write(sink, b"y\n" * 10)
    lines.read_rest()
    assert echo.n_lines == 10
    lines.end()
    os.close(sink)
