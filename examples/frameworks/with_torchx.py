"""TorchX over shoal: its component dist.ddp starts with_torchrun.py on this machine.

    python examples/frameworks/with_torchx.py

The same as `torchx run -s local_cwd dist.ddp -j 1x4 --script examples/frameworks/with_torchrun.py`.
`torchrun` must be on PATH.
"""

import sys
from pathlib import Path

import task
from torchx.components.dist import ddp
from torchx.runner import get_runner


def main() -> None:
    """Start the ranks, wait for them, and print their output."""
    args = task.arguments()
    script = Path(__file__).with_name("with_torchrun.py")
    job = ddp("--backend", args.backend, script=str(script), j=f"1x{args.ranks}")
    with get_runner() as runner:
        handle = runner.run(job, "local_cwd")
        status = runner.wait(handle)
        for line in runner.log_lines(handle, job.roles[0].name):
            print(line, end="")
    sys.exit(0 if status is not None and status.state.name == "SUCCEEDED" else str(status))


if __name__ == "__main__":
    main()
