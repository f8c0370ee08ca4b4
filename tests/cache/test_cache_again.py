"""A cache that was closed, or could not be opened, is no longer in use."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from offload import TensorCache
from offload.errors import MissingFileError


@pytest.mark.timeout(20)
def test_a_closed_cache_can_be_opened_for_writing_while_the_old_object_lives(tmp_path: Path) -> None:
    with TensorCache.create(tmp_path, {"x": (torch.float32, ())}, 2) as old:
        old[0] = {"x": torch.tensor(1.0)}

    with TensorCache.open(tmp_path, "r+") as cache:
        cache[1] = {"x": torch.tensor(2.0)}

    assert "closed" in repr(old)
    assert [1.0, 2.0] == TensorCache.open(tmp_path)[:]["x"].tolist()


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    TensorCache.create(tmp_path, {"x": (torch.float32, ()), "y": (torch.float32, ())}, 2).close()
    (tmp_path / "y.safetensors").unlink()

    with pytest.raises(MissingFileError, match=r"y\.safetensors"):
        TensorCache.open(tmp_path)
