"""Run a function in several real processes, one per rank, and collect the results.

    from process.ranks import run_ranks

    def my_rank(length: int) -> float:      # module-level; RANK and WORLD_SIZE are in os.environ
        with shoal.init() as group: ...

    def test_sums_are_equal() -> None:
        assert run_ranks(my_rank, 3, 1000) == [6.0, 6.0, 6.0]

Every rank starts without shoal loaded (see `warm`) and imports the file of the function, so keep
heavy imports out of the top of a test file whose ranks do not need them. Its environment is that of
torchrun: RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT. Arguments,
return values and exceptions are pickled; they may not be of classes that the test file defines.

A thread that adds work must wake the thread that sleeps: a rank fails if a timer found work.

A rank that runs past the deadline prints the stack of each thread and is killed, so no test hangs
and no process outlives its test. To kill or stop ranks, use `start_ranks`: it provides the process
ids at once and an Outcome for each rank later. To die at an exact moment, a rank calls
`os.kill(os.getpid(), signal.SIGKILL)`; `run_survivors` returns the results of the others.

Starting a process costs 0.1 s: do many checks inside one run, or use the fixture `forked` (see
`FileRanks`), whose ranks are forked once for all calls of a test file. They run a test that checks
its results on each rank:

    @on_ranks(3)
    def test_sums_are_equal() -> None:
        with shoal.init() as group: ...
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib.util
import inspect
import io
import os
import pickle
import random
import resource
import secrets
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import IO, Any

if not __package__:  # run by its path, as a rank
    sys.path.insert(0, str(Path(__file__).parents[1]))

from process.warm import N_FORKERS, end_fork, fork_ranks, forker_for

# Sleeping threads look for work by themselves only this late, so unannounced work is very late,
# and a rank that finds such work fails.
_BACKSTOP_MS = 10_000

# Modules that ranks find imported: the heaviest outside shoal. DDP and optimizers load
# torch._dynamo, which takes 1.5 s.
_IMPORTED = {
    "numpy": "numpy pytest",
    "torch": "numpy pytest torch torch.distributed torch._dynamo",
}

# Seconds in which a rank may print its stacks before it is killed.
_LAST_WORDS_S = 5.0


@dataclass(frozen=True)
class Outcome:
    """How one rank ended: `error` if it raised, `died` if it neither raised nor returned."""

    rank: int
    value: Any = None
    error: BaseException | None = None
    died: str = ""
    output: str = ""

    def __str__(self) -> str:
        ended = self.died or (f"raised {self.error!r}" if self.error else f"returned {self.value}")
        return f"rank {self.rank} {ended}\n{self.output}"


class Ranks:
    """Running ranks. Leaving the context kills the ranks that still run.

    After an error of the test itself, such as a cue that did not come, leaving prints how each
    rank ended, or the stack of a rank that still ran.
    """

    def __init__(self, processes: list[_Process]) -> None:
        self._processes = processes

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, _class: object, error: BaseException | None, _trace: object) -> None:
        if error is not None and not isinstance(error, AssertionError):
            sys.stderr.writelines(f"{outcome}\n" for outcome in self.wait(0.0))
        self.end()

    def end(self) -> None:
        """Kill the ranks that still run."""
        for process in self._processes:
            process.end()

    def pid(self, rank: int) -> int:
        """Return the process id of a rank, for os.kill."""
        return self._processes[rank].child.pid

    def await_end(self, rank: int) -> None:
        """Wait until this rank has ended, in any way."""
        self._processes[rank].child.ends_within(None)

    def has_ended(self, rank: int) -> bool:
        return self._processes[rank].ends_by(0.0)

    def wait(self, deadline_s: float = 60.0) -> list[Outcome]:
        """Return every rank's outcome. Kill ranks that still run after this time."""
        until = time.monotonic() + deadline_s
        late = [process for process in self._processes if not process.ends_by(until)]
        # All at once, so that each stack shows what its rank really waited for.
        for process in late:
            process.child.signal(signal.SIGCONT)
            process.child.signal(signal.SIGABRT)
        for process in late:
            process.ends_by(time.monotonic() + _LAST_WORDS_S)
            process.end()
        died = f"was killed: it still ran after {deadline_s:g} s"
        return [process.outcome(died if process in late else "") for process in self._processes]

    def values(self, deadline_s: float = 60.0) -> list[Any]:
        """Return every rank's result; AssertionError if a rank raised, died or hung."""
        return _values(self.wait(deadline_s))

    def outputs(self, deadline_s: float = 60.0) -> list[str]:
        """Return what every rank has printed; AssertionError as for `values`."""
        outcomes = self.wait(deadline_s)
        _values(outcomes)
        return [outcome.output for outcome in outcomes]

    def survivors(self, *victims: int, deadline_s: float = 60.0) -> list[Any]:
        """Return the results of the ranks that do not kill themselves, as these victims must."""
        outcomes = self.wait(deadline_s)
        for victim in victims:
            assert outcomes[victim].died == "was killed by SIGKILL", "\n".join(map(str, outcomes))
        return _values([outcome for outcome in outcomes if outcome.rank not in victims])


