"""`shoal report`: files that are none, what a page says, and pictures."""

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shoal.bench.report.read import CallName, read_records
from shoal.cli import main
from shoal.errors import UsageError

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:pyparsing")

needs_matplotlib = pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None,
    reason="NOT TESTED: pictures need matplotlib: pip install matplotlib",
)
ALL_REDUCE = CallName("all_reduce", "float", "sum", -1, True)


LIBRARY = """{
    "in_place": true, "nwrong": 0, "ratio": null, "cpu_us_per_rank": 7.0
}"""
RUN = """{
    "format": "shoal bench", "format_version": 2, "version": "0.1.0", "n_rounds": 5,
    "run": {"date": "today", "command": "shoal bench <all>"}, "through": "torch.distributed",
    "place": {"n_ranks": 4, "n_hosts": 4, "rate_mbit": 500.0}
}"""
CALL = """{"collective": "all_reduce", "type": "float", "redop": "sum", "root": -1}"""


def library(name: str, p50_us: float, size: int, **more: Any) -> dict[str, Any]:
    told = {"library": name, "time": 2 * p50_us, "alg_bw": size / p50_us / 2e3}
    told |= {"bus_bw": 1.5 * size / p50_us / 2e3}
    told |= {"sent_bytes_per_rank": 1.6 * size, "received_bytes_per_rank": 1.6 * size}
    calls = {"p50_us": p50_us, "p95_us": 2 * p50_us, "p99_us": 3 * p50_us, "times_us": [1.0] * 6}
    return json.loads(LIBRARY) | told | {"per_iter": calls} | more


