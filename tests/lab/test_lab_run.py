"""`shoal lab run`: a command on every host, which leaves nothing behind in any case."""

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from lab.labs import needs_root

from shoal.cli import main
from shoal.lab.names import remove_stale
from shoal.lab.running import find_lab

pytestmark = needs_root

LAB = [sys.executable, "-m", "shoal", "lab"]


def lab(*argv: str, **environ: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | environ
    return subprocess.run(
        [*LAB, *argv], capture_output=True, text=True, check=False, timeout=200, env=env
    )


@contextmanager
def running(*argv: str) -> Iterator[subprocess.Popen[str]]:
    """Run a lab; at the end kill it if it still runs, and remove its leftovers."""
    pipe = subprocess.PIPE
    # The tests may have inherited ignored signals, as from nohup.
    run = ["env", "--default-signal=INT,HUP", *LAB, "run", *argv]
    with subprocess.Popen(run, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            yield process
        finally:
            process.kill()
            process.wait()
            remove_stale()


def left_by(pid: int) -> list[str]:
    folders = Path("/run/netns"), Path("/etc/netns")
    return [path.name for folder in folders for path in folder.glob(f"shoal-lab-{pid}-*")]


def await_end(pid: int) -> bool:
    """True if a process that is no child of ours ends within 10 s, or has ended."""
    with suppress(ProcessLookupError):
        poll = select.poll()
        poll.register(os.pidfd_open(pid), select.POLLIN)
        return bool(poll.poll(10_000))
    return True


def test_every_rank_has_its_place_and_a_prefix() -> None:
    show = "echo $RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE $GROUP_RANK/$GROUP_WORLD_SIZE"
    show += " $MASTER_ADDR:$MASTER_PORT; hostname; printf unfinished >&2"
    run = lab("run", "--hosts", "2", "--ranks-per-host", "2", "--", "sh", "-c", show)
    assert run.returncode == 0
    ranks = ["0.0 | 0/4 0/2 0/2", "0.1 | 1/4 1/2 0/2", "1.0 | 2/4 0/2 1/2", "1.1 | 3/4 1/2 1/2"]
    lines = [f"host{rank} 10.77.0.1:29500" for rank in ranks]
    lines += [f"host{rank[:3]} | host{rank[0]}" for rank in ranks]
    assert sorted(run.stdout.splitlines()) == sorted(lines)
    assert sorted(run.stderr.splitlines()) == [f"host{rank[:3]} | unfinished" for rank in ranks]


def test_torch_meets_over_gloo_and_over_shoal() -> None:
    sums = "import torch, torch.distributed as dist\ndist.init_process_group('gloo')\n"
    sums += "for name in ('gloo', 'shoal'):\n    group = dist.new_group(backend=name)\n"
    sums += "    data = torch.ones(1000)\n    dist.all_reduce(data, group=group)\n"
    sums += "    print(name, data.sum().item())\ndist.destroy_process_group()"
    # Two NICs in each host; Gloo uses one.
    nics = ("--nics", "400mbit,100mbit")
    run = lab("run", "--hosts", "2", *nics, "--", sys.executable, "-c", sums)
    assert run.returncode == 0, run.stderr
    assert sorted(run.stdout.splitlines()) == [
        f"host{rank} | {name} 2000.0" for rank in range(2) for name in ("gloo", "shoal")
    ]


def test_the_first_failed_rank_ends_the_others_and_gives_the_status(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    # 1 fails once 0 has blocked the signal, which then waits to be waited for.
    fail = "import os, signal, sys\nif os.environ['RANK'] == '1':\n    open(sys.argv[1]).read()\n"
    fail += "    sys.exit(7)\nsignal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])\n"
    fail += "open(sys.argv[1], 'w').close()\nsignal.sigwait([signal.SIGTERM])\nsys.exit('got it')"
    run = lab("run", "--hosts", "2", "--", sys.executable, "-c", fail, str(tmp_path / "fifo"))
    assert run.returncode == 7
    words = "shoal lab: host1 ended with status 7; ending the other 1"
    assert run.stderr.splitlines() == [words, "host0 | got it"]


def test_a_rank_that_does_not_end_when_asked_is_killed(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    # 1 is killed once 0 ignores the signal.
    stay = "if [ $RANK = 1 ]; then read it < $0; kill -KILL $$; fi; trap '' TERM; echo > $0; "
    stay += "while :; do sleep 0.01; done"
    fifo = str(tmp_path / "fifo")
    run = lab("run", "--hosts", "2", "--grace", "0.2", "--", "sh", "-c", stay, fifo)
    assert run.returncode == 128 + signal.SIGKILL
    assert run.stderr.splitlines() == [
        "shoal lab: host1 was ended by SIGKILL; ending the other 1",
        "shoal lab: 0.2 s after SIGTERM: killing host0",
    ]


def test_others_go_on_after_a_failure_on_request() -> None:
    fail = "if [ $RANK = 1 ]; then exit 7; fi; echo went on"
    run = lab("run", "--hosts", "2", "--keep-going", "--", "sh", "-c", fail)
    assert run.returncode == 7
    assert run.stdout == "host0 | went on\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_is_passed_on_and_leaves_nothing_behind(number: signal.Signals) -> None:
    # Waited for, NOT handled: a handler may run too late for a `pause` that is about to begin.
    wait = "import signal, sys\nnumber = int(sys.argv[1])\n"
    wait += "signal.pthread_sigmask(signal.SIG_BLOCK, [number])\nprint('ready')\n"
    wait += "signal.sigwait([number])\nsys.exit('got it')"
    command = (sys.executable, "-c", wait, str(int(number)))
    with running("--hosts", "2", "--", *command) as process:
        lines = sorted(process.stdout.readline() for _ in range(2))
        assert lines == ["host0 | ready\n", "host1 | ready\n"]
        assert left_by(process.pid)
        process.send_signal(number)
        _, errors = process.communicate(timeout=20)
        assert process.returncode == 128 + number
        assert sorted(errors.splitlines()) == ["host0 | got it", "host1 | got it"]
        assert left_by(process.pid) == []


def test_a_second_signal_kills_at_once() -> None:
    stay = "import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])\n"
    stay += "print('ready')\nwhile signal.sigwait([signal.SIGINT]):\n    print('no')"
    command = ("--grace", "1000", "--", sys.executable, "-c", stay)
    with running("--hosts", "1", *command) as process:
        assert process.stdout.readline() == "host0 | ready\n"
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "host0 | no\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=20) == 128 + signal.SIGINT
        assert left_by(process.pid) == []


def test_ranks_of_a_killed_lab_die_and_the_next_lab_removes_the_rest() -> None:
    stray = "setsid sleep 1000 & echo $$ $!; exec sleep 1000"
    with running("--hosts", "1", "--name", "gone", "--", "sh", "-c", stray) as process:
        rank, child = map(int, process.stdout.readline().split("|")[1].split())
        assert left_by(process.pid)
        process.kill()
        # Dead, but not yet reaped: /proc still has it.
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert await_end(rank)
        assert lab("run", "--hosts", "1", "--", "true").returncode == 0
        assert await_end(child)
        assert left_by(process.pid) == []


def test_a_stalled_reader_stalls_the_ranks_but_the_lab_can_end(tmp_path: Path) -> None:
    # Store the number of bytes written before none was read for half a second.
    write = "import os, select, signal, sys\nos.set_blocking(1, False)\nn = 0\n"
    write += "while n < 64 << 20 and select.select([], [1], [], 0.5)[1]:\n"
    write += "    n += os.write(1, b'a line of text\\n' * 1000)\n"
    write += "open(sys.argv[1], 'w').write(str(n))\nsignal.pause()"
    os.mkfifo(tmp_path / "n_bytes")
    command = (sys.executable, "-c", write, str(tmp_path / "n_bytes"))
    with running("--hosts", "1", "--grace", "0.5", "--", *command) as process:
        assert 0 < int((tmp_path / "n_bytes").read_text()) < 2 << 20
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=20) == 128 + signal.SIGTERM
        assert left_by(process.pid) == []


def test_a_reader_that_closes_its_pipe_ends_the_lab() -> None:
    with running("--hosts", "2", "--", "yes") as process:
        assert process.stdout.readline().endswith("| y\n")
        process.stdout.close()
        assert process.wait(timeout=20) == 1
        assert left_by(process.pid) == []


# A job of one rank and two servers: one ends at once, one on request.
SERVED = """
import os, sys
from shoal.lab import Lab
from shoal.lab.job import Task
from shoal.lab.runner import run_tasks
# Blocked and waited for, NOT trapped by a shell: its `read` may begin after the signal came.
stay = "import signal, sys; signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM]); "
stay += "open(sys.argv[1]); signal.sigwait([signal.SIGTERM]); print('drained')"
tasks = [
    Task("server1", 1, ["sh", "-c", "exit 3"], os.environ, True),
    Task("server2", 2, [sys.executable, "-c", stay, sys.argv[2]], os.environ, True),
    Task("host0", 0, ["sh", "-c", "read it < $0", sys.argv[1]], os.environ, False),
]
sys.exit(run_tasks(Lab(3), tasks, grace_s=5))
"""


def test_a_job_outlives_an_ended_server_and_ends_the_others(tmp_path: Path) -> None:
    work, stay = str(tmp_path / "work"), str(tmp_path / "stay")
    os.mkfifo(work)
    os.mkfifo(stay)
    argv = [sys.executable, "-c", SERVED, work, stay]
    pipe = subprocess.PIPE
    with subprocess.Popen(argv, stdout=pipe, stderr=pipe, text=True) as process:
        line = process.stderr.readline()
        assert line == "shoal lab: server1 ended with status 3; the job goes on\n"
        with open(stay, "w"):  # opens once server2 has blocked the signal
            Path(work).write_text("enough\n")
            out, errors = process.communicate(timeout=20)
    assert (process.returncode, out, errors) == (0, "server2 | drained\n", "")


def test_servers_listen_on_separate_hosts_and_end_with_the_job() -> None:
    connect = "import socket, sys, time\nuntil = time.monotonic() + 20\nwhile True:\n"
    connect += "    try:\n        socket.create_connection((sys.argv[1], 7077), timeout=5)\n"
    connect += "        sys.exit()\n    except OSError:\n        assert time.monotonic() < until\n"
    connect += "        time.sleep(0.05)"
    command = ("sh", "-c", 'exec "$0" -c "$1" $SHOAL_SERVERS', sys.executable, connect)
    run = lab("run", "--hosts", "1", "--servers", "1", "--", *command)
    assert run.returncode == 0, run.stderr
    assert run.stderr.startswith("server1 | ")


def test_links_of_a_lab_found_by_name_are_cut(capsys: pytest.CaptureFixture[str]) -> None:
    name = f"test{os.getpid()}"
    connect = "import socket, sys\n"
    connect += "socket.create_connection((sys.argv[1], 9), timeout=float(sys.argv[2]))"

    def from_0_to(host: str, expected: str) -> str:
        argv = ["ip", "netns", "exec", find_lab(name).namespaces[0]]
        argv += [sys.executable, "-S", "-c", connect, host, "0.3" if expected == silent else "20"]
        run = subprocess.run(argv, capture_output=True, text=True, check=False)
        return run.stderr.splitlines()[-1].partition(":")[0]

    # No process listens at port 9: a refusal shows that the host exists.
    silent, answers = "TimeoutError", "ConnectionRefusedError"
    wait = ("--", "sh", "-c", "echo ready; exec sleep 1000")
    with running("--hosts", "3", "--name", name, *wait) as process:
        for _ in range(3):
            process.stdout.readline()
        assert lab("exec", name, "2", "--", "true").returncode == 0
        assert main(["lab", "cut", name, "0", "1"]) == 0
        assert from_0_to("10.77.0.2", silent) == silent
        assert from_0_to("10.77.0.3", answers) == answers
        assert main(["lab", "heal", name, "0", "1"]) == 0
        # An intact link does not prevent healing the rest.
        assert main(["lab", "cut", name, "0", "2", "--one-way"]) == 0
        assert main(["lab", "heal", name, "0"]) == 0
        assert from_0_to("10.77.0.3", answers) == answers
        assert main(["lab", "cut", name, "0"]) == 0
        for host in ("10.77.0.2", "10.77.0.3"):
            assert from_0_to(host, silent) == silent
        assert main(["lab", "heal", name, "0"]) == 0
        for host in ("10.77.0.2", "10.77.0.3"):
            assert from_0_to(host, answers) == answers
        for argv, problem in (
            (("heal", name, "0", "1"), "host 0 reaches host 1 by eth0: nothing is cut there"),
            (("cut", name, "0", "3"), f"lab {name} has no host 3: they are 0 to 2"),
            (("cut", name, "0", "0"), "name two hosts"),
            (("cut", name, "0", "1", "--nic", "1"), "have NICs 0 to 0 in common"),
            (("cut", "nosuch", "0", "1"), "no lab called 'nosuch' runs here; running:"),
            (("run", "--hosts", "1", "--name", name, "--", "true"), "runs already (process"),
        ):
            assert main(["lab", *argv]) == 2
            assert problem in capsys.readouterr().err
