"""`shoal lab`: what is refused before anything is made, and in which words."""

import os
from pathlib import Path

import pytest

from shoal.cli import main
from shoal.errors import UsageError
from shoal.lab.cluster import Lab
from shoal.lab.iproute import check_powers
from shoal.lab.job import Job, private_key, server_command, tasks_of
from shoal.rendezvous import job_key


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        ("--hosts 2", "no command: write it behind --"),
        ("--hosts 2 --", "no command: write it behind --"),
        ("-- true", "--hosts"),
        ("--hosts two -- true", "invalid int value: 'two'"),
        ("--hosts 0 -- true", "--hosts 0: expected 1 or more"),
        ("--hosts 201 -- true", "a lab of 201 hosts: expected 1 to 200"),
        ("--hosts 2 --servers -1 -- true", "--servers -1: expected 0 or more"),
        ("--hosts 2 --ranks-per-host 0 -- true", "--ranks-per-host 0: expected 1 to 1000"),
        ("--hosts 2 --grace nan -- true", "--grace nan: expected 0 to 3600 seconds"),
        ("--hosts 2 --rate 400 -- true", "--rate: cannot read the rate '400'; write 400mbit"),
        ("--hosts 2 --rate fast -- true", "--rate: cannot read the rate 'fast'"),
        ("--hosts 2 --rate 1kbit -- true", "at 0.001 Mbit/s: expected 1 to 100000 Mbit/s"),
        ("--hosts 4 --rate 1gbit,2gbit,3gbit -- true", "--rate lists 3 rates for 4 hosts"),
        ("--hosts 2 --nics 1gbit, -- true", "--nics: cannot read the rate ''"),
        ("--hosts 2 --nics 1gbit,1gbit --rate 1gbit -- true", "not allowed with"),
        ("--hosts 2 --server-rate 1gbit -- true", "needs servers: add --servers K"),
        ("--hosts 2 --queue 4mbit -- true", "--queue: cannot read the bytes '4mbit'"),
        ("--hosts 2 --queue 1KiB -- true", "a queue of 1 KiB at each NIC: expected 4 KiB to 1 GiB"),
        ("--hosts 2 --burst 2GiB -- true", "a burst of 2 GiB at each NIC: expected 4 KiB to 1 GiB"),
        ("--hosts 2 --name a/b -- true", "or a digit, got 'a/b'"),
        ("--hosts 2 --key-file /nosuch -- true", "/nosuch cannot be read"),
        ("--hosts 2 -- shoal-no-such-program", "'shoal-no-such-program' does not exist"),
        ("--hosts 2 -- /etc", "'/etc' does not exist or is not executable"),
    ],
)
def test_wrong_input_is_one_line_and_code_2(
    argv: str, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["lab", "run", *argv.split()]) == 2
    said = capsys.readouterr().err
    assert problem in said
    assert said.count("\n") == 1


def test_without_root_it_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    for argv in (["run", "--hosts", "2", "--", "true"], ["cut", "x", "0", "1"], ["clean"]):
        assert main(["lab", *argv]) == 2
        assert "needs root: run it with sudo" in capsys.readouterr().err


def test_without_iproute2_it_names_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match="ip and tc not found: install iproute2"):
        check_powers()


def test_servers_come_last_and_workers_are_told_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_KEY", "a secret of the surroundings")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    lab = Lab(4, apart={3: [100]})
    tasks = tasks_of(Job(["train"], 2, 1, "/key"), lab)
    assert [(task.label, task.host) for task in tasks] == [
        *(("server2", 2), ("server3", 3)),
        *(("host0", 0), ("host1", 1)),
    ]
    servers, workers = tasks[:2], tasks[2:]
    for task in servers:
        assert task.argv == server_command("/key")
        assert "RANK" not in task.environ
    for task in workers:
        assert "10.77.0.3,10.77.0.4" in task.environ.values()
        assert task.environ["SHOAL_KEY_FILE"] == "/key"
        assert task.environ["SHOAL_LINK"].startswith("1000Mb")  # of the workers: they must agree
    for task in tasks:
        assert "SHOAL_KEY" not in task.environ
        assert "TORCHELASTIC_USE_AGENT_STORE" not in task.environ


def test_a_key_of_its_own_is_one_that_ranks_accept_and_that_ends_with_the_lab() -> None:
    with private_key() as path, private_key() as other:
        keys = {job_key({"SHOAL_KEY_FILE": each}) for each in (path, other)}
    assert {len(key or b"") for key in keys} == {64}
    assert len(keys) == 2
    with pytest.raises(UsageError, match="cannot be read"):
        job_key({"SHOAL_KEY_FILE": path})
    with private_key("the key that was given") as path:
        assert job_key({"SHOAL_KEY_FILE": path}) == b"the key that was given"
