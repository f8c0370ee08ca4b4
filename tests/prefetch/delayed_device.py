"""The accelerator in `delayed_device.cpp`: built if there is a compiler, and registered with torch.

Always true:
- a process that registers it keeps it as its accelerator for good: only children of the tests do
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.utils.cpp_extension import include_paths, library_paths

SOURCE = Path(__file__).with_suffix(".cpp")
COMPILER = shutil.which(os.environ.get("CXX", "g++"))
ops: Any = torch.ops.delayed


def built(folder: Path) -> Path:
    """The library, built for this torch if needed.

    Raises:
        CalledProcessError: compilation failed.
    """
    key = hashlib.sha256(SOURCE.read_bytes() + torch.__version__.encode()).hexdigest()[:16]
    library = folder / f"delayed-{key}.so"
    if not library.exists():
        unfinished = library.with_suffix(f".{os.getpid()}")
        places = [f"-I{path}" for path in include_paths()] + [f"-L{path}" for path in library_paths()]
        abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
        how = ["-shared", "-fPIC", "-std=c++20", "-w", abi, *places]
        libraries = ["-ltorch", "-ltorch_cpu", "-lc10"]
        command = [str(COMPILER), *how, str(SOURCE), *libraries, "-o", str(unfinished)]
        subprocess.run(command, check=True, capture_output=True, text=True)
        unfinished.replace(library)
    return library


def register(library: Path) -> torch.device:
    """Make it this process's accelerator, named `delayed`."""
    torch.ops.load_library(str(library))
    torch.utils.rename_privateuse1_backend("delayed")
    module: Any = ModuleType("torch.delayed")
    module.Stream, module.Event = torch.Stream, torch.Event
    module.stream = lambda stream: stream  # a stream is a context itself
    module.current_stream = torch.accelerator.current_stream
    module.is_available, module.device_count, module.current_device = lambda: True, lambda: 1, lambda: 0
    torch._register_device_module("delayed", module)  # torch's own function for a backend's module
    return torch.device("delayed", 0)
