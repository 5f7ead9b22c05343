"""The command line, run in a process of its own."""

import contextlib
import fcntl
import os
import signal
import struct
import subprocess
import sys
import termios
import threading


def heed_ctrl_c():
    """For Popen's preexec_fn: a shell makes what runs in its background ignore SIGINT, and Python keeps it so."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def run(*arguments, path="", **environment):
    """Run `python -m megapatch`, or `python -c` if that is the first argument, with `path` first on PYTHONPATH."""
    known = {name: value for name, value in os.environ.items() if not name.startswith("MEGAPATCH_")}
    search = os.pathsep.join(filter(None, [str(path), known.get("PYTHONPATH", "")]))
    command = list(arguments) if arguments[:1] == ("-c",) else ["-m", "megapatch", *arguments]
    return subprocess.run(
        [sys.executable, *command],
        env={**known, "PYTHONPATH": search, **environment},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


@contextlib.contextmanager
def terminal(columns):
    """Make a terminal. Yields a descriptor to write to, and what was written, which is complete at the end."""
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    written = bytearray()

    def reading():
        with contextlib.suppress(OSError):  # nobody has the other end open any more
            while part := os.read(ours, 4096):
                written.extend(part)

    thread = threading.Thread(target=reading)
    thread.start()
    try:
        yield theirs, written
    finally:
        os.close(theirs)
        thread.join()
        os.close(ours)