def run_ranks(
    function: Callable[..., Any],
    size: int,
    *args: Any,
    env: Mapping[str, str] | None = None,
    deadline_s: float = 60.0,
) -> list[Any]:
    """Run function(*args) in `size` processes.

    Args:
        function: module-level.
        env: overrides this process's environment and the variables of torchrun.

    Returns:
        The results, by rank.

    Raises:
        AssertionError: a rank raised, died or hung. Names every such rank, with its output.
    """
    with start_ranks(function, size, *args, env=env) as ranks:
        return _values(ranks.wait(deadline_s))


def run_survivors(
    function: Callable[..., Any],
    size: int,
    victim: int | tuple[int, ...],
    *args: Any,
    env: Mapping[str, str] | None = None,
    deadline_s: float = 60.0,
) -> list[Any]:
    """Run ranks like `run_ranks`; one or some kill themselves. Return the results of the others.

    Raises:
        AssertionError: a victim ended in another way, or another rank raised, died or hung.
    """
    victims = victim if isinstance(victim, tuple) else (victim,)
    with start_ranks(function, size, *args, env=env) as ranks:
        return ranks.survivors(*victims, deadline_s=deadline_s)


def _values(outcomes: list[Outcome]) -> list[Any]:
    failed = [outcome for outcome in outcomes if outcome.error or outcome.died]
    if failed:
        report = "\n".join(map(str, failed))
        raise AssertionError(f"{len(failed)} of {len(outcomes)} ranks failed:\n{report}")
    return [outcome.value for outcome in outcomes]


def start_ranks(
    function: Callable[..., Any],
    size: int,
    *args: Any,
    env: Mapping[str, str] | None = None,
    needs: str = "",
) -> Ranks:
    """Start ranks like `run_ranks`, without waiting: use it as a context manager.

    Args:
        needs: as for `start_process`; by default "torch" if the function's file imports it.
    """
    task, modules = _task(function, args), _IMPORTED[needs] if needs else _modules_of(function)
    processes: list[_Process] = []
    ranks = Ranks(processes)
    with contextlib.ExitStack() as on_error:
        on_error.push(ranks)
        for rank, own in enumerate(_environments(size)):
            whole = {**os.environ, **own, **(env or {})}
            processes.append(_Process(rank, task, whole, modules))
        on_error.pop_all()
    return ranks


def _modules_of(function: Callable[..., Any]) -> str:
    return _IMPORTED["torch" if "torch" in function.__globals__ else "numpy"]


def _environments(size: int) -> list[dict[str, str]]:
    """Return the variables of each rank of a new group."""
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "OMP_NUM_THREADS": "1",
        "SHOAL_BACKSTOP_MS": str(_BACKSTOP_MS),
    }
    return [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(size)]


