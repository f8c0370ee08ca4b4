"""What a file of others computes, within limits of time and memory: chat templates are programs.

Always true:
- it is computed in a forked child, which the system ends at a limit: nothing in Python stops `9**9**9`
- text, or an error's, is all that comes back
"""

from __future__ import annotations

import os
import resource
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from offload.errors import ArgumentError
from offload.system.reasons import first_line, reading

_MOST_SECONDS = 10  # of a processor
_MOST_WAIT = 60  # seconds, whatever the processor does
_MOST_BYTES = 1 << 30  # beyond what the process has


def within_limits(act: Callable[[], str], what: str) -> str:
    """The text that `act` returns in a forked child.

    Raises `ArgumentError` if it failed, or needed more time or memory than it may; `ReadError` and `OSError` if the
    system gives no process.
    """
    reply, sizes = b"", Path("/proc/self/statm")
    with reading(sizes):
        most = int(sizes.read_text(encoding="ascii").split()[0]) * resource.getpagesize() + _MOST_BYTES
    mine, theirs = socket.socketpair()
    with mine, theirs:
        pid = os.fork()
        if not pid:
            _tell(act, theirs, most)
        try:
            theirs.close()
            mine.settimeout(_MOST_WAIT)
            with mine.makefile("rb") as file, suppress(TimeoutError):
                reply = file.read()
        finally:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    if not reply:
        raise ArgumentError(f"{what} takes more than {_MOST_SECONDS} s, or too much memory")
    text = reply[1:].decode("utf-8", "surrogatepass")
    if reply[:1] == b"-":
        raise ArgumentError(text)
    return text


def _tell(act: Callable[[], str], to: socket.socket, most: int) -> None:
    """Never returns."""
    try:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_CPU, (_MOST_SECONDS, _MOST_SECONDS))
        resource.setrlimit(resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))
        try:
            reply = "+" + act()
        except Exception as error:  # a chat template can raise anything
            reply = "-" + first_line(error)
        to.sendall(reply.encode("utf-8", "surrogatepass"))
    finally:
        with suppress(BaseException):
            to.close()
        os._exit(0)
