"""`shoal server`: reduce for the workers of jobs.

Serve the jobs whose keys --key-file gives. Workers that name this host in SHOAL_SERVERS send it
parts of their large all-reduces and receive the sums, so each worker's network interface carries
less. SIGTERM ends the server after the calls in flight, at most 10 s later; see docs/servers.md.
"""

from __future__ import annotations

import argparse
import os

from shoal.errors import UsageError
from shoal.group.pool.protocol import DEFAULT_PORT


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `shoal server`."""
    add = parser.add_argument
    where = "interface or address where workers connect"
    add("--listen", required=True, metavar="IFACE|ADDR[:PORT]", help=where)
    port = "port, if --listen names none; default %(default)s"
    add("--port", type=int, default=DEFAULT_PORT, metavar="N", help=port)
    key = "the key of a job (its workers' SHOAL_KEY_FILE); repeat for each job"
    add("--key-file", action="append", required=True, metavar="FILE", help=key)
    store = "register in this torch store, for workers with SHOAL_SERVERS=rdzv://HOST:PORT/ID"
    add("--rdzv-endpoint", metavar="HOST:PORT", help=store)
    add("--rdzv-id", metavar="ID", help="the job's id in that store; default `none`, as torchrun's")
    add("--max-jobs", type=int, default=16, metavar="N", help="jobs served at a time; default 16")
    memory = "memory limit of a view, such as 512M; default 1G"
    add("--memory", default="1G", metavar="BYTES", help=memory)
    add("--no-http", action="store_true", help="do not answer /healthz, /readyz and /metrics")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    # The native core loads here, not with `shoal --help`.
    from shoal.group.pool.addresses import DEFAULT_JOB, parse_endpoint
    from shoal.plan import Settings
    from shoal.plan.quantities import bytes_in
    from shoal.server.options import LEAST_MEMORY_BYTES, keys_of, listen
    from shoal.server.registrar import start_registrar
    from shoal.server.server import Server
    from shoal.settings import warn_of_unknown
    from shoal.state.files import check_folder

    if not 1 <= args.port <= 65535:
        raise UsageError(f"--port must be from 1 to 65535, got {args.port}")
    if args.max_jobs < 1:
        raise UsageError(f"--max-jobs must be at least 1, got {args.max_jobs}")
    memory_bytes = bytes_in("--memory", args.memory)
    if memory_bytes < LEAST_MEMORY_BYTES:
        raise UsageError(
            f"--memory {args.memory}: a view needs at least {LEAST_MEMORY_BYTES >> 20}M"
        )
    if args.rdzv_id is not None and args.rdzv_endpoint is None:
        raise UsageError(f"--rdzv-id {args.rdzv_id} needs a store: add --rdzv-endpoint")
    endpoint = None
    if args.rdzv_endpoint is not None:
        job = args.rdzv_id or DEFAULT_JOB
        endpoint = parse_endpoint(args.rdzv_endpoint, job, "--rdzv-endpoint and --rdzv-id")
    keys = keys_of(args.key_file)
    listeners = listen(args.listen, args.port)
    os.environ.setdefault("SHOAL_DEBUG", "INFO")  # the log is its output
    warn_of_unknown(os.environ)
    Settings.read()
    check_folder()
    addresses = [listener.getsockname()[:2] for listener in listeners]
    if endpoint is not None:
        start_registrar(endpoint, keys, addresses)
    how = {"most_jobs": args.max_jobs, "memory_bytes": memory_bytes, "http": not args.no_http}
    Server(listeners, keys, **how).run()
    return 0
