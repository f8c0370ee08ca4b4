"""safetensors and huggingface_hub save and load models on disk with their own functions."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import contents
from huggingface_hub import load_torch_model, save_torch_model, save_torch_state_dict
from safetensors.torch import load_file, load_model, save_file, save_model
from torch import nn

import offload
from tests.equal import assert_equal
from tests.processes import run_script


class Tied(nn.Module):
    """Two layers that share a weight, and a norm with statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 8, bias=False)
        self.base = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.tie_weights()

    def tie_weights(self) -> None:
        self.head.weight = self.base.weight


def net(seed: int) -> Tied:
    torch.manual_seed(seed)
    made = Tied().eval()
    made.norm.running_mean.normal_()
    return made


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Values of another model than the one that they are loaded into."""
    (tmp_path / "checkpoint").mkdir()
    save_model(net(1), tmp_path / "checkpoint" / "model.safetensors")
    return tmp_path / "checkpoint"


@pytest.fixture
def on_disk(checkpoint: Path) -> Tied:
    """Over its checkpoint, including buffers."""
    with offload.init_empty_weights():
        empty = Tied().eval()
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
    SAVERS[by](net(1), tmp_path / "plain")
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
    SAVERS[by](net(2), tmp_path / "new")
    before = contents(checkpoint), contents(tmp_path / "new")
    (load_by_safetensors if by == "safetensors" else load_torch_model)(on_disk, tmp_path / "new")

    assert before == (contents(checkpoint), contents(tmp_path / "new"))
    assert_equal(net(2), on_disk)
    assert on_disk.head.weight is on_disk.base.weight
    folders = {tmp_path / "new", checkpoint}
    assert all(parameter.offload_path.parent not in folders for parameter in on_disk.parameters())


MEASURED = """
    import json, sys, torch, offload
    from huggingface_hub import save_torch_model
    from safetensors.torch import load_model, save_model
    from torch import nn
    from tests.peak import Peak

    source, folder, what = sys.argv[1:]

    def network(path, layers, size):
        with offload.init_empty_weights():
            empty = nn.Sequential(*(nn.Linear(size, size, bias=False) for _ in range(layers)))
        return offload.load_checkpoint_and_dispatch(empty, path)

    def act(model, path):
        if what == "save_torch_model":
            return save_torch_model(model, folder)
        if what == "save_model":
            return save_model(model, f"{folder}/model.safetensors")
        return load_model(model, path)

    act(network(sys.argv[1] + ".small", 1, 8), sys.argv[1] + ".small")  # imports, first calls
    model = network(source, 4, 2400)
    with Peak() as peak:
        act(model, source)
    print(json.dumps(dict(grown=peak.nbytes, looks=peak.calls)))
"""


@pytest.mark.parametrize("what", ["save_model", "save_torch_model", "load_model"])
def test_saving_and_loading_take_little_memory(tmp_path, what):
    """A model of 92 MB, with 4 values."""
    values = {f"{layer}.weight": torch.full((2400, 2400), layer + 0.5) for layer in range(4)}
    save_file(values, tmp_path / "source")
    save_file({"0.weight": torch.ones(8, 8)}, tmp_path / "source.small")
    (tmp_path / "saved").mkdir()
    measured = json.loads(run_script(MEASURED, tmp_path / "source", tmp_path / "saved", what))

    assert measured["looks"] > 5
    assert measured["grown"] < 16e6
    if what != "load_model":
        found = load_file(tmp_path / "saved" / "model.safetensors")
        assert values.keys() == found.keys()
        assert all(torch.equal(value, found[name]) for name, value in values.items())
