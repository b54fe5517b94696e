"""Imports point one way: the rooms of src/shoal and native, and the imports allowed to each."""

import ast
import re
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import shoal

# The source or its installed copy, whichever the other tests run.
ROOT = Path(shoal.__file__).parent

# A room may import itself and these. Every room may use `errors`, `dtypes`, `codec` and `limits`,
# except where WITHOUT_WORDS forbids it.
WORDS = {"errors", "dtypes", "codec", "limits"}
WITHOUT_WORDS = {*WORDS, "lazy", "schedule"}
LOWER = {
    "errors": set[str](),
    "lazy": set[str](),
    "dtypes": {"errors"},
    "codec": {"errors"},
    "limits": {"_native"},
    "threads": {"errors"},
    "schedule": {"errors", "lazy"},
    "analysis": {"schedule", "plan", "shapes"},
    "plan": {"schedule", "settings"},
    "shapes": {"schedule"},
    "engine": {"schedule", "shapes", "_native"},
    "rendezvous": {"engine", "settings", "threads"},
    "settings": set[str](),
    "state": {"engine", "plan", "rendezvous", "threads"},
    "group": {"lazy", "schedule", "plan", "engine", "shapes", "rendezvous", "settings", "state"},
    "tune": {"schedule", "group", "plan"},
    "average": {"group", "plan", "engine", "threads"},
    "server": {"group", "plan", "engine", "rendezvous", "state"},
    "frontend": {"schedule", "group", "average", "rendezvous", "settings", "threads"},
    "launch": {"group", "rendezvous", "settings", "frontend"},
    "_autoload": {"frontend", "lazy"},
    "torch": {"_autoload", "frontend", "lazy"},
    "accelerate": {"frontend", "torch"},
    "jax": {"frontend"},
    "tensorflow": {"frontend"},
}
LOWER["group"].add("threads")
# These combine all rooms, so they may import everything but the native library.
TOP = {"__init__", "cli", "bench", "check", "lab", "__main__"}

# Rooms that may import a framework; bench measures frameworks side by side.
FRAMEWORKS = {"torch", "jax", "tensorflow", "keras", "mxnet", "accelerate", "torchft"}
FRAMEWORK_USERS = {"frontend", "_autoload", "torch", "accelerate", "bench", "cli"}


def modules() -> list[str]:
    return sorted(str(path.relative_to(ROOT)) for path in ROOT.rglob("*.py"))


def room_of(module: str) -> str:
    """Return the first part of a path below src/shoal: "schedule" of "schedule/steps.py"."""
    return Path(module).parts[0].removesuffix(".py")


def imported(module: str, source: str) -> Iterator[str]:
    """Return the absolute names of all imported modules, also inside functions."""
    package = ("shoal", *Path(module).parts[:-1])
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else ()
            origin = ".".join((*base, *filter(None, [node.module])))
            # `from shoal import plan` names a room; in deeper imports the origin does.
            yield from (f"shoal.{a.name}" if origin == "shoal" else origin for a in node.names)


def faults(module: str, source: str) -> list[str]:
    """Return the imports that point the wrong way."""
    room = room_of(module)
    own = LOWER.get(room, set()) | (set() if room in WITHOUT_WORDS else WORDS) | {room}
    wrong = []
    for name in imported(module, source):
        first, *rest = name.split(".")
        if first == "shoal":
            lower = rest[0] if rest else "__init__"
            right = lower in own or (room in TOP and lower != "_native")
        elif first in FRAMEWORKS:
            right = room in FRAMEWORK_USERS
        else:
            right = room != "schedule" or first in sys.stdlib_module_names
        if not right:
            wrong.append(f"{module} imports {name}")
    return wrong


def test_imports_point_one_way() -> None:
    rooms = {room_of(module) for module in modules()}
    assert rooms <= LOWER.keys() | TOP, "give the new room its line in LOWER"
    wrong = [fault for module in modules() for fault in faults(module, (ROOT / module).read_text())]
    assert wrong == []


NATIVE = Path(__file__).parents[2] / "native"
NATIVE_LOWER = {"base": set[str](), "fold": {"base"}, "transport": {"base"}}
NATIVE_LOWER |= {"engine": {*NATIVE_LOWER}, "bind": {*NATIVE_LOWER, "engine"}}


def included(path: Path) -> list[str]:
    return re.findall(r'^#include "(.*)"', path.read_text(), re.MULTILINE)


def test_native_rooms_include_one_way() -> None:
    rooms = {path.name for path in NATIVE.iterdir() if path.is_dir()}
    assert rooms == NATIVE_LOWER.keys() | {"test"}
    wrong = [
        f"{path.name} includes {other}"
        for room, lower in NATIVE_LOWER.items()
        for path in sorted((NATIVE / room).rglob("*.*"))
        for other in included(path)
        if other.split("/")[0] not in lower | {room}
    ]
    assert wrong == []


def test_only_the_list_of_transports_knows_the_kinds_of_links() -> None:
    kinds = {path.stem for path in (NATIVE / "transport").glob("*_link.h")}
    kinds -= {"path_link"}  # shared code of links over paths
    assert "tcp_link" in kinds
    users = {
        (path.stem, Path(other).stem)
        for path in NATIVE.rglob("*.*")
        if path.parent.name != "test" and not path.stem.startswith("fake_")
        for other in included(path)
        if Path(other).stem in kinds
    }
    assert users <= {(user, kind) for kind in kinds for user in (kind, "transport")}


def test_native_waits_do_not_use_the_settable_wall_clock() -> None:
    wall = re.compile(r"CLOCK_REALTIME|system_clock|mutex_timedlock|gettimeofday")
    assert [path.name for path in NATIVE.rglob("*.*") if wall.search(path.read_text())] == []


def test_files_of_the_engine_include_one_way() -> None:
    # A class lives in one pair of files. The progress thread and its parts count as one.
    includes = dict[str, set[str]]()
    for path in (NATIVE / "engine").glob("*/*"):
        stem, *names = (
            name.replace("progress_thread", "channel")
            for name in (path.stem, *re.findall(r'"engine/\w+/(\w+)\.h"', path.read_text()))
        )
        includes.setdefault(stem, set()).update({*names} - {stem})
    TopologicalSorter(includes).prepare()  # a CycleError names the files of a circle
