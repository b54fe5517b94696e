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
