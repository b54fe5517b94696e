"""`shoal plan --model-bytes`: the steps of a training, by what gradients travel as."""

from __future__ import annotations

import json
from typing import Any

import pytest

from shoal.cli import main

MB = 1_000_000
# A NIC so slow, and cores so fast, that bytes alone count.
SLOW = "--link 1Gb,0us,0us --memory 1000TB --stack 1000TB --fresh 1000TB"


def planned(capsys: pytest.CaptureFixture[str], words: str) -> dict[str, Any]:
    assert main(["plan", *words.split(), "--json"]) == 0
    data: dict[str, Any] = json.loads(capsys.readouterr().out)
    return data | {"ways": {way["name"]: way for way in data["ways"]}}


def test_bytes_follow_from_the_bits_of_an_element(capsys: pytest.CaptureFixture[str]) -> None:
    alone, served = (
        planned(capsys, f"--workers 8 {more} --model-bytes 400MB --step 300ms --link 1Gb")
        for more in ("", "--servers 8")
    )
    n = 100 * MB  # elements
    chunk = 1 + 41 * 12 / 8 + 41  # 1 % of 4,096, with a scale, rounded up to whole bytes
    bits = {
        "float32": 32,
        "bf16": 16,
        "fp16": 16,
        'ErrorFeedback("mxfp8")': 8.25,
        'ErrorFeedback("mxint8")': 8.25,
        'ErrorFeedback("mxfp4")': 4.25,
        "ChunkTopK(0.01, 8)": 8 * (chunk + 0.5) / 4096,
        "DiLoCo, H = 100": 0.32,
        "DiLoCo, H = 100, mxfp4": 0.0425,
    }
    for name, each in bits.items():
        n_bytes = n * each / 8
        assert alone["ways"][name]["sent_bytes"] == pytest.approx(2 * 7 / 8 * n_bytes, rel=0.001)
        assert served["ways"][name]["sent_bytes"] == pytest.approx(n_bytes, rel=0.001)
    assert alone["ways"]["float32"]["sent_bytes"] == pytest.approx(700 * MB, rel=1e-5)


def test_a_step_is_as_long_as_its_bytes_on_a_slow_link(capsys: pytest.CaptureFixture[str]) -> None:
    words = f"--workers 2 --model-bytes 500MB --step 300ms --steps 3600 {SLOW}"
    ways = planned(capsys, words)["ways"]
    # Two workers send 500 MB each at 125 MB/s, after the forward pass and the first buffer.
    assert ways["float32"]["averaging_us"] == pytest.approx(4e6, rel=0.01)
    assert ways["float32"]["step_us"] == pytest.approx(4.1e6, rel=0.03)
    assert ways["float32"]["hours"] == pytest.approx(4.1, rel=0.03)
    assert ways["float32"]["sent_in_all_bytes"] == pytest.approx(1.8e12, rel=0.001)
    assert ways["DiLoCo, H = 100"]["step_us"] == pytest.approx(0.34e6, rel=0.01)
    assert not ways["float32"]["below_computing"]
    assert ways["DiLoCo, H = 100"]["below_computing"]
    ways = planned(capsys, f"{words} --every 400")["ways"]
    assert ways["DiLoCo, H = 400"]["step_us"] == pytest.approx(0.31e6, rel=0.01)


def test_advice_is_to_send_no_less_than_computing_hides(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--workers 8 --model-bytes 100MB --link 10Gb --step "
    assert planned(capsys, words + "3s")["advice"].startswith("do not compress: averaging float32")
    wide, narrow = (planned(capsys, words + step) for step in ("3s", "150ms"))
    assert wide["ways"]["float32"]["below_computing"]
    assert narrow["advice"].startswith("bf16 is enough: float32 adds ")
    advice = planned(capsys, words.replace("10Gb", "100Mb") + "150ms")["advice"]
    assert advice.startswith("no average of gradients is hidden: float32 adds ")
    assert "DiLoCo, H = 100" in advice


def test_servers_and_codecs_shorten_a_step(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--workers 8 --model-bytes 500MB --step 300ms --link 1Gb"
    alone, served = planned(capsys, words)["ways"], planned(capsys, words + " --servers 8")["ways"]
    names = ["float32", "bf16", 'ErrorFeedback("mxfp8")', 'ErrorFeedback("mxfp4")']
    for ways in (alone, served):
        steps = [ways[name]["step_us"] for name in names]
        assert steps == sorted(steps, reverse=True)
    assert all(served[name]["step_us"] < alone[name]["step_us"] for name in names)


def test_a_table_has_a_row_for_each_way(capsys: pytest.CaptureFixture[str]) -> None:
    words = "plan --workers 8 --workers-per-host 4 --link 25Gb --model-bytes 500MB --step 300ms"
    assert main(words.split()) == 0
    out = capsys.readouterr().out
    assert out.startswith("10,000 steps of 8 workers: 477 MiB of gradients, 300 ms of computing")
    # Each of two hosts sends the 500 MB once: a quarter for each of its workers.
    row = next(line for line in out.splitlines() if line.strip().startswith("float32"))
    assert row.split()[1:3] == ["119", "MiB"]
    assert "below computing" in row
    assert "do not compress" in out
