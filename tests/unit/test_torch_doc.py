"""docs/torch.md lists the status of exactly the functions of torch.distributed."""

import inspect
import re
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from shoal.frontend.torch.operations import Operations
from shoal.frontend.torch.process_group import ShoalProcessGroup

ROOT = Path(__file__).parents[2]
# The versions of torch that added functions of the table, after 2.11.
SINCE = {"record_comm": (2, 12), "all_gather_single": (2, 13), "reduce_scatter_single": (2, 13)}
SINCE |= dict.fromkeys(
    ("gather_into_tensor", "gather_single", "get_backend_impl", "set_timeout"), (2, 14)
)
ROW = re.compile(r"^\| `(\w+)` \| ([\w' ]+) \| (.*)\|$", re.MULTILINE)


def functions() -> dict[str, tuple[str, str]]:
    """Return status and remark by name, from the lists and the table."""
    text = (ROOT / "docs" / "torch.md").read_text()
    page = text[text.index("## Functions") : text.index("## Layers")]
    rows = ROW.findall(page)
    for start, status in (
        ("**Works without remarks:**", "works"),
        ("**torch's own**", "torch's own"),
    ):
        names = re.findall(r"`(\w+)`", page[page.index(start) :].partition(".")[0])
        rows += [(name, status, "") for name in names]
    assert len({name for name, _, _ in rows}) == len(rows), "a function is named twice"
    return {name: (status, remark.strip()) for name, status, remark in rows}


def test_the_page_lists_exactly_the_functions_of_torch() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # reading some attributes warns
        there = {
            name
            for name in dir(dist)
            if not name.startswith("_") and inspect.isfunction(getattr(dist, name))
        }
    version = tuple(map(int, torch.__version__.split(".")[:2]))
    assert there == {name for name in functions() if SINCE.get(name, (2, 11)) <= version}


@pytest.mark.parametrize("name", ["monitored_barrier", "split_group"])
def test_functions_that_torch_refuses_exist_on_the_group(name: str) -> None:
    assert callable(getattr(ShoalProcessGroup, name))
    assert hasattr(Operations, "monitored_barrier")
    assert f"group.{name}(" in functions()[name][1]
