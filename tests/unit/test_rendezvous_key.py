"""Accepted and refused keys, and derived keys that must differ."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.errors import UsageError
from shoal.rendezvous.key import job_key, random_key
from shoal.server.options import keys_of

SECRET = "0123456789abcdef-secret"


def key_file(folder: Path, text: str = SECRET + "\n", mode: int = 0o600, name: str = "key") -> str:
    path = folder / name
    path.write_text(text)
    path.chmod(mode)
    return str(path)


def test_the_key_is_the_files_without_newline_or_the_variables_or_none(tmp_path: Path) -> None:
    environ = {"SHOAL_KEY_FILE": key_file(tmp_path), "SHOAL_KEY": "another-key-altogether"}
    assert job_key(environ) == SECRET.encode()
    assert job_key({"SHOAL_KEY": SECRET}) == SECRET.encode()
    assert job_key({}) is None
    assert job_key({"SHOAL_KEY": "", "SHOAL_KEY_FILE": ""}) is None


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o644])
def test_a_key_file_accessible_to_others_is_refused(tmp_path: Path, mode: int) -> None:
    path = key_file(tmp_path, mode=mode)
    with pytest.raises(UsageError, match=f"mode {mode:04o}.*chmod 600"):
        job_key({"SHOAL_KEY_FILE": path})


def test_a_servers_key_is_named_once_in_a_file_that_others_cannot_read(tmp_path: Path) -> None:
    one, same = (key_file(tmp_path, name=name) for name in "ab")
    other = key_file(tmp_path, "l" * 32, name="c")
    with pytest.raises(UsageError, match=r"a and .*b hold the same key"):
        keys_of([one, same])
    assert [key.path for key in keys_of([one, other])] == [one, other]
    path = key_file(tmp_path, mode=0o644)
    with pytest.raises(UsageError, match=rf"^--key-file {path} has mode 0644"):
        keys_of([path])


def test_a_key_file_must_be_an_existing_regular_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    for path, why in (
        (tmp_path, "not a regular file"),
        (tmp_path / "pipe", "not a regular file"),
        (tmp_path / "none", "No such file"),
    ):
        with pytest.raises(UsageError, match=why):
            job_key({"SHOAL_KEY_FILE": str(path)})


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_key_file_of_another_user_is_refused(tmp_path: Path) -> None:
    path = key_file(tmp_path)
    os.chown(path, 65534, -1)
    with pytest.raises(UsageError, match="belongs to user 65534"):
        job_key({"SHOAL_KEY_FILE": path})


def test_a_short_or_huge_key_is_refused_without_being_shown(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="SHOAL_KEY holds 7 bytes") as caught:
        job_key({"SHOAL_KEY": "hunter2"})
    assert "hunter2" not in str(caught.value)
    with pytest.raises(UsageError, match="expected 16 to 4096"):
        job_key({"SHOAL_KEY_FILE": key_file(tmp_path, "x" * 5000)})


def test_a_job_key_is_random() -> None:
    assert random_key() != random_key()


def test_a_libcrypto_without_its_algorithms_is_an_error_that_names_it(tmp_path: Path) -> None:
    conf = "openssl_conf=a\n[a]\nproviders=b\n[b]\nbase=c\n[c]\nactivate=1\n"
    (tmp_path / "openssl.cnf").write_text(conf)
    environ = os.environ | {"OPENSSL_CONF": str(tmp_path / "openssl.cnf")}
    program = "from shoal.engine import pair_key; pair_key(b'k' * 32, 1, 0, 1)"
    ran = subprocess.run(
        [sys.executable, "-c", program], env=environ, capture_output=True, text=True, check=False
    )
    assert "RuntimeError: libcrypto cannot compute HMAC-SHA256: " in ran.stderr
