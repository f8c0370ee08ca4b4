"""Models that accelerate has dispatched are refused; models on disk are passed to accelerate."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from accelerate.hooks import (
    AlignDevicesHook,
    ModelHook,
    SequentialHook,
    add_hook_to_module,
    attach_align_device_hook,
    remove_hook_from_submodules,
)
from accelerate.utils import set_module_tensor_to_device
from conftest import contents
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForCausalLM

import offload
from offload.errors import UnsupportedOpError
from tests.processes import run_script


class Net(nn.Module):
    """Two linear layers in a list, a norm with running statistics, and a buffer that is not in checkpoints."""

    def __init__(self) -> None:
        super().__init__()
        self.linears = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("scale", torch.full((1,), 3.0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linears[1](self.norm(self.linears[0](x))) * self.scale


class Tied(Net):
    def __init__(self) -> None:
        super().__init__()
        self.linears[1].weight = self.linears[0].weight


def net(kind: type[Net] = Net) -> Net:
    torch.manual_seed(0)
    made = kind().eval()
    made.norm.running_mean.normal_()
    made.norm.weight.requires_grad_(False)
    return made


def from_a_checkpoint(model: Net, folder: Path) -> None:
    folder.mkdir()
    torch.save(model.state_dict(), folder / "model.bin")
    options = {"device_map": {"linears": "disk", "norm": "cpu"}, "offload_folder": str(folder / "dat")}
    accelerate.load_checkpoint_and_dispatch(model, str(folder / "model.bin"), **options)


MIXED = {"linears.0": "cpu", "norm": "cpu", "linears.1": "disk"}
ALL_ON_DISK = {"linears": "disk", "norm": "disk"}
BLOCKS = {"preload_module_classes": ["ModuleList", "Net", "Tied"]}
WAYS: dict[str, Callable[[Net, Path], Any]] = {
    "by hooks alone": lambda model, _: attach_align_device_hook(model, execution_device="cpu", offload=True),
    "to memory": lambda model, _: accelerate.cpu_offload(model),
    "to memory with buffers": lambda model, _: accelerate.cpu_offload(model, offload_buffers=True),
    "to memory by blocks": lambda model, _: accelerate.cpu_offload(model, **BLOCKS),
    "to disk": lambda model, folder: accelerate.disk_offload(model, str(folder)),
    "to disk with buffers": lambda model, folder: accelerate.disk_offload(model, str(folder), offload_buffers=True),
    "by a map": lambda model, folder: accelerate.dispatch_model(model, ALL_ON_DISK, offload_dir=str(folder)),
    "by a mixed map": lambda model, folder: accelerate.dispatch_model(
        model, MIXED, offload_dir=str(folder), offload_buffers=True
    ),
    "from a checkpoint": from_a_checkpoint,
}


def hooks_in(model: nn.Module) -> list[Any]:
    return [module._hf_hook for module in model.modules() if hasattr(module, "_hf_hook")]


@pytest.mark.parametrize("way", WAYS)
def test_a_dispatched_model_is_refused_and_not_changed(way, tmp_path):
    plain, model, x = net(), net(), torch.randn(3, 4)
    WAYS[way](model, tmp_path / "theirs")
    before, hooks = contents(tmp_path), hooks_in(model)

    with pytest.raises(UnsupportedOpError, match=r"accelerate has dispatched this Net: .*load_checkpoint_and_dispatch"):
        offload.disk_offload(model, tmp_path / "ours")

    assert hooks == hooks_in(model)
    assert before == contents(tmp_path)
    assert torch.equal(plain(x), model(x))


@pytest.mark.parametrize("load", [offload.load_checkpoint_and_dispatch, offload.load_checkpoint_in_model])
def test_hooks_would_put_their_own_values_over_a_loaded_checkpoint_so_that_is_refused(load, tmp_path):
    save_file(net().state_dict(), tmp_path / "model.safetensors")
    model = net()
    accelerate.cpu_offload(model)

    with pytest.raises(UnsupportedOpError, match=r"its hooks hold the weights of \d modules"):
        load(model, tmp_path / "model.safetensors")
    remove_hook_from_submodules(model)
    load(model, tmp_path / "model.safetensors")

    assert all(offload.is_offloaded(parameter) for parameter in model.parameters())


def test_a_model_that_transformers_dispatched_is_refused_and_loaded_by_from_pretrained(llama_folder, tokens, tmp_path):
    theirs = AutoModelForCausalLM.from_pretrained(
        llama_folder, device_map={"": "disk"}, offload_folder=str(tmp_path / "theirs")
    )
    expected = theirs(tokens).logits

    with pytest.raises(UnsupportedOpError, match=r"offload\.from_pretrained"):
        offload.disk_offload(theirs, tmp_path / "ours")

    assert not (tmp_path / "ours").exists()
    assert torch.equal(expected, offload.from_pretrained(llama_folder)(tokens).logits)


def test_a_model_without_hooks_needs_no_accelerate():
    script = """
        import sys, offload, torch
        offload.disk_offload(torch.nn.Linear(2, 2), execution_device="cpu")
        assert "accelerate" not in sys.modules
    """

    run_script(script, fresh=True)


class PlusOne(ModelHook):
    def post_forward(self, module: nn.Module, output: torch.Tensor) -> torch.Tensor:
        return output + 1


def test_hooks_that_hold_no_weights_stay():
    model, x = net(), torch.randn(3, 4)
    add_hook_to_module(model.linears[0], SequentialHook(PlusOne(), PlusOne()))
    add_hook_to_module(model.norm, AlignDevicesHook(execution_device="cpu", io_same_device=True))
    hooks, expected = hooks_in(model), model(x)
    offload.disk_offload(model, execution_device="cpu")

    assert hooks == hooks_in(model)
    assert torch.equal(expected, model(x))
    remove_hook_from_submodules(model)
    assert torch.equal(net()(x), model(x))


@pytest.mark.parametrize("way", [way for way in WAYS if way != "from a checkpoint"])
@pytest.mark.parametrize("kind", [Net, Tied])
def test_accelerate_takes_a_model_on_disk_as_it_is_and_one_that_came_back_to_memory(way, kind, tmp_path):
    plain, x = net(kind), torch.randn(3, 4)
    model = offload.disk_offload(net(kind), tmp_path / "ours")
    before = contents(tmp_path / "ours")
    back = offload.materialize(offload.disk_offload(net()))
    WAYS[way](model, tmp_path / "theirs")
    WAYS[way](back, tmp_path / "of memory")

    assert torch.equal(plain(x), model(x))
    assert hooks_in(model)
    assert before == contents(tmp_path / "ours")
    if (way, kind) != ("to memory by blocks", Tied):  # then accelerate leaves a plain model's second name empty
        remove_hook_from_submodules(model)
        assert torch.equal(plain(x), model(x))
    assert torch.equal(net()(x), back(x))
    remove_hook_from_submodules(back)
    assert {nn.Parameter} == {type(parameter) for parameter in back.parameters()}


def test_accelerate_empties_a_parameter_on_disk_to_a_plain_one():
    """accelerate and peft pass on its attributes, too."""
    weight = offload.disk_offload(nn.Linear(2, 2)).weight
    weight.mark = "kept"
    emptied = type(weight)(weight.to("meta"), requires_grad=False)
    with accelerate.init_empty_weights():
        module = nn.Module()
        module.register_parameter("weight", weight)

    for one, trains in ((emptied, False), (module.weight, True)):
        assert nn.Parameter is type(one)
        assert one.is_meta
        assert trains == one.requires_grad
    assert "kept" == module.weight.mark
    assert offload.is_offloaded(weight)


@pytest.mark.parametrize("value", [None, torch.ones(2, 2)])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_accelerate_sets_a_tensor_of_a_module_on_disk(device, value):
    module = offload.disk_offload(nn.Linear(2, 2).requires_grad_(False))
    expected = module.weight.materialize() if value is None else value
    set_module_tensor_to_device(module, "weight", device, value)

    assert not module.weight.requires_grad
    assert torch.device(device) == module.weight.device
    if device == "cpu":
        assert offload.is_offloaded(module.weight)
        assert torch.equal(expected, module.weight)
