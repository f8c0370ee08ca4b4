"""The accelerator in `delayed_device.cpp`: built if there is a compiler, and registered with torch.

Always true:
- a process that registers it keeps it as its accelerator for good: only children of the tests do
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors.torch import save_file
from torch.utils.cpp_extension import include_paths, library_paths

from offload import OffloadedTensor
from offload.prefetch import room, staging
from tests.processes import in_fork

SOURCE = Path(__file__).with_suffix(".cpp")
COMPILER = shutil.which(os.environ.get("CXX", "g++"))
MIB = 1 << 20
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
    module.current_stream = torch.accelerator.current_stream
    module.is_available, module.device_count, module.current_device = lambda: True, lambda: 1, lambda: 0
    torch._register_device_module("delayed", module)  # torch's own function for a backend's module
    return torch.device("delayed", 0)


def on_the_device(test: Callable[..., None]) -> Callable[..., None]:
    """Run a test in a forked child whose accelerator is the delayed device, with slots of 1 MiB.

    Without a budget nothing stays there: it has 1 GiB, which is spared; but after `filled_up_to`.

    It may request the `device`, a `folder`, and parameters.
    """
    asked = inspect.signature(test).parameters

    @functools.wraps(test)
    def run(**given: Any) -> None:
        def act() -> None:
            torch.set_num_threads(1)  # the parent's threads do not exist here
            staging._SLOT, staging._UNUSED = MIB, 2 * MIB
            given["device"], given["folder"] = register(given["delayed_library"]), given["tmp_path"]
            test(**{name: given[name] for name in asked})

        assert in_fork(act)

    del run.__wrapped__  # type: ignore[attr-defined]  # pytest is to ask for what `run` takes
    names = ["delayed_library", "tmp_path", *(name for name in asked if name not in ("device", "folder"))]
    kind = inspect.Parameter.KEYWORD_ONLY
    run.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in names])  # type: ignore[attr-defined]
    return run


def filled_up_to(nbytes: int) -> None:
    """From now on the device has room for so many more bytes of weights, and 8 MiB are spared."""
    room.LEAST_SPARE, room._SPARE_PART = 8 * MIB, sys.maxsize
    ops.limit(ops.allocated() + nbytes + 8 * MIB)


def held(stream: torch.Stream) -> Callable[[], None]:
    """Block a stream; yields a function that releases it."""
    ops.hold(stream.stream_id)
    return lambda: ops.release(stream.stream_id)


def side_of(device: torch.device) -> torch.Stream:
    """Release the stream that copies to the device."""
    way = staging._STAGINGS[device]
    assert way is not None
    return way._stream


def on_disk(folder: Path, name: str, values: torch.Tensor) -> OffloadedTensor:
    save_file({name: values}, folder / f"{name}.safetensors")
    return OffloadedTensor.from_file(folder / f"{name}.safetensors", device="delayed:0")
