"""safetensors and huggingface_hub save and load models on disk with their own functions."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import contents
from huggingface_hub import load_torch_model, save_torch_model, save_torch_state_dict
from safetensors.torch import load_model, save_model
from torch import nn

import offload
from tests.equal import assert_equal
from tests.models.networks import Network, network


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Values of another model than the one that they are loaded into."""
    (tmp_path / "checkpoint").mkdir()
    save_model(network(1), tmp_path / "checkpoint" / "model.safetensors")
    return tmp_path / "checkpoint"


@pytest.fixture
def on_disk(checkpoint: Path) -> Network:
    with offload.init_empty_weights():
        empty = Network().eval()
    return offload.load_checkpoint_and_dispatch(empty, checkpoint, offload_buffers=True)


def parts(folder: Path) -> dict[str, tuple[Any, bytes]]:
    """Every file as its header, or all of it, and its data; the library writes metadata in random order."""
    found = {}
    for name, (_, data) in contents(folder).items():
        end = 8 + int.from_bytes(data[:8], "little") if name.endswith(".safetensors") else len(data)
        found[name] = json.loads(data[8 if end < len(data) else 0 : end]), data[end:]
    return found


SAVERS: dict[str, Callable[[Any, Path], Any]] = {
    "safetensors": lambda model, folder: save_model(model, str(folder / "model.safetensors")),
    "the hub": save_torch_model,
    "the hub, in shards": lambda model, folder: save_torch_model(model, folder, max_shard_size=100),
    "the hub, from a state dict": lambda model, folder: save_torch_state_dict(
        model.state_dict(), folder, shared_tensors_to_discard=["base.weight"]
    ),
}


@pytest.mark.parametrize("by", SAVERS)
def test_a_model_on_disk_is_saved_as_one_in_memory(on_disk, checkpoint, tmp_path, by):
    """Byte for byte. Tied weights are saved once, under the same name."""
    before = contents(checkpoint)
    for name in ("plain", "disk"):
        (tmp_path / name).mkdir()
    SAVERS[by](network(1), tmp_path / "plain")
    SAVERS[by](on_disk, tmp_path / "disk")

    assert parts(tmp_path / "plain") == parts(tmp_path / "disk")
    assert before == contents(checkpoint)
    assert all(map(offload.is_offloaded, on_disk.parameters()))


def load_by_safetensors(model: nn.Module, folder: Path) -> None:
    assert (set(), []) == load_model(model, folder / "model.safetensors")


@pytest.mark.parametrize("by", ["safetensors", "the hub", "the hub, in shards"])
def test_loaded_values_go_to_own_files_of_the_model(on_disk, checkpoint, tmp_path, by):
    """Neither the checkpoint that the model referred to nor the loaded one is written to."""
    (tmp_path / "new").mkdir()
    SAVERS[by](network(2), tmp_path / "new")
    before = contents(checkpoint), contents(tmp_path / "new")
    (load_by_safetensors if by == "safetensors" else load_torch_model)(on_disk, tmp_path / "new")

    assert before == (contents(checkpoint), contents(tmp_path / "new"))
    assert_equal(network(2), on_disk)
    assert on_disk.head.weight is on_disk.base.weight
    folders = {tmp_path / "new", checkpoint}
    assert all(parameter.offload_path.parent not in folders for parameter in on_disk.parameters())
