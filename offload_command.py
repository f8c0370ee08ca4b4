"""The command `offload` from its first moment on: a terminal shows that torch is being imported, which takes seconds.

Always true:
- nothing but the standard library is imported before that is shown
- off a terminal nothing is shown; on one, the line is gone before anything else is printed
"""

import os
import sys


def main() -> int:
    """Run the command line; gives the exit code."""
    is_seen = _is_terminal()
    if is_seen:
        print("importing torch", end="", file=sys.stderr, flush=True)
    try:
        from offload.cli import main as command
    except KeyboardInterrupt:
        return 130
    finally:
        if is_seen:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
    return command()


def _is_terminal() -> bool:
    """Whether both streams go to one that can take a line back."""
    streams = (sys.stdout, sys.stderr)
    return os.environ.get("TERM") not in (None, "dumb", "unknown") and all(one and one.isatty() for one in streams)


if __name__ == "__main__":
    sys.exit(main())
