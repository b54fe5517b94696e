"""Run each example of examples/frameworks over Gloo and over shoal, and compare the losses.

Then run the tests of the front ends that need a framework, which the suite skips.

`make test-frameworks` calls it. Each framework gets a separate environment, which sees torch and
shoal in the environment of the Python that runs this. It prints the rows of docs/frameworks.md.
"""

import argparse
import math
import os
import re
import statistics
import subprocess
import sys
import sysconfig
import time
import venv
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples" / "frameworks"
DIGITS = 6  # digits of equal losses; sums in another order differ in float32's seventh
TIMEOUT_S = 300
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4")
RESTART = (*TORCHRUN, "--max-restarts", "1")


@dataclass(frozen=True)
class Example:
    """A program in examples/frameworks, and how to start it."""

    name: str  # without `with_`
    packages: tuple[str, ...]  # pip's; the first is the framework, whose version is shown
    launch: tuple[str, ...] = TORCHRUN  # the arguments of Python before the program
    options: tuple[str, ...] = ()  # of the program over shoal; Gloo's run has none

    @property
    def title(self) -> str:
        return " ".join([self.name, *self.options])

    @property
    def framework(self) -> str:
        return self.packages[0].partition("[")[0] if self.packages else "torch"


RUNS = [
    Example("torchrun", ()),
    Example("torchrun", (), RESTART, ("--kill", "2")),
    Example("accelerate", ("accelerate",)),
    Example("transformers", ("transformers", "accelerate")),
    Example("lightning", ("lightning",)),
    Example("fabric", ("lightning",), ()),
    Example("ignite", ("pytorch-ignite",)),
    Example("deepspeed", ("deepspeed",)),
    Example("ray", ("ray[train]",), ()),
    Example("ray", ("ray[train]",), (), ("--kill", "2")),
    Example("torchx", ("torchx",), ()),
    Example("torchft", ("torchft",), ()),
    Example("torchft", ("torchft",), (), ("--kill", "2")),
]

# Tests that need a framework: tests/process/test_NAME.py.
TESTS = {"jax": ("jax",), "tensorflow": ("tensorflow-cpu",), "torchft": ("torchft",)}


class Environment:
    """An environment with the packages of an example, and those of this Python."""

    def __init__(self, folders: Path, example: Example) -> None:
        folder = folders.absolute() / example.framework
        self.python = folder / "bin" / "python"
        if not self.python.exists():
            venv.create(folder, symlinks=True)
        [self.site] = folder.glob("lib/python*/site-packages")
        (self.site / "shoal.pth").write_text(sysconfig.get_path("purelib"))
        if example.packages:
            pip = [sys.executable, "-m", "pip", "--python", str(self.python), "install", "--quiet"]
            subprocess.run([*pip, *example.packages], check=True)

    def version(self, package: str) -> str:
        """Return the version of a package, here or in this Python's environment."""
        paths = [str(self.site), *sys.path]
        return next(iter(metadata.distributions(name=package, path=paths))).version

    def run(self, example: Example, backend: str) -> tuple[str, float]:
        """Run an example; return the loss and the seconds that it prints."""
        program = EXAMPLES / f"with_{example.name}.py"
        options = example.options if backend == "shoal" else ()
        command = [*example.launch, str(program), "--backend", backend, *options]
        with_torchrun = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        environ = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PATH": with_torchrun}
        argv, env = [str(self.python), *command], {**os.environ, **environ}
        to = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        done = subprocess.run(argv, env=env, **to, text=True, timeout=TIMEOUT_S, check=False)
        found = set(re.findall(rf"{backend}: loss (\S+) after (\S+) s", done.stdout))
        if done.returncode != 0 or len(found) != 1:
            sys.exit(f"{done.stdout}\n{example.title} over {backend}: status {done.returncode}")
        [(loss, seconds)] = found
        return loss, float(seconds)


def equal_digits(one: float, other: float) -> float:
    """Return how many leading decimal digits two losses share; infinity if they are equal."""
    return math.inf if one == other else math.floor(-math.log10(abs(one - other) / abs(other)))


def passes_tests(name: str, environment: Environment) -> bool:
    """Run the tests of a front end; True if all pass."""
    tests = EXAMPLES.parents[1] / "tests" / "process" / f"test_{name}.py"
    command = [str(environment.python), "-m", "pytest", "-q", str(tests)]
    return subprocess.run(command, check=False).returncode == 0


def compare_losses(example: Example, environment: Environment) -> bool:
    """Print an example's row of losses; return True if they agree."""
    losses = [environment.run(example, backend)[0] for backend in ("gloo", "shoal")]
    equal = equal_digits(*map(float, losses))
    version = environment.version(example.framework)
    shown = "all" if equal == math.inf else str(equal)
    print(f"| {example.title} | {version} | {' | '.join(losses)} | {shown} |", flush=True)
    return equal >= DIGITS


def compare_times(example: Example, environment: Environment, n_pairs: int) -> None:
    """Print an example's row of seconds, from pairs of runs whose order alternates."""
    seconds: dict[str, list[float]] = {"gloo": [], "shoal": []}
    for pair in range(n_pairs):
        for backend in ("gloo", "shoal")[:: -1 if pair % 2 else 1]:
            seconds[backend].append(environment.run(example, backend)[1])
    ratios = [ours / theirs for theirs, ours in zip(seconds["gloo"], seconds["shoal"], strict=True)]
    shown = [f"{statistics.median(values):.3f}" for values in seconds.values()]
    shown += [f"{pick(ratios):.2f}" for pick in (statistics.median, min, max)]
    print(f"| {example.title} | {' | '.join(shown)} |", flush=True)


def main() -> None:
    """Run the requested examples, or all; exit with 1 if losses differ."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--environments", type=Path, default=Path(".venv-frameworks"))
    parser.add_argument("--pairs", type=int, default=0, help="measure pairs of runs instead")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no example later")
    parser.add_argument("names", nargs="*", help="examples to run; all if none is given")
    args = parser.parse_args()
    started_s = time.monotonic()
    if args.pairs:
        print("| example | Gloo, s | shoal, s | shoal/Gloo | least | most |")
        print("|---|---|---|---|---|---|", flush=True)
    else:
        print("| example | version | loss over Gloo | over shoal | equal digits |")
        print("|---|---|---|---|---|", flush=True)
    differ = []
    for example in RUNS:
        if args.names and example.name not in args.names:
            continue
        environment = Environment(args.environments, example)
        if args.pairs and not example.options and time.monotonic() - started_s < args.seconds:
            compare_times(example, environment, args.pairs)
        elif not args.pairs and not compare_losses(example, environment):
            differ.append(example.title)
    for name, packages in TESTS.items():
        if not args.pairs and (not args.names or name in args.names):
            environment = Environment(args.environments, Example(name, packages))
            print(f"{name} {environment.version(packages[0])}", flush=True)
            if not passes_tests(name, environment):
                sys.exit(f"tests/process/test_{name}.py fails")
    if differ:
        sys.exit(f"losses differ before digit {DIGITS}: {', '.join(differ)}")


if __name__ == "__main__":
    main()
