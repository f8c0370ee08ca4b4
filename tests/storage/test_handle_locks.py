"""The lock of a value: created on first use, and shared by all threads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import torch
from safetensors.torch import save_file

import offload
from offload.storage.handle import Handle
from offload.tensor.views import handle_of


def test_values_that_are_not_read_have_no_lock(tmp_path: Path) -> None:
    save_file({f"{number}": torch.ones(8) for number in range(4)}, tmp_path / "w.safetensors")
    stored = offload.load_file(tmp_path / "w.safetensors")
    stored["2"].sum()

    assert ["2"] == [name for name, value in stored.items() if handle_of(value)._own_lock is not None]


def test_all_threads_share_one_lock() -> None:
    start = Barrier(8)

    def lock_of(handle: Handle) -> int:
        start.wait()
        return id(handle.lock)

    with ThreadPoolExecutor(8) as threads:
        for _ in range(20):
            assert 1 == len(set(threads.map(lock_of, [Handle("w", None)] * 8)))