class FileRanks:
    """Ranks that stay for many calls; a rank is forked before the first call that needs it.

    A call has its own environment, and changes of `os.environ` end with it. Other changes of a
    process persist for later calls. Leaving the context ends the ranks.
    """

    def __init__(self) -> None:
        self._address = f"\0shoal-test-{secrets.token_hex(8)}"
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self._address)
        self._listener.listen()
        self._processes: list[_Process] = []
        self._connections: list[Connection] = []

    def run(
        self,
        function: Callable[..., Any],
        size: int,
        *args: Any,
        env: Mapping[str, str] | None = None,
        deadline_s: float = 60.0,
    ) -> list[Any]:
        """Run function(*args) in the first `size` ranks, like `run_ranks`.

        If a rank fails, all ranks end, and the next call has new ones.
        """
        task, environments = _task(function, args), _environments(size)
        missing = range(len(self._processes), size)
        for rank in missing:
            whole = {**os.environ, **environments[rank]}
            serve = _task(serve_calls, (self._address,))
            self._processes.append(_Process(rank, serve, whole, _modules_of(function)))
        until, answers = time.monotonic() + deadline_s, {}
        self._connect(missing, until)
        for connection, own in zip(self._connections, environments, strict=False):
            connection.send_bytes(pickle.dumps({**os.environ, **own, **(env or {})}) + task)
        for rank, connection in enumerate(self._connections[:size]):
            with contextlib.suppress(EOFError, ConnectionError):
                if connection.poll(max(0.0, until - time.monotonic())):
                    # NOT by recv: for that, torch moves tensors to memory of their own.
                    answers[rank] = pickle.loads(connection.recv_bytes())
        failures = [f"rank {rank}: {error}" for rank, (_, error) in answers.items() if error]
        if len(answers) < size or failures:
            outcomes = self._end(_LAST_WORDS_S)
            raise AssertionError("\n".join([*failures, *map(str, outcomes)]))
        return [value for value, _ in answers.values()]

    def _connect(self, missing: Sequence[int], until: float) -> None:
        """Take the connections of these new ranks, or end all ranks."""
        accepted: dict[int, Connection] = {}
        for _ in missing:
            with contextlib.suppress(TimeoutError, EOFError, ConnectionError):
                self._listener.settimeout(max(0.001, until - time.monotonic()))
                connection = Connection(self._listener.accept()[0].detach())
                if connection.poll(max(0.0, until - time.monotonic())):
                    accepted[int(connection.recv_bytes())] = connection
        self._connections += [accepted[rank] for rank in sorted(accepted)]
        if lost := [rank for rank in missing if rank not in accepted]:
            outcomes = self._end(_LAST_WORDS_S)
            failures = [f"ranks {lost} did not connect in time", *map(str, outcomes)]
            raise AssertionError("\n".join(failures))

    def _end(self, deadline_s: float) -> list[Outcome]:
        for connection in self._connections:
            connection.close()
        with Ranks(self._processes) as ranks:
            outcomes = ranks.wait(deadline_s)
        self._processes, self._connections = [], []
        return outcomes

    def __enter__(self) -> FileRanks:
        return self

    def __exit__(self, *_error: object) -> None:
        self._listener.close()
        failed = [outcome for outcome in self._end(60.0) if outcome.error or outcome.died]
        assert not failed, "\n".join(map(str, failed))


