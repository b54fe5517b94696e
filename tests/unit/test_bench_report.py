"""`shoal report`: invalid files, the page, and pictures."""

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shoal.bench.record import CallName, read_records
from shoal.cli import main
from shoal.errors import UsageError

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:pyparsing")

needs_matplotlib = pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None,
    reason="NOT TESTED: pictures need matplotlib: pip install matplotlib",
)
ALL_REDUCE = CallName("all_reduce", "float", "sum", -1, True)


def point(name: str, p50_us: float, size: int, **more: Any) -> dict[str, Any]:
    times = {"n_calls": 6, "p50_us": p50_us, "p95_us": 2 * p50_us, "p99_us": 3 * p50_us}
    numbers = {"bus_bytes_per_s": 1.5e6 * size / p50_us, "cpu_us": 7.0, "least_us": size / 40}
    others = {"ratio": None, "n_wrong": 0, "sent_bytes": 1.6 * size, **more}
    return {"library": name, **ALL_REDUCE._asdict(), "size": size, **times, **numbers, **others}


def record() -> dict[str, Any]:
    head = {"format": "shoal bench", "format_version": 3, "version": "0.1.0"}
    run = {"date": "today", "command": "shoal bench <all>"}
    points = [
        one
        for size in (1 << 20, 1 << 22)
        for one in (point("shoal", size / 40, size), point("gloo", size / 20, size, ratio=2.0))
    ]
    return {**head, "run": run, "points": points}


@pytest.fixture
def file(tmp_path: Path) -> Callable[..., Path]:
    def write(data: Any = None, name: str = "run.json") -> Path:
        path = tmp_path / name
        path.write_text(data if isinstance(data, str) else json.dumps(data or record()))
        return path

    return write


def broken(change: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    data = record()
    change(data)
    return data


@pytest.mark.parametrize(
    ("data", "what"),
    [
        ("", "is not JSON (Expecting value: line 1 column 2 (char 1)): has the run ended?"),
        ("[1]", "is not a file of `shoal bench --json FILE`"),
        ({"version": 2, "results": [1]}, "is not a file of `shoal bench --json FILE`"),
        (broken(lambda run: run.update(format_version=9)), "has format 9 of shoal 0.1.0"),
        (broken(lambda run: run.update(points=[])), "has nothing to draw: no size was measured"),
        (broken(lambda run: run.pop("run")), "is damaged: no 'run'; measure again"),
        (broken(lambda run: run["points"][0].pop("size")), "is damaged: no 'size'"),
        (broken(lambda run: run.update(points=[3])), "is damaged"),
        (broken(lambda run: run["points"][0].update(size="big")), "is damaged: must be real"),
        (broken(lambda run: run["points"][0].update(p50_us=None)), "is damaged"),
        (broken(lambda run: run["points"][0].update(root=[3])), "is damaged: unhashable"),
        (broken(lambda run: run["points"][1].update(p99_us=1e400)), "is damaged: p99_us is inf"),
        (broken(lambda run: [one.update(size=0) for one in run["points"]]), "has nothing to draw"),
    ],
)
def test_a_file_that_is_no_run_is_refused_in_one_plain_line(
    data: Any, what: str, file: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    path = file(data) if data else file(" ")
    assert main(["report", str(path)]) == 2
    text = capsys.readouterr().err
    assert text.startswith(f"shoal: {path} ")
    assert what in text
    assert text.count("\n") == 1


def test_a_missing_or_binary_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "noise.json").write_bytes(b"\xff\xfe\x00")
    for name, why in (("none", r"cannot read .*none.json: No such file"), ("noise", "is not JSON")):
        with pytest.raises(UsageError, match=why):
            read_records([tmp_path / f"{name}.json"])


def test_files_with_one_name_show_their_folders(file: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    both = [file(name="old/run.json"), file(name="run.json")]
    names = [one.name for one in read_records(both)]
    assert names == [str(tmp_path / "old" / "run"), str(tmp_path / "run")]
    with pytest.raises(UsageError, match="named twice"):
        read_records([both[0], both[0]])


def test_without_matplotlib_the_error_names_the_extra(
    file: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    assert main(["report", str(file())]) == 2
    assert "pip install matplotlib" in capsys.readouterr().err


@needs_matplotlib
def test_a_page_is_one_file_that_loads_nothing(
    file: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    failed = {"library": "gloo", "collective": "all_reduce", "failure": "rank <1> died"}
    data, out = record(), tmp_path / "page.html"
    data["points"].append(failed)
    assert main(["report", str(file(data)), "--out", str(out)]) == 0
    page = out.read_text()
    for mark in ("src=", 'href="http', "@import", "<script", "url(http"):
        assert mark not in page
    assert page.count("<svg") == 3
    for number in ("105 ms", "100%", "50%", "2.00x"):
        assert number in page
    assert "rank &lt;1&gt; died" in page
    assert "shoal bench &lt;all&gt;" in page
    assert capsys.readouterr().err == f"wrote {out}\n"


@needs_matplotlib
@pytest.mark.parametrize(("more", "n_calls"), [({"n_wrong": 4, "ratio": None}, 6), ({}, 4)])
def test_no_ratio_is_shown_for_wrong_results_or_fewer_than_five_calls(
    file: Callable[..., Path], tmp_path: Path, more: dict[str, Any], n_calls: int
) -> None:
    data = record()
    del data["points"][2:]  # a single size is drawn too
    data["points"][1].update(more)
    for one in data["points"]:
        one["n_calls"] = n_calls
    assert main(["report", str(file(data)), "-o", str(tmp_path / "p.html")]) == 0
    page = (tmp_path / "p.html").read_text()
    assert page.count("<svg") == 2
    assert "2.00x" not in page
    assert ("<tr class=wrong" in page) == bool(more)


@needs_matplotlib
def test_files_share_pictures_and_keep_names(file: Callable[..., Path], tmp_path: Path) -> None:
    files = [str(file(name=f"{name}.json")) for name in ("before", "a$ft$er")]
    pages = []
    for _ in range(2):
        assert main(["report", *files, "-o", str(tmp_path / "p.html")]) == 0
        pages.append((tmp_path / "p.html").read_text())
    page, again = pages
    assert page == again
    assert page.count("<svg") == 3
    for label in ("shoal, before", "gloo, a$ft$er", "the line (TCP), before"):
        assert label in page
