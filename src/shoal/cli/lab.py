"""`shoal lab`: run a job on network namespaces as hosts, with NICs of given rates; needs root."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING, Final

from shoal.errors import UsageError
from shoal.lab.cluster import CONGESTION, Lab
from shoal.lab.job import Job, private_key, tasks_of
from shoal.lab.runner import run_tasks
from shoal.lab.running import find_lab
from shoal.plan.quantities import mbit_in
from shoal.rendezvous import job_key

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shoal.cli.options import Parser
    from shoal.lab.cluster import Host

_EXAMPLES: Final = """
examples:
  shoal lab run --hosts 4 --rate 1gbit -- python train.py
  shoal lab run --hosts 8 --servers 8 --rate 400mbit -- python train.py
  shoal lab run --hosts 4 --nics 900mbit,300mbit --ranks-per-host 2 -- python train.py
  shoal lab run --hosts 2 --name two -- sleep 600
  shoal lab cut two 0 1           # from another terminal, while it runs
  shoal lab exec two 0 -- ss -tin

docs/lab.md lists the variables that the processes get, and the limits of such a lab.
"""

_RUN_MORE: Final = ", and remove the lab afterwards, also after a failure"
_GRACE_S: Final = 5.0
_MOST_RANKS_PER_HOST: Final = 1000


def add_arguments(parser: Parser) -> None:
    """Add the commands of `shoal lab`."""
    parser.epilog, parser.formatter_class = _EXAMPLES, argparse.RawDescriptionHelpFormatter
    commands = parser.add_subparsers(required=True, metavar="COMMAND", title="commands")
    parsers = {}
    for name, run, what, more in (
        ("run", _run, "run a command on every host of a new lab, as torchrun would", _RUN_MORE),
        ("cut", _change_links, "silently drop all packets between two hosts of a running lab", ""),
        ("heal", _change_links, "undo a cut", ""),
        ("exec", _exec, "run one more command in a host of a running lab", ""),
    ):
        description = f"{what[0].upper()}{what[1:]}{more}."
        parsers[name] = commands.add_parser(name, help=what, description=description)
        parsers[name].set_defaults(run=run, is_cut=name == "cut")
    for name in ("cut", "heal", "exec"):
        add = parsers[name].add_argument
        add("lab", metavar="NAME", help="the --name of the lab, or lab and its process id")
        add("host", type=int, metavar="HOST", help="number of the host, from 0; servers come last")
    for name in ("cut", "heal"):
        add = parsers[name].add_argument
        add("to", type=int, nargs="?", metavar="HOST", help="the other host; default all others")
        add("--nic", type=int, metavar="N", help="only links of this NIC, from 0; default all")
        add("--one-way", action="store_true", help="only packets from the first host")
    _add_run(parsers["run"])
    for name in ("run", "exec"):
        add = parsers[name].add_argument
        add("command", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="with its arguments")


def _add_run(parser: Parser) -> None:
    add = parser.add_argument
    add("--hosts", type=int, required=True, metavar="N", help="hosts that run the command")
    add("--servers", type=int, default=0, metavar="K", help="more hosts, each with a server")
    rates = parser.add_mutually_exclusive_group().add_argument
    rate = "rate of each host's NIC in each direction, such as 400mbit; none: no limit; several "
    rate += "rates are used in turn; default 1gbit"
    rates("--rate", default="1gbit", metavar="RATE[,RATE...]", help=rate)
    rates("--nics", metavar="RATE,RATE", help="give each host several NICs, with these rates")
    rate = "rate of the servers' NICs; default that of host 0"
    add("--server-rate", metavar="RATE[,RATE...]", help=rate)
    control = "congestion control of the hosts' TCP; default %(default)s, as in Linux"
    add("--congestion", default=CONGESTION, metavar="NAME", help=control)
    add("--ranks-per-host", type=int, default=1, metavar="N", help="ranks on each; default 1")
    add("--key-file", metavar="FILE", help="the job's key; default SHOAL_KEY_FILE, else a new one")
    add("--name", default="", help="name for cut, heal and exec; default lab and the process id")
    grace = "time from the first failure or Ctrl-C until the others are killed; default "
    grace += f"{_GRACE_S:g}; a second Ctrl-C kills at once"
    add("--grace", type=float, default=_GRACE_S, metavar="SECONDS", help=grace)
    add("--keep-going", action="store_true", help="do not end the others when a process fails")


def _run(args: argparse.Namespace) -> int:
    command = _command(args)
    _check_counts(args)
    workers = _hosts_of("--rate", args.rate, args.hosts)
    if args.nics:
        workers = [tuple(mbit_in("--nics", text) for text in args.nics.split(","))] * args.hosts
    servers = workers[:1] * args.servers
    if args.server_rate:
        servers = _hosts_of("--server-rate", args.server_rate, args.servers)
    hosts = dict(enumerate(workers + servers))
    name = args.name or f"lab{os.getpid()}"
    lab = Lab(len(hosts), apart=hosts, name=name, congestion=args.congestion)
    with ExitStack() as stack:
        key_file: str = args.key_file or os.environ.get("SHOAL_KEY_FILE", "")
        if args.key_file:
            from shoal.server.options import key_of

            key_of(args.key_file)  # raises for a file that ranks would refuse
        elif key_file:
            job_key({"SHOAL_KEY_FILE": key_file})
        else:
            key_file = stack.enter_context(private_key(os.environ.get("SHOAL_KEY", "")))
        job = Job(command, args.hosts, args.ranks_per_host, key_file)
        return run_tasks(lab, tasks_of(job, lab), args.grace, args.keep_going)


def _check_counts(args: argparse.Namespace) -> None:
    for option, n, least in (("--hosts", args.hosts, 1), ("--servers", args.servers, 0)):
        if n < least:
            raise UsageError(f"{option} {n}: expected {least} or more")
    if not 1 <= args.ranks_per_host <= _MOST_RANKS_PER_HOST:
        raise UsageError(
            f"--ranks-per-host {args.ranks_per_host}: expected 1 to {_MOST_RANKS_PER_HOST}"
        )
    if not 0 <= args.grace <= 3600:
        raise UsageError(f"--grace {args.grace:g}: expected 0 to 3600 seconds")
    if args.server_rate and not args.servers:
        raise UsageError("--server-rate needs servers: add --servers K")


def _command(args: argparse.Namespace) -> list[str]:
    command: list[str] = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not command:
        raise UsageError("no command: write it after --, such as -- python train.py")
    if shutil.which(command[0]) is None:
        raise UsageError(
            f"the command {command[0]!r} does not exist or is not executable; if sudo changed "
            "PATH, keep it with sudo env PATH=$PATH"
        )
    return command


def _hosts_of(option: str, text: str, n_hosts: int) -> list[tuple[float | None, ...]]:
    """Return the rate of each host's NIC, from one rate for all or several used in turn."""
    rates = [mbit_in(option, each) for each in text.split(",")]
    if n_hosts % len(rates):
        raise UsageError(
            f"{option} lists {len(rates)} rates for {n_hosts} hosts; give one rate, or a number "
            "that divides the hosts evenly"
        )
    return [(rates[host % len(rates)],) for host in range(n_hosts)]


