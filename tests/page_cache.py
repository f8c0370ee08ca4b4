"""Whether this machine lets go of cached files when asked to: in memory-backed folders there is nothing to let go."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from offload.storage.file import TensorFile
from offload.storage.pages import Range


def _can_be_dropped() -> bool:
    if not sys.platform.startswith("linux"):
        return False
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "probe.safetensors"
        save_file({"w": torch.zeros(1 << 18)}, path)
        file = TensorFile.open(path)
        entry = file.entry("w")
        file.mapped(shared=True)
        probe = Range(file, entry.start, entry.layout.nbytes, shared=True)
        probe.bring_in()
        probe.let_go()
        return probe.cached_bytes() < entry.layout.nbytes // 2


needs_page_cache = pytest.mark.skipif(
    not _can_be_dropped(), reason="cached files can't be dropped here (not Linux, or a temporary folder in memory)"
)
