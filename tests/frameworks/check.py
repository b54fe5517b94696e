"""Runs each example of examples/frameworks over Gloo and over shoal, and compares the losses.

Then runs the tests of the front ends for arrays, each with its framework, which the suite skips.

`make test-frameworks` calls it. Each framework gets an environment of its own, which sees torch and
shoal in .venv. Prints the rows of the table in docs/frameworks.md.
"""

import argparse
import math
import os
import re
import subprocess
import sys
import sysconfig
import venv
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples" / "frameworks"
DIGITS = 6  # in which the losses have to agree; sums of other order differ in float32's seventh
TIMEOUT_S = 300
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4")


@dataclass(frozen=True)
class Example:
    """A program in examples/frameworks, and how to start it.

    Args:
        name: the program's name without `with_`.
        environment: the framework's environment in ENVIRONMENTS.
        launch: the arguments of Python before the program.
    """

    name: str
    environment: str
    launch: tuple[str, ...] = TORCHRUN

    def command(self, python: Path, backend: str) -> list[str]:
        """Return the command that runs the example over a backend."""
        return [
            *(str(python), *self.launch, str(EXAMPLES / f"with_{self.name}.py")),
            *("--backend", backend),
        ]


# What pip installs into each environment. The first is the framework, whose version is shown.
ENVIRONMENTS = {
    "accelerate": ["accelerate", "transformers"],
    "jax": ["jax"],
    "tensorflow": ["tensorflow-cpu"],
}
RUNS = [
    Example("accelerate", "accelerate"),
    Example("transformers", "accelerate"),
]

ARRAYS = ("jax", "tensorflow")  # their examples compare two ranks with one


def make_environment(folder: Path, packages: list[str]) -> Path:
    """Return the Python of an environment with the packages; it sees those of this one."""
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, symlinks=True)
        [site] = folder.glob("lib/python*/site-packages")
        (site / "shoal.pth").write_text(sysconfig.get_path("purelib"))
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
    subprocess.run([*pip, *packages], check=True)
    return python


def run(example: Example, python: Path, backend: str) -> tuple[str, str]:
    """Run an example; return its loss and its seconds, as printed."""
    done = subprocess.run(
        example.command(python, backend),
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    found = re.findall(rf"{backend}: loss (\S+) after (\S+) s", done.stdout)
    if done.returncode != 0 or len(found) != 1:
        sys.exit(f"{done.stdout}\n{example.name} over {backend}: status {done.returncode}")
    loss, seconds = found[0]
    return loss, seconds


def passes_tests(name: str, python: Path) -> bool:
    """Run the tests of a front end for arrays; True if all pass."""
    tests = EXAMPLES.parents[1] / "tests" / "process" / f"test_{name}.py"
    done = subprocess.run([str(python), "-m", "pytest", "-q", str(tests)], check=False)
    return done.returncode == 0


def digits(one: float, other: float) -> float:
    """Return in how many decimal digits two losses agree; infinity if they are equal."""
    return math.inf if one == other else -math.log10(abs(one - other) / abs(other))


def version(name: str, folder: Path) -> str:
    """Return the version of a package in an environment."""
    paths = [str(site) for site in folder.glob("lib/python*/site-packages")]
    [found] = list(metadata.distributions(name=name, path=paths))[:1]
    return found.version


def main() -> None:
    """Run the examples that were asked for, or all; exit with 1 if losses differ."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--environments", type=Path, default=Path(".venv-frameworks"))
    parser.add_argument("names", nargs="*", help="examples to run; all if none is given")
    args = parser.parse_args()
    failed = []
    print("| example | version | loss over Gloo | over shoal | equal digits |")
    print("|---|---|---|---|---|", flush=True)
    for example in RUNS:
        if args.names and example.name not in args.names:
            continue
        folder = (args.environments / example.environment).absolute()
        python = make_environment(folder, ENVIRONMENTS[example.environment])
        losses = [run(example, python, backend)[0] for backend in ("gloo", "shoal")]
        equal = digits(*map(float, losses))
        if equal < DIGITS:
            failed.append(example.name)
        shown = f"{example.name} | {version(example.name, folder)} | {' | '.join(losses)}"
        print(f"| {shown} | {'all' if equal == math.inf else int(equal)} |", flush=True)
    for name in ARRAYS:
        if not args.names or name in args.names:
            folder = (args.environments / name).absolute()
            python = make_environment(folder, ENVIRONMENTS[name])
            print(f"{name} {version(ENVIRONMENTS[name][0], folder)}", flush=True)
            if not passes_tests(name, python):
                sys.exit(f"tests/process/test_{name}.py fails")
    if failed:
        sys.exit(f"losses differ before digit {DIGITS}: {', '.join(failed)}")


if __name__ == "__main__":
    main()
