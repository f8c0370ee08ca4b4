"""The entry point of the command `offload`: a terminal shows that torch is being imported, which takes seconds.

Always true:
- nothing but the standard library is imported before that is shown
- without a terminal nothing is shown; on one, the line is erased before anything else is printed
"""

import os
import sys


def main() -> int:
    """Run the command line; returns the exit code."""
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
    """Whether both streams go to a terminal that can erase a line."""
    streams = (sys.stdout, sys.stderr)
    return os.environ.get("TERM") not in (None, "dumb", "unknown") and all(one and one.isatty() for one in streams)


if __name__ == "__main__":
    sys.exit(main())
