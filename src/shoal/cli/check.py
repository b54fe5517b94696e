"""`shoal check`: check whether the machines of a job reach each other, and how fast.

Start it the way you start the job, on every rank at once:

  torchrun --nnodes 2 --rdzv-backend c10d --rdzv-endpoint host0:29500 --no-python shoal check
  srun shoal check
  shoal check --hosts host0,host1     # over ssh, one rank for each host

Rank 0 prints which hosts reach each other, over which interface, with which latency and rate;
each host's versions, MTU, clock, key and limits; and what to change.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
from typing import Final

from shoal.cli.options import MOST_TIMEOUT_S
from shoal.errors import ShoalError, UsageError

_PORT: Final = "29500"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `shoal check`."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    hosts = "start one rank on each host over ssh, in this folder with this Python"
    add("--hosts", metavar="A,B", help=hosts)
    ssh = "command that runs another on a host; default %(default)s"
    add("--ssh", default="ssh", metavar="COMMAND", help=ssh)
    wait = "how long to wait for missing ranks; default %(default)g"
    add("--timeout", type=float, default=30.0, metavar="SECONDS", help=wait)
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    if not 0 < args.timeout <= MOST_TIMEOUT_S:
        raise UsageError(
            f"--timeout {args.timeout:g}: must be above 0, and at most {MOST_TIMEOUT_S} seconds"
        )
    if args.hosts:
        return _over_ssh(args.hosts.split(","), args.ssh, args.timeout)
    from shoal.check.run import check

    findings = check(args.timeout)
    if findings is None:
        return 0
    sys.stdout.write(findings.text())
    return 1 if any(findings.problems()) else 0


def _over_ssh(hosts: list[str], ssh: str, timeout_s: float) -> int:
    """Start a rank on each host, and return the exit code of rank 0.

    Passes shoal's variables, except SHOAL_KEY: others could see it in the list of processes.
    """
    if not all(hosts):
        raise UsageError(f"--hosts {','.join(hosts)}: a name is empty")
    if os.environ.get("SHOAL_KEY"):
        raise UsageError("--hosts cannot pass SHOAL_KEY secretly: use SHOAL_KEY_FILE on each host")
    try:
        command_of_ssh = shlex.split(ssh)
    except ValueError as error:
        raise UsageError(f"--ssh {ssh}: {error}") from None
    if not command_of_ssh:
        raise UsageError("--ssh is empty: name a command, such as ssh")
    passed = {name: value for name, value in os.environ.items() if name.startswith("SHOAL_")}
    passed |= {
        "MASTER_ADDR": os.environ.get("MASTER_ADDR", hosts[0]),
        "MASTER_PORT": os.environ.get("MASTER_PORT", _PORT),
        "WORLD_SIZE": str(len(hosts)),
    }
    running = []
    for rank, host in enumerate(hosts):
        env = [f"{name}={value}" for name, value in (passed | {"RANK": str(rank)}).items()]
        command = ["env", *env, sys.executable, "-m", "shoal", "check", "--timeout", str(timeout_s)]
        there = f"cd {shlex.quote(os.getcwd())} && exec {shlex.join(command)}"
        try:
            # The other ranks print only errors: rank 0 has the report.
            running.append(
                subprocess.Popen([*command_of_ssh, host, there], stdin=subprocess.DEVNULL)
            )
        except OSError as error:
            raise ShoalError(f"cannot run {ssh}: {error.strerror}") from None
    codes = [one.wait() for one in running]
    if codes[0] not in (0, 1, 2):
        raise ShoalError(
            f"`{ssh} {hosts[0]}` could not run the check (status {codes[0]}): all hosts "
            "need ssh without a password, and this folder and Python"
        )
    return codes[0]