def on_ranks(
    size: int | None = None, *, has_stage: bool = False, **how: Any
) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Make a test of a function that every rank of `forked` runs, and that checks its results.

    Args:
        size: of the group; by default the test's parameter of this name.
        has_stage: the ranks share a `Stage`.
        how: arguments of `FileRanks.run`.
    """

    def run(forked: FileRanks, function: Callable[..., Any], given: dict[str, Any]) -> list[Any]:
        with _arguments(how, has_stage=has_stage) as arguments:
            return forked.run(function, size or given["size"], *given.values(), **arguments)

    return as_test("forked", run)


def on_survivors(
    size: int, victim: int | tuple[int, ...] | None = None, *, has_stage: bool = False, **how: Any
) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Make a test of a function in which ranks kill themselves and the others check their results.

    Args:
        victim: one or some; by default the test's parameter of this name.
        has_stage: the ranks share a `Stage`.
        how: arguments of `run_survivors`.
    """

    def run(_none: None, function: Callable[..., Any], given: dict[str, Any]) -> list[Any]:
        one = given["victim"] if victim is None else victim
        with _arguments(how, has_stage=has_stage) as arguments:
            return run_survivors(function, size, one, *given.values(), **arguments)

    return as_test("", run)


def on_new_ranks(size: int, **how: Any) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Make a test of a function that changes its process: its ranks make no other call."""
    return on_survivors(size, (), **how)


@contextlib.contextmanager
def _arguments(how: dict[str, Any], *, has_stage: bool) -> Iterator[dict[str, Any]]:
    """Yield these arguments of a run, in whose environment there may be a stage."""
    if not has_stage:
        yield how
        return
    from process.stage import Stage  # NOT above: a rank's process begins without shoal

    with Stage() as stage:
        yield {**how, "env": {**stage.env, **how.get("env", {})}}


def as_test(
    fixture: str, run: Callable[[Any, Callable[..., Any], dict[str, Any]], list[Any]]
) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Make tests of functions that ranks run and in which all ranks return the same.

    Args:
        fixture: the name of the fixture of the ranks, or "".
        run: called with the fixture, the function and its arguments; returns the ranks' values.
    """

    def make_test(function: Callable[..., Any]) -> Callable[..., None]:
        own = inspect.signature(function).parameters

        def test(**given: Any) -> None:
            values = run(given.get(fixture), function, {name: given[name] for name in own})
            assert values == [values[0]] * len(values)

        names = [fixture, *own] if fixture else [*own]
        parameters = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names]
        test.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        test.__name__, test.__module__ = function.__name__, function.__module__
        function.__qualname__ += ".on_rank"  # where a rank finds it
        test.on_rank = function  # type: ignore[attr-defined]
        return test

    return make_test


def serve_calls(address: str) -> None:
    """On a rank of `FileRanks`: make each call in its environment, and send its result or error."""
    with Client(address, "AF_UNIX") as connection:
        connection.send_bytes(os.environ["RANK"].encode())
        while True:
            try:
                call = io.BytesIO(connection.recv_bytes())
            except (EOFError, ConnectionError):
                return
            os.environ.clear()
            os.environ.update(pickle.load(call))
            sys.path[:], file, name, args = pickle.load(call)
            print(f"call of {name}", flush=True)  # noqa: T201 - a rank that dies names it
            try:
                answer = pickle.dumps((load(file, name)(*pickle.loads(args)), ""))
            except BaseException:  # noqa: BLE001 - SystemExit too is an outcome like any other
                answer = pickle.dumps((None, traceback.format_exc()))
            connection.send_bytes(answer)
            gc.collect()  # so that a later call finds no group of this one


def start_process(
    function: Callable[..., Any], *args: Any, needs: str, number: int, env: Mapping[str, str]
) -> Ranks:
    """Run function(*args) in one process that is no rank, with exactly this environment.

    Args:
        needs: "torch" or "numpy", found imported.
        number: differs between neighbours.
    """
    return Ranks([_Process(number, _task(function, args), dict(env), _IMPORTED[needs])])


