"""Standard output and error that can be written to, wherever a command was started."""

import io
import os
import sys


def make_printable() -> None:
    """In a locale such as Latin-1, print `?` for characters that it lacks; drop the output if the stream is closed."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115  # until the process ends
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
