"""PyTorch's own DDP cases, from its wheel, pass with shoal's wrapper in place of torch's.

They take two minutes: `SHOAL_SOAK=1` runs them, as `make test-soak` does. The random programs of
test_torch_ddp_fuzz.py, which always run, compare both wrappers too. The wheel has no
DistributedDataParallelTest; test_torch_ddp.py and others cover its cases.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import pytest
import torch
from process import ddp_suite
from process.ranks import run_ranks

_SYNC_BN: Final = "torch refuses SyncBatchNorm on the CPU, by any wrapper"
_MIXED: Final = "mixed_precision is refused; autocast does on the CPU what it is for"
_TIMES: Final = "asks for the times that torch's C++ logger takes"

CANNOT_PASS: Final = {
    f"test_DistributedDataParallel_SyncBatchNorm{kind}": _SYNC_BN
    for kind in (
        *("", "_2D_Input", "_Channels_Last", "_Diff_Input_Sizes_Running_Value", "_half"),
        *("_Diff_Input_Sizes_gradient", "_No_Affine", "_Single_Input_Per_Process"),
    )
} | {
    "test_ddp_inference": _SYNC_BN,
    "test_ddp_uneven_inputs_stop_iteration_sync_bn": _SYNC_BN,
    "test_sync_bn_logged": _SYNC_BN,
    "test_ddp_native_mixed_precision_grad_as_bucket_view_no_set_grad_none": _MIXED,
    "test_ddp_native_mixed_precision_grad_as_bucket_view_set_grad_to_none": _MIXED,
    "test_ddp_native_mixed_precision_ignored_params": _MIXED,
    "test_ddp_native_mixed_precision_no_grad_as_bucket_view_no_set_grad_none": _MIXED,
    "test_ddp_native_mixed_precision_no_grad_as_bucket_view_set_grad_to_none": _MIXED,
    "test_ddp_logging_data_cpu": _TIMES,
    "test_ddp_logging_data_gpu": _TIMES,
    "test_ddp_bucket_cap_mb_list": "bucket_cap_mb_list is refused: fusion buffers are equal",
    "test_ddp_device": "asks for a GPU's number; fails with torch's wrapper on a CPU too",
    "test_ddp_hook_pickling_powerSGD": "loads what torch.load refuses, by any wrapper",
    "test_ddp_profiling_torch_profiler": "looks for the names that torch's reducer gives to ranges",
    "test_stateless_api_with_ddp": "trains other parameters on each rank alone, which is refused",
    "test_ddp_static_graph_nested_types": "wraps a model that is wrapped, which is refused",
}

# Not run: its convolution over a million pixels would take minutes of a CPU.
_TOO_LONG: Final = "test_ddp_uneven_inputs"


def run(names: list[str], directory: str) -> dict[str, str]:
    return ddp_suite.run_cases(names, directory, "shoal", "shoal")


def failed(outcomes: list[dict[str, str]]) -> dict[str, str]:
    """Return the cases that failed on some rank, with the reason."""
    return {
        name: outcome
        for by_name in outcomes
        for name, outcome in by_name.items()
        if outcome.startswith("failed")
    }


@pytest.mark.skipif(not os.environ.get("SHOAL_SOAK"), reason="soak: two minutes")
def test_only_the_listed_cases_of_torchs_own_ddp_fail(tmp_path: Path) -> None:
    names = [name for name in ddp_suite.case_names() if name != _TOO_LONG]
    outcomes = run_ranks(run, 2, names, str(tmp_path), deadline_s=570)
    found = failed(outcomes)
    assert {name: found[name] for name in found.keys() - CANNOT_PASS.keys()} == {}
    missing = CANNOT_PASS.keys() - found.keys()
    if torch.__version__.startswith("2.13"):  # other versions lack some of them
        assert missing == set()
        assert sum(outcome == "passed" for outcome in outcomes[0].values()) >= 55