def record() -> dict[str, Any]:
    told = json.loads(RUN) | {"points": []}
    for size in (1 << 20, 1 << 22):
        libraries = [library("shoal", size / 40, size), library("gloo", size / 20, size, ratio=2.0)]
        point = {"size": size, "count": size // 4, "least_us": size / 40}
        told["points"].append(json.loads(CALL) | point | {"libraries": libraries})
    return {"version": 2, "results": [], "shoal": told}


@pytest.fixture
def file(tmp_path: Path) -> Callable[..., Path]:
    def write(data: Any = None, name: str = "run.json") -> Path:
        path = tmp_path / name
        path.write_text(data if isinstance(data, str) else json.dumps(data or record()))
        return path

    return write


def test_the_median_is_drawn_beside_the_line(file: Callable[..., Path]) -> None:
    (told,) = read_records([file()])
    first, last = told.series[ALL_REDUCE]["shoal"]
    assert (first.size, last.size) == (1 << 20, 1 << 22)
    assert first.p50_us == pytest.approx((1 << 20) / 40)
    # 40 bytes per microsecond at the median, times 2(n-1)/n; the mean took twice as long.
    assert first.bus_bytes_per_s == pytest.approx(1.5 * 40e6)
    gloo = told.series[ALL_REDUCE]["gloo"][0]
    assert gloo.ratio == 2.0
    assert gloo.best_us == pytest.approx((1 << 20) / 40)
    assert gloo.share == pytest.approx(0.5)
    assert told.run["network"] == "NICs at 500 Mbit/s"
    data = record()
    data["shoal"]["place"]["rate_mbit"] = None
    data["shoal"]["points"][0]["least_us"] = None
    (told,) = read_records([file(data)])
    assert told.series[ALL_REDUCE]["shoal"][0].best_us is None
    assert told.run["network"] == "NICs that nothing shapes"
    data["shoal"]["place"]["n_hosts"] = 0
    (told,) = read_records([file(data)])
    assert told.run["network"] == ""


def broken(change: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    data = record()
    change(data["shoal"])
    return data


@pytest.mark.parametrize(
    ("data", "what"),
    [
        ("", "is empty: the run that was to write it has not ended"),
        ("{", "is no JSON"),
        ("[1]", "is not what `shoal bench --json FILE` writes"),
        ({"version": 2, "results": [1]}, "is not what `shoal bench --json FILE` writes"),
        (broken(lambda told: told.update(format_version=9)), "has format 9 of shoal 0.1.0"),
        (broken(lambda told: told.update(points=[])), "has no measurements"),
        (broken(lambda told: told.pop("place")), "is damaged: no 'place'; measure again"),
        (broken(lambda told: told["points"][0].pop("size")), "is damaged: no 'size'"),
        (broken(lambda told: told.update(points=[3])), "is damaged"),
        (broken(lambda told: told["points"][0].update(size="big")), "is damaged: invalid literal"),
        (broken(lambda told: told["place"].update(rate_mbit=[3])), "is damaged"),
        (broken(lambda told: told["points"][1].update(size=1e400)), "is damaged"),
        (
            broken(lambda told: told["points"][0]["libraries"][1]["per_iter"].update(p99_us=1e400)),
            "is damaged: inf is no number to draw",
        ),
        (
            broken(lambda told: [point.update(size=0) for point in told["points"]]),
            "has nothing to draw: what was called has no size",
        ),
    ],
)
def test_a_file_that_is_no_run_is_told_in_one_plain_line(
    data: Any, what: str, file: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    path = file(data) if data else file(" ")
    assert main(["report", str(path)]) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"shoal: {path} ")
    assert what in told
    assert told.count("\n") == 1


def test_a_file_that_is_not_there_or_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "noise.json").write_bytes(b"\xff\xfe\x00")
    for name, why in (("none", r"cannot read .*none.json: No such file"), ("noise", "is no text")):
        with pytest.raises(UsageError, match=why):
            read_records([tmp_path / f"{name}.json"])


def test_files_of_one_name_get_their_folders(file: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    both = [file(name="old/run.json"), file(name="run.json")]
    assert [one.name for one in read_records(both)] == [
        str(tmp_path / "old" / "run"),
        str(tmp_path / "run"),
    ]
    with pytest.raises(UsageError, match="named twice"):
        read_records([both[0], both[0]])


def test_without_matplotlib_the_error_names_the_extra(
    file: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    assert main(["report", str(file())]) == 2
    assert "pip install matplotlib" in capsys.readouterr().err


@needs_matplotlib
def test_a_page_is_one_file_that_loads_nothing_and_pictures_lie_beside_it(
    file: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    failed = {"library": "mpich", "in_place": True, "failure": "no MPICH in <there>"}
    data, out = record(), tmp_path / "page.html"
    data["shoal"]["points"][0]["libraries"].append(failed)
    assert main(["report", str(file(data)), "--out", str(out)]) == 0
    page = out.read_text()
    for mark in ("src=", 'href="http', "@import", "<script", "url(http"):
        assert mark not in page
    assert page.count("<svg") == 3
    for number in ("105 ms", "100%", "2.00x"):
        assert number in page
    assert "no MPICH in &lt;there&gt;" in page
    assert "shoal bench &lt;all&gt;" in page
    names = [f"page-all_reduce-float-sum-in-place-{n}.png" for n in ("time", "bandwidth", "ratio")]
    assert sorted(p.name for p in tmp_path.glob("*.png")) == sorted(names)
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in names)
    assert capsys.readouterr().out.count("wrote ") == 4


@needs_matplotlib
@pytest.mark.parametrize(("more", "n_calls"), [({"nwrong": 4, "ratio": None}, 6), ({}, 4)])
def test_no_ratio_is_shown_of_wrong_results_or_of_fewer_than_five_calls(
    file: Callable[..., Path], tmp_path: Path, more: dict[str, Any], n_calls: int
) -> None:
    data = record()
    del data["shoal"]["points"][1:]  # a single size is drawn, too
    ours, theirs = data["shoal"]["points"][0]["libraries"]
    theirs.update(more)
    for one in (ours, theirs):
        one["per_iter"]["times_us"] = [1.0] * n_calls
    assert main(["report", str(file(data)), "-o", str(tmp_path / "p.html"), "--no-png"]) == 0
    page = (tmp_path / "p.html").read_text()
    assert page.count("<svg") == 2
    assert "2.00x" not in page
    assert ("<tr class=wrong" in page) == bool(more)


@needs_matplotlib
def test_files_share_pictures_and_keep_their_names(
    file: Callable[..., Path], tmp_path: Path
) -> None:
    files = [str(file(name=f"{name}.json")) for name in ("before", "a$ft$er")]
    pages = []
    for _ in range(2):
        assert main(["report", *files, "-o", str(tmp_path / "p.html"), "--no-png"]) == 0
        pages.append((tmp_path / "p.html").read_text())
    page, again = pages
    assert page == again
    assert page.count("<svg") == 3
    assert list(tmp_path.glob("*.png")) == []
    for label in ("shoal, before", "gloo, a$ft$er", "the line (TCP), before"):
        assert label in page
