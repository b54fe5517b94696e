"""Environment variables: the list, its page, and misspelt ones."""

import logging
import re
from pathlib import Path

import pytest
from unit.in_process import run_well

import shoal
from shoal import settings
from shoal.errors import UsageError
from shoal.limits import STAGING_BYTES
from shoal.settings import INTERNAL, SETTINGS, warn_of_unknown

REPOSITORY = Path(__file__).parents[2]
NAME = re.compile(r"\bSHOAL_[A-Z0-9_]+\b")


@pytest.fixture(autouse=True)
def no_warnings_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "_warned", set())


def test_every_variable_in_the_source_is_in_the_table() -> None:
    quoted = re.compile(r"[\"'](SHOAL_[A-Z0-9_]+)[\"']")  # not those in comments
    found = set[str]()
    for folder, ends in (("src", ".py"), ("native", ".cc"), ("native", ".h"), ("tests", ".py")):
        for path in (REPOSITORY / folder).rglob("*" + ends):
            if path.name != "test_settings.py":
                found.update(quoted.findall(path.read_text()))
    assert found == {*SETTINGS, *INTERNAL}


def test_the_page_of_settings_lists_exactly_the_settings() -> None:
    page = (REPOSITORY / "docs" / "settings.md").read_text()
    names = [row.split("|")[1] for row in page.splitlines() if row.startswith("| `")]
    assert sorted(NAME.findall(" ".join(names))) == sorted(SETTINGS)
    pages = [REPOSITORY / "README.md", *(REPOSITORY / "docs").glob("*.md")]
    named = {name for page in pages for name in NAME.findall(page.read_text())}
    assert named <= {*SETTINGS, *INTERNAL}


def test_a_misspelt_setting_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    warn_of_unknown(dict.fromkeys([*SETTINGS, *INTERNAL], "1"))
    for _ in range(2):
        warn_of_unknown({"SHOAL_STAGING_BYTE": "9", "SHOAL_ALGO": "ring", "PATH": "/bin"})
    warn_of_unknown({"SHOAL_KEYS": "correct horse"})
    warn_of_unknown({"SHOAL_QQQQQQQ": ""})
    first, key, unlike = caplog.messages
    assert first.startswith("SHOAL_STAGING_BYTE is set")
    assert "SHOAL_STAGING_BYTES?" in first
    assert "SHOAL_KEY?" in key
    assert "horse" not in caplog.text
    assert unlike.endswith(", ".join(SETTINGS))


@pytest.mark.parametrize(
    ("text", "n_bytes"),
    [("", STAGING_BYTES), ("8388608", 8 << 20), ("24MiB", 24 << 20), ("10 MB", 10_000_000)],
)
def test_staging_is_written_like_other_sizes(
    text: str, n_bytes: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SHOAL_STAGING_BYTES", text)
    monkeypatch.setenv("SHOAL_SPIN_US_", "1")
    (state,) = run_well(lambda group: group.mesh.state(5.0), 1)
    assert state["staging"]["ceiling_bytes"] == n_bytes
    assert "did you mean SHOAL_SPIN_US?" in caplog.text


def test_a_failed_join_names_a_misspelt_setting(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_KEY_FILES", "/nowhere")
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(shoal.UsageError):
        shoal.init(timeout_s=1)
    assert "did you mean SHOAL_KEY_FILE?" in caplog.text
    assert caplog.records[0].levelno == logging.WARNING


def test_switches_take_the_usual_words() -> None:
    for read, name, default in (
        (settings.monitored, "SHOAL_MONITOR", False),
        (settings.local_nccl, "SHOAL_LOCAL_NCCL", True),
    ):
        assert read({}) == read({name: ""}) == default
        assert all(read({name: word}) for word in ("1", "Yes", "TRUE", "on", "y", "t"))
        assert not any(read({name: word}) for word in ("0", "no", "False", "off"))
        with pytest.raises(UsageError, match=f"{name}='2' is neither yes nor no"):
            read({name: "2"})
