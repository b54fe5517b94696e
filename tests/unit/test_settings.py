"""Environment variables: which there are, where they are told of, and those nobody reads."""

import contextlib
import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from unit.in_process import run_well

import shoal
from shoal import settings
from shoal.limits import STAGING_BYTES
from shoal.rendezvous.store.client import TcpStoreClient
from shoal.rendezvous.store.server import TcpStoreServer
from shoal.settings import INTERNAL, SETTINGS, warn_of_unknown

REPOSITORY = Path(__file__).parents[2]
NAME = re.compile(r"\bSHOAL_[A-Z0-9_]+\b")


@pytest.fixture(autouse=True)
def nothing_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "_warned", set())


def read_by_the_source() -> Iterator[str]:
    """Names in quotes, in Python and in C++: what is read, and not what comments tell of."""
    quoted = re.compile(r"[\"'](SHOAL_[A-Z0-9_]+)[\"']")
    for folder, ends in (("src", ".py"), ("native", ".cc"), ("native", ".h"), ("tests", ".py")):
        for path in (REPOSITORY / folder).rglob("*" + ends):
            if path.name != "test_settings.py":
                yield from quoted.findall(path.read_text())


def test_every_variable_that_the_source_names_is_in_the_table() -> None:
    assert set(read_by_the_source()) == {*SETTINGS, *INTERNAL}


def test_the_readme_tells_of_every_setting_and_of_no_other() -> None:
    table = (REPOSITORY / "README.md").read_text().partition("\n## Settings\n")[2]
    names = [row.split("|")[1] for row in table.partition("\n## ")[0].splitlines() if "`" in row]
    assert sorted(NAME.findall(" ".join(names))) == sorted(SETTINGS)


def test_the_docs_tell_of_no_setting_that_does_not_exist() -> None:
    pages = [REPOSITORY / "README.md", *(REPOSITORY / "docs").glob("*.md")]
    told = {name for page in pages for name in NAME.findall(page.read_text())}
    assert told <= {*SETTINGS, *INTERNAL}


def test_a_misspelt_setting_is_told_of_once_with_the_nearest_that_exists(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for _ in range(2):
        warn_of_unknown({"SHOAL_STAGING_BYTE": "9", "SHOAL_ALGO": "ring", "PATH": "/bin"})
    assert caplog.messages == [
        "SHOAL_STAGING_BYTE is set, but shoal does not read it; did you mean SHOAL_STAGING_BYTES?"
    ]


def test_a_name_like_no_setting_is_told_of_with_all_there_are(
    caplog: pytest.LogCaptureFixture,
) -> None:
    warn_of_unknown({"SHOAL_QQQQQQQ": ""})
    assert caplog.messages[0].endswith("; it reads " + ", ".join(SETTINGS))


def test_the_value_of_a_misspelt_key_is_not_shown(caplog: pytest.LogCaptureFixture) -> None:
    warn_of_unknown({"SHOAL_KEYS": "correct horse"})
    assert "SHOAL_KEY?" in caplog.messages[0]
    assert "horse" not in caplog.text


def test_no_known_setting_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    warn_of_unknown(dict.fromkeys([*SETTINGS, *INTERNAL], "1"))
    assert not caplog.messages


def test_forming_a_group_tells_of_a_misspelt_setting(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_SPIN_US_", "1")
    with contextlib.ExitStack() as on_exit:
        server = on_exit.enter_context(contextlib.closing(TcpStoreServer("127.0.0.1", 0)))
        client = TcpStoreClient("127.0.0.1", server.port, timeout_s=60)
        shoal.init(on_exit.enter_context(contextlib.closing(client)), 0, 1).close()
    assert [record.name for record in caplog.records] == ["shoal.settings"]
    assert "did you mean SHOAL_SPIN_US?" in caplog.text


def ceiling_of(group: shoal.Group) -> int:
    assert group.mesh is not None
    told = group.mesh.state(5.0)
    assert told is not None
    ceiling: int = told["staging"]["ceiling_bytes"]
    return ceiling


@pytest.mark.parametrize(
    ("text", "n_bytes"),
    [("", STAGING_BYTES), ("8388608", 8 << 20), ("24MiB", 24 << 20), ("10 MB", 10_000_000)],
)
def test_staging_is_written_as_other_sizes_are(
    text: str, n_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_STAGING_BYTES", text)
    assert run_well(ceiling_of, 1) == [n_bytes]


def test_a_meeting_that_fails_has_told_of_a_misspelt_setting_before(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_KEY_FILES", "/nowhere")
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(shoal.UsageError):
        shoal.init(timeout_s=1)
    assert "did you mean SHOAL_KEY_FILE?" in caplog.text
    assert caplog.records[0].levelno == logging.WARNING
