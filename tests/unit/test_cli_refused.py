"""Wrong arguments of every command: one line that names the fault, and code 2."""

import pytest

from shoal.cli import main

SET_BY_LAUNCHERS = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
# For each command: its arguments, and a part of the error.
REFUSED = {
    "": """
        | shoal
        swim | 'swim'
        plna | did you mean plan?
        --colour | shoal
    """,
    "bench": """
        all_reduce --hosts 4 --ranks 2 | pass only one
        --rate 400mbit | add --hosts N
        --hosts 1 | --hosts 1: expected 2 or more
        --ranks 0 | --ranks 0: expected 1 to 1000
        --hosts 2 --ranks-per-host 1001 | --ranks-per-host 1001: expected 1 to 1000
        -b much | -b: cannot read the bytes 'much'
        --hosts 2 --rate fast | cannot read the rate
        juggle | no collective 'juggle'
        al_reduce | did you mean all_reduce?
        -n 0 | -n 0: at least 1
        -c -1 | -c -1: at least 0
        -b 2M -e 1M | at most -e
        -b 0 -e 8 | must be above 0
        -e 65G | at most 64G
        -b 8 -e 16 -i 0 | both must be at least 1
        -b 8 -e 1G -i 4 | more than 1000 sizes
        -r 2 | the ranks are 0 to 1
        -r x | a rank or all
        -d quarter | -d quarter
        -o mul | -o mul
        send_recv --ranks 3 | 3 ranks cannot be paired
        --peers nccl | no such library; known are gloo
        --timeout 0 | must be above 0
        --timeout inf | --timeout inf: must be above 0
        --json /nowhere/run.json | cannot write /nowhere/run.json
    """,
    "check": """
        | no launcher found: RANK
        | or let --hosts host0,host1 start a rank on each host
        --hosts a,,b | --hosts a,,b: a name is empty
        --timeout 0 | --timeout 0: must be above 0, and at most 1000000 seconds
        --timeout inf | --timeout inf: must be above 0
        --hosts a,b --ssh ' | --ssh ': No closing quotation
    """,
    "draw": """
        ring --ranks 0 | --ranks 0
        ring --ranks 129 | a drawing shows at most 128 ranks, not 129
        ring --out /nowhere/ring.svg | cannot write /nowhere/ring.svg: No such file
    """,
    "lab run": """
        --hosts 2 | no command: write it after --
        -- true | --hosts
        --hosts 0 -- true | --hosts 0: expected 1 or more
        --hosts 201 -- true | a lab of 201 hosts: expected 1 to 200
        --hosts 2 --ranks-per-host 0 -- true | --ranks-per-host 0: expected 1 to 1000
        --hosts 2 --grace nan -- true | --grace nan: expected 0 to 3600 seconds
        --hosts 2 --rate 400 -- true | --rate: cannot read the rate '400'; write 400mbit
        --hosts 2 --rate 1kbit -- true | at 0.001 Mbit/s: expected 1 to 100000 Mbit/s
        --hosts 4 --rate 1gbit,2gbit,3gbit -- true | --rate lists 3 rates for 4 hosts
        --hosts 2 --nics 1gbit, -- true | --nics: cannot read the rate ''
        --hosts 2 --nics 1gbit,1gbit --rate 1gbit -- true | not allowed with
        --hosts 2 --server-rate 1gbit -- true | needs servers: add --servers K
        --hosts 2 --name a/b -- true | or a digit, got 'a/b'
        --hosts 2 --key-file /nosuch -- true | --key-file /nosuch cannot be read
        --hosts 2 -- shoal-no-such-program | 'shoal-no-such-program' does not exist
    """,
    "plan": """
        | --hosts 8 --ranks-per-host 4
        --hots 2 | did you mean --hosts?
        --hosts 2 --collective allreduce | did you mean all_reduce?
        --hosts 2 --link fast | --link: cannot read the rate 'fast'
        --hosts 2 --cores 0 | --cores must be at least 1, got 0
        --hosts 1000 --ranks-per-host 1000 | at most 65536 ranks, not 1000000
        --hosts 999999 --ranks-per-host 1000 | at most 1000000
        --hosts 2 --wire fp4 | unknown wire 'fp4'; give one of identity, bf16
        --hosts 2 --tuning /nowhere | cannot read the tuning file /nowhere
        --hosts 2 --link 25Gb,20us,5us,1us | write RATE,LATENCY,MESSAGE
        --workers 8 | --workers needs --servers K, to plan reduction servers, or --model-bytes BYTES
        --servers 8 | add --workers N
        --server-link 1Gb | needs --workers N --servers K; add --workers N
        --workers 0 --servers 1 | --workers 0: must be 2 to 4096
        --workers 1 --servers 2 | one worker has nothing to reduce
        --workers 5000 --servers 1 | --workers 5000: must be 2 to 4096
        --workers 4 --servers 1 --hosts 4 | drop --hosts
        --workers 4 --servers 1 --ranks 4 | drop --ranks
        --workers 4 --servers 1 --collective broadcast | drop --collective
        --workers 4 --servers 2 --html page.html | --html shows algorithms, not servers
        --workers 4 --servers 1 --workers-per-host 3 | equally many workers on each of several hosts
        --workers 7 --servers 1 --workers-per-host 0 | pass --workers-per-host 1
        --workers 4 --servers 1 --workers-per-host 4 | pass --workers-per-host 1 or 2
        --workers 4 --servers 1 --size 0 | --size 0: must be above 0
        --workers 4 --servers 2 --server-link fast | --server-link: cannot read the rate 'fast'
        --workers 4 --servers 2 --server-link 3x1Gb | names 3 servers, --servers 2
        --workers 4 --servers 2 --server-link yx1Gb | 'y' is not a number of servers
        --workers 4 --servers 2 --worker-price 3 | unrecognized arguments: --worker-price 3
        --model-bytes 1GB --workers 4 | the plan of a training needs --step TIME
        --step 1s --workers 4 | needs --model-bytes BYTES
        --step 1s --model-bytes 1GB | needs --workers N
        --step 1s --model-bytes 1GB --workers 4 --hosts 4 | does not use --hosts
        --step 1s --model-bytes 1GB --workers 4 --ranks 4 | does not use --ranks
        --step 1s --model-bytes 1GB --workers 4 --html page.html | does not use --html
        --step 1s --model-bytes 1GB --workers 4 --size 4MB | does not use --size
        --step 1s --model-bytes 1GB --workers 4 --wire bf16 | compares all codecs; drop --wire
        --step 1s --model-bytes 1GB --workers 1 | one worker has nothing to reduce
        --step 1s --model-bytes 1GB --workers 4 --servers -1 | --servers -1: must be 0 to 4096
        --step 1s --model-bytes 1GB --workers 4 --steps 0 | --steps 0: must be 1 to
        --step 1s --model-bytes 1GB --workers 4 --every -3 | --every -3: must be 1 to
        --step 0s --model-bytes 1GB --workers 4 | a time above 0
        --step 1s --model-bytes 3B --workers 4 | at least 4 bytes
        --step fast --model-bytes 1GB --workers 4 | --step: cannot read the time 'fast'
        --step 1s --model-bytes big --workers 4 | --model-bytes: cannot read the bytes 'big'
        --step 1s --model-bytes 1GB --workers 4 --server-link 2x1Gb | names 2 servers, --servers 0
        --step 1s --model-bytes 1GB --workers 4 --servers 2 --workers-per-host 2 | one worker
    """,
    "server": """
        --listen 127.0.0.1 --key-file KEY --memory 1M | a view needs at least 64M
        --listen 127.0.0.1 --key-file KEY --memory much | --memory: cannot read the bytes 'much'
        --listen 127.0.0.1 --key-file KEY --max-jobs 0 | --max-jobs must be at least 1, got 0
        --listen 127.0.0.1 --key-file KEY --port 70000 | --port must be from 1 to 65535, got 70000
    """,
    "simulate": """
        | name one algorithm, or pass --all
        --all | --hosts 8 --ranks-per-host 4
        ring --ranks 8 | --hosts 8 --ranks-per-host 4
        ring --hosts 1 --html page.html | --html shows the NICs of hosts: describe two or more
        ring --all | name one algorithm, or pass --all
        rign --hosts 4 | no algorithm 'rign'
        ring --collective broadcats --hosts 4 | no collective 'broadcats'
        --all --hosts 4 --collective send_recv | no collective 'send_recv' to compare
        --all --hosts 2 --collective brodcast | did you mean broadcast?
        ring --hosts 0 | --hosts 0, --ranks-per-host 1: both must be at least 1
        ring --hosts 2 --ranks-per-host 0 | --hosts 2, --ranks-per-host 0: both
        ring --hosts 1000001 | --hosts 1000001x1: at most 1000000 ranks
        ring --hosts 4,4,2 --ranks-per-host 4 | drop --ranks-per-host
        ring --hosts 100000 | at most
        ring --hosts 4 --link 25Gb,20 | cannot read the time
        ring --hosts 4 --bytes 4Mb | --bytes: cannot read the bytes
        ring --hosts 4 --root 4 | --root 4 must be a rank: 0 to 3
        ring --hosts 99999999999999999999 | at most 1000000 ranks
    """,
    "status": """
        127.0.0.1 | SHOAL_KEY_FILE is not set
        : | the server's address: ':' is not HOST, HOST:PORT
    """,
    "top": """
        --once 10.0.0.2:7 | set SHOAL_KEY_FILE
        --once 10.0.0.2 | '10.0.0.2' is not an address; expected host:port
        --once ::1 | '::1' is not an address; expected host:port
    """,
    "trace": """
        ring --ranks 0 | --ranks 0: there must be at least one rank
        rign | did you mean ring?
        rung | no algorithm 'rung' for all_reduce: there are
        ring --hosts 2x4 --ranks 9 | --hosts 2x4 has 8 ranks, but --ranks is 9
        ring --hosts 999999x999999 | at most 1000000 ranks
        ring --root 4 | --root 4 must be a rank: 0 to 3
        ring --root 1 | --root 1: ring all_reduce has no root
        ring --width 10 | --width 10: at least 40
        ring --ranks 1000 | 1000 ranks are too many to trace
        ring/doubling/ring | no algorithm 'ring/doubling/ring' for all_reduce
        ring --html /nowhere/page.html | cannot write /nowhere/page.html
        ring --ranks 129 --html x | at most 128
    """,
    "tune": """
        --rounds 0 | --rounds must be at least 1, got 0
        --to much | --to: cannot read the bytes 'much'
        --from 5MiB --to 6MiB | the range contains no size
    """,
}
CASES = [
    (f"{command} {arguments.strip()}", complaint)
    for command, lines in REFUSED.items()
    for arguments, complaint in (line.split("| ") for line in lines.strip().splitlines())
]
NINES = "9" * 400
CASES += [
    (f"simulate ring --hosts 2 --link {NINES}Gb", "--link: cannot read the rate '999"),
    (f"simulate ring --hosts 2 --link 1Gb,{NINES}us", "--link: cannot read the time '999"),
    (f"plan --workers 4 --model-bytes 1GB --step {NINES}s", "--step: cannot read the time '999"),
    (f"plan --hosts {20 * NINES}", "cannot read the hosts '999"),
    (f"bench -r {20 * NINES}", "999: a rank or all"),
]


@pytest.mark.parametrize(("argv", "complaint"), CASES)
def test_wrong_arguments_are_refused_in_one_line(
    argv: str, complaint: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (*SET_BY_LAUNCHERS, "SHOAL_KEY", "SHOAL_KEY_FILE"):
        monkeypatch.delenv(name, raising=False)
    assert main(argv.split()) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("shoal: ")
    assert captured.err.count("\n") == 1
    assert complaint in captured.err