def _change_links(args: argparse.Namespace) -> int:
    ways, failures = list(_ways(args)), []
    for source, to, nic in ways:
        try:
            (source.cut if args.is_cut else source.heal)(to, nic)
        except UsageError as error:  # noqa: PERF203 - a few at most
            failures.append(error)
    # Some routes may not be cut: the cut may have been one-way, or not to all other hosts.
    if failures and len(failures) == len(ways):
        raise failures[0]
    return 0


def _ways(args: argparse.Namespace) -> Iterator[tuple[Host, Host, int]]:
    if args.to == args.host:
        raise UsageError(f"host {args.host} has no link to itself; name two hosts")
    lab = find_lab(args.lab)
    one = lab.host(args.host)
    others = range(len(lab.namespaces)) if args.to is None else [args.to]
    for other in (lab.host(index) for index in others if index != args.host):
        n_nics = min(len(one.addresses), len(other.addresses))
        if args.nic is not None and not 0 <= args.nic < n_nics:
            raise UsageError(
                f"--nic {args.nic}: hosts {one.index} and {other.index} have NICs 0 to "
                f"{n_nics - 1} in common"
            )
        for nic in range(n_nics) if args.nic is None else [args.nic]:
            yield one, other, nic
            if not args.one_way:
                yield other, one, nic


def _exec(args: argparse.Namespace) -> int:
    command = _command(args)
    host = find_lab(args.lab).host(args.host)
    sys.stdout.flush()
    os.execvp("ip", ["ip", "netns", "exec", host.namespace, *command])
