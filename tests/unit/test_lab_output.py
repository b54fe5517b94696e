"""Lines of many processes on their way to one reader, which may be slow."""

import os

from shoal.lab.output import Lines, Output


def test_a_line_without_end_is_passed_on_in_pieces() -> None:
    (source, sink), (reader, writer) = os.pipe(), os.pipe()
    os.set_blocking(reader, False)
    output = Output(writer)
    lines = Lines(os.fdopen(source, "rb"), output, "h")
    for _ in range(2):
        os.write(sink, b"x" * 60_000)
        lines.read()
    lines.end()
    output.write()
    assert os.read(reader, 1 << 20).startswith(b"h | xxx")
    while output.is_pending:
        output.write()
        os.read(reader, 1 << 20)
    for end in (sink, reader, writer):
        os.close(end)


def test_draining_a_pipe_ends_though_a_child_still_writes() -> None:
    source, sink = os.pipe()

    class Echo(Output):
        """Writes another line for each received one, as a child that outlives its parent."""

        n_lines = 0

        def add(self, label: str, line: bytes) -> None:
            self.n_lines += 1
            assert self.n_lines < 100, "this would never end"
            os.write(sink, b"y\n")

    echo = Echo(1)
    lines = Lines(os.fdopen(source, "rb"), echo, "h")
    os.write(sink, b"y\n" * 10)
    lines.read_rest()
    assert echo.n_lines == 10
    lines.end()
    os.close(sink)