def _task(function: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    # Pickled twice: the arguments can be unpickled only after the search path is set.
    what = inspect.getfile(function), function.__qualname__, pickle.dumps(args)
    return pickle.dumps((sys.path, *what))


def warm_up() -> None:
    """Start the forkers now, for a test that counts this process's descriptors."""
    for rank in range(N_FORKERS):
        forker_for(rank, _IMPORTED["numpy"])


_given: set[int] = set()  # ports for listeners that may not have begun


def free_port() -> int:
    """Return a port without a listener, below the kernel's ephemeral ports, and another each time.

    Parallel workers of pytest use separate ports.
    """
    # Not port 0: a connection may take the kernel's port before it is used.
    n_workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    while True:
        port = random.randrange(20_000 + worker % n_workers, 32_000, n_workers)
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with contextlib.suppress(OSError):
                probe.bind(("127.0.0.1", port))
                if port not in _given:
                    _given.add(port)
                    return port


class _Process:
    """One rank's process, and the files of its output and its outcome."""

    def __init__(self, rank: int, task: bytes, env: dict[str, str], modules: str) -> None:
        self.rank = rank
        self._output: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - outcome() closes it
        self._result: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - outcome() closes it
        files = self._output.fileno(), self._result.fileno()
        self.child = forker_for(rank, modules).start(task, env, *files)

    def ends_by(self, until: float) -> bool:
        """Wait for the end of the process, or for the time `until`."""
        return self.child.ends_within(max(0.0, until - time.monotonic()))

    def end(self) -> None:
        """Kill the process if it runs."""
        self.child.signal(signal.SIGKILL)
        self.child.ends_within(None)

    def outcome(self, died: str) -> Outcome:
        with self._output, self._result:
            self._output.seek(0)
            self._result.seek(0)
            output, result = self._output.read().decode(errors="replace"), self._result.read()
        code = self.child.returncode
        if died or not result:
            killed = f"was killed by {signal.Signals(-code).name}" if code < 0 else ""
            died = died or killed or f"exited with {code}"
            return Outcome(self.rank, died=died, output=output)
        value, error = pickle.loads(result)
        died = "" if code == 0 else f"exited with {code} after its function had returned"
        return Outcome(self.rank, value, error, died, output)


def _run_one(task: IO[bytes], result_fd: int) -> None:
    """Run a rank, in its process."""
    sys.path[:], file, name, args = pickle.load(task)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    faulthandler.enable(all_threads=True)
    try:
        result = pickle.dumps((load(file, name)(*pickle.loads(args)), None))
        native = sys.modules.get("shoal._native")
        if native is not None and native.wakeups()["late"]:
            raise AssertionError(f"woken by the timer with work to do: {native.wakeups()}")
    except BaseException as error:  # noqa: BLE001 - SystemExit too is an outcome like any other
        traceback.print_exc()
        result = _dumped(error)
    with open(result_fd, "wb") as out:
        out.write(result)


def load(file: str, name: str) -> Callable[..., Any]:
    """On a rank: return the function of this name in a test file."""
    # By path: pytest's importlib mode gives test files names that cannot be imported elsewhere.
    name_in_rank = f"{Path(file).parent.name}_{Path(file).stem}_in_rank"
    spec = importlib.util.spec_from_file_location(name_in_rank, file)
    assert spec is not None
    assert spec.loader is not None
    if spec.name not in sys.modules:
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    found: Any = sys.modules[spec.name]
    for part in name.split("."):
        found = getattr(found, part)
    return found  # type: ignore[no-any-return]


def _dumped(error: BaseException) -> bytes:
    """Pickle the error, or only its text if it cannot be pickled."""
    try:
        dumped = pickle.dumps((None, error))
        pickle.loads(dumped)
    except Exception:  # noqa: BLE001 - pickling runs arbitrary code
        return pickle.dumps((None, RuntimeError(f"{type(error).__name__}: {error}")))
    return dumped


def _main(listener_fd: str, modules: str) -> None:
    # A shell's background jobs start with it ignored, and so do their children.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    task_fd, result_fd = fork_ranks(int(listener_fd), modules)
    with open(task_fd, "rb") as task:
        env = pickle.load(task)
        os.environ.clear()
        os.environ.update(env)
        _run_one(task, result_fd)
    end_fork()


if __name__ == "__main__":
    _main(*sys.argv[1:])
