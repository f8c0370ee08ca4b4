"""When torch is imported, which takes seconds, and what of other libraries has been.

The command `offload` imports torch only once it knows what to do.

Always true:
- a program that imports `offload` has all of it at once
- the command reads its line, and answers `--help`, with the standard library and two small packages
- torch's threads wait for one another for a short time in the command: a token beside other programs takes a tenth of
  the time (`tutorials/explanation/performance.md`); a program that imports `offload` decides that itself
- no other module looks into `sys.modules`, where a library is from the moment that a thread begins to import it
"""

import importlib
import os
import sys
from typing import Any

_PACKAGE = "offload"
_SPINS = "3000"  # looks of a thread of GNU OpenMP at what it waits for, some 0.1 ms, before it sleeps


def is_wanted() -> bool:
    """Whether the package's `__init__` imports everything: not the first time that the command executes it."""
    return "__getattr__" in vars(sys.modules[_PACKAGE]) or not _is_command()


def library() -> None:
    """Import what the package's `__init__` has left out, if anything."""
    package = sys.modules[_PACKAGE]
    if package.__all__[0] in vars(package):
        return
    if "OMP_WAIT_POLICY" not in os.environ:  # it is read when torch is loaded
        os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)
    importlib.reload(package)


def imported(module: str, name: str) -> Any:
    """What a library's module defines; None if it has not been imported so far, so that there can be no instances."""
    return getattr(sys.modules.get(module), name, None)


def version() -> str:
    """Of the package."""
    return str(sys.modules[_PACKAGE].__version__)


def _is_command() -> bool:
    is_module = sys.orig_argv[1:2] == ["-m"] and sys.orig_argv[2].partition(".")[0] == _PACKAGE
    return is_module or os.path.basename("".join(sys.argv[:1])) == _PACKAGE
