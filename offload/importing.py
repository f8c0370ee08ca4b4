"""What a terminal shows while the command `offload` imports torch, which takes seconds.

Always true:
- nothing but the standard library is imported before that is shown
- without a terminal, and in programs that import `offload`, nothing is shown
- the line is erased before anything else is printed
"""

import os
import sys

_COMMAND = "offload"


def _is_seen() -> bool:
    """Whether this process is the command, and both streams go to a terminal that can erase a line."""
    words = sys.orig_argv
    is_module = words[1:2] == ["-m"] and words[2].partition(".")[0] == _COMMAND
    is_command = is_module or os.path.basename("".join(sys.argv[:1])) == _COMMAND
    can_erase = os.environ.get("TERM") not in (None, "dumb", "unknown")
    return is_command and can_erase and all(one and one.isatty() for one in (sys.stdout, sys.stderr))


def end() -> None:
    """Erase the line."""
    if _is_seen():
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)


if _is_seen():
    print("importing torch", end="", file=sys.stderr, flush=True)
