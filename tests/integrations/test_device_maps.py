"""Device maps in practice: on disk, in memory and left out, in one model."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import contents
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForCausalLM

import offload
from offload.errors import DeviceMapError
from offload.models import loader
from offload.models.device_map import Place, move_activations
from offload.models.slots import tensor_slots


class Block(nn.Module):
    """A linear layer and a norm, which has buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.act = nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.norm(self.linear(x)))


class Net(nn.Module):
    """Blocks in a list, and a head whose weight is used without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block() for _ in range(3)])
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x @ self.head.weight.t() + self.head.bias


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    return Net().eval()


@pytest.fixture
def checkpoint(net: Net, tmp_path: Path) -> Path:
    save_file(net.state_dict(), tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def empty_net() -> Net:
    with offload.init_empty_weights():
        return Net().eval()


def on_disk(model: nn.Module) -> set[str]:
    return {name for name, tensor in model.state_dict().items() if offload.is_offloaded(tensor)}


def in_module(model: nn.Module, *modules: str) -> set[str]:
    return {f"{module}.{name}" for module in modules for name, _ in model.get_submodule(module).named_parameters()}


MAPS: list[tuple[Any, tuple[str, ...]]] = [
    ("disk", ("layers", "head")),
    ("disk:cpu", ("layers", "head")),
    ("cpu", ()),
    (torch.device("cpu"), ()),
    ({"": "disk"}, ("layers", "head")),
    ({"": "cpu", "layers.1": "disk"}, ("layers.1",)),
    ({"": "disk", "layers": "cpu", "layers.2": "disk"}, ("layers.2", "head")),
    (
        {"layers.0": "cpu", "layers.1": "disk", "layers.2": torch.device("cpu"), "head": "disk:cpu"},
        ("layers.1", "head"),
    ),
    ({"layers": "disk", "layers.1.norm": "cpu", "head": "cpu"}, ("layers.0", "layers.1.linear", "layers.2")),
]


@pytest.mark.parametrize(("device_map", "expected"), MAPS)
def test_each_tensor_is_where_the_map_says_and_results_are_those_of_the_plain_model(
    device_map, expected, net, checkpoint
):
    x = torch.randn(5, 8)
    loaded = offload.load_checkpoint_and_dispatch(empty_net(), checkpoint, device_map)

    assert in_module(net, *expected) == on_disk(loaded)
    assert torch.equal(net(x), loaded(x))


def test_modules_on_meta_are_not_loaded_and_the_rest_runs(net, checkpoint):
    x = torch.randn(5, 8)
    loaded = offload.load_checkpoint_and_dispatch(
        empty_net(), checkpoint, {"layers.0": "disk", "layers.1": "cpu", "layers.2": "meta", "head": "meta"}
    )

    assert all(parameter.is_meta for parameter in [*loaded.layers[2].parameters(), *loaded.head.parameters()])
    assert torch.equal(net.layers[1](net.layers[0](x)), loaded.layers[1](loaded.layers[0](x)))
    assert not any(hasattr(module, "_hf_hook") for module in loaded.modules())


@pytest.mark.parametrize("word", ["auto", "balanced", "balanced_low_0", "sequential"])
@pytest.mark.parametrize("amount", [1000, "1KB", "1MiB"])
def test_automatic_words_fill_memory_and_leave_the_rest_on_disk(word, amount, net, checkpoint):
    x = torch.randn(5, 8)
    loaded = offload.load_checkpoint_and_dispatch(empty_net(), checkpoint, word, max_memory={"cpu": amount})

    some_on_disk = amount != "1MiB"
    assert some_on_disk == bool(on_disk(loaded))
    assert len(on_disk(loaded)) < len(list(net.parameters()))
    assert torch.equal(net(x), loaded(x))


@pytest.mark.parametrize(("classes", "split"), [(None, 1), (["Block"], 0)])
def test_blocks_that_are_not_to_be_split_are_whole_on_disk_or_in_memory(checkpoint, classes, split):
    options = {"max_memory": {"cpu": 1000}, "no_split_module_classes": classes}
    loaded = offload.load_checkpoint_and_dispatch(empty_net(), checkpoint, "sequential", **options)

    kinds = [{offload.is_offloaded(parameter) for parameter in layer.parameters()} for layer in loaded.layers]
    assert split == sum(kind == {True, False} for kind in kinds)
    assert {True, False} == set.union(*kinds)


def test_the_map_that_transformers_leaves_on_a_model_is_taken_as_it_is(llama_folder, tokens, tmp_path):
    device_map = dict.fromkeys(("model.embed_tokens", "model.norm", "lm_head", "model.rotary_emb"), "cpu")
    theirs = AutoModelForCausalLM.from_pretrained(
        llama_folder, device_map={**device_map, "model.layers": "disk"}, offload_folder=str(tmp_path)
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours = offload.from_pretrained(llama_folder, device_map=theirs.hf_device_map)

    assert {name for name, _ in ours.named_parameters() if ".layers." in name} == on_disk(ours)
    assert torch.equal(theirs(tokens).logits, ours(tokens).logits)


def test_a_model_with_a_mixed_map_is_saved_by_transformers_as_a_plain_one(llama_folder, tokens, tmp_path):
    """It has no `hf_device_map`: if that contained "disk", transformers would look for accelerate's hooks."""
    model = offload.from_pretrained(llama_folder, device_map={"": "cpu", "model.layers.1": "disk"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.save_pretrained(tmp_path / "saved")

    assert not hasattr(model, "hf_device_map")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert torch.equal(model(tokens).logits, again(tokens).logits)


@pytest.mark.parametrize("load", [offload.load_checkpoint_and_dispatch, offload.load_checkpoint_in_model])
def test_a_map_that_cannot_be_followed_is_refused_before_anything_is_loaded(load, checkpoint):
    model, before = empty_net(), contents(checkpoint.parent)

    with pytest.raises(DeviceMapError, match=r"no place for 'layers\.2\.linear\.weight'"):
        load(model, checkpoint, {"layers.0": "disk", "layers.1": "cpu", "head": "cpu"})
    assert all(parameter.is_meta for parameter in model.parameters())
    assert before == contents(checkpoint.parent)


def test_an_automatic_word_is_for_the_function_that_knows_the_budget(checkpoint):
    with pytest.raises(DeviceMapError, match="'auto' is not a place that a device map can name here"):
        offload.load_checkpoint_in_model(empty_net(), checkpoint, "auto")


class Tied(nn.Module):
    """A head that shares the weight of the first layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4, bias=False)
        self.last = nn.Linear(4, 4, bias=False)
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x).relu())


@pytest.mark.parametrize("words", [("cpu", "disk"), ("disk", "cpu"), ("disk", "disk:cpu")])
def test_tied_weights_that_the_map_separates_go_where_their_first_name_goes(words, tmp_path):
    plain, x = Tied(), torch.randn(2, 4)
    save_file({"first.weight": plain.first.weight.data}, tmp_path / "model.safetensors")
    loaded = offload.load_checkpoint_and_dispatch(Tied(), tmp_path, dict(zip(("first", "last"), words, strict=True)))

    assert loaded.first.weight is loaded.last.weight
    assert words[0].startswith("disk") == offload.is_offloaded(loaded.first.weight)
    assert torch.equal(plain(x), loaded(x))


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> dict[str, torch.device]:
    """Captures what would run where, on accelerators that need not exist."""
    found: dict[str, torch.device] = {}
    monkeypatch.setattr(loader, "move_activations", lambda model, devices, skip_keys: found.update(devices))
    return found


GPU_0, GPU_1 = torch.device("cuda", 0), torch.device("cuda", 1)


def test_a_module_with_a_tied_weight_runs_where_the_weight_is(planned):
    tied = Tied()
    placed = {"first.weight": Place(True, GPU_0), "last.weight": Place(True, GPU_1)}
    loader.connect_devices(tied, tensor_slots(tied), placed, None)
    assert {} == planned  # everything is on the first

    model = nn.Sequential(Tied(), nn.Linear(4, 4, bias=False))
    placed = {"0.first.weight": Place(True, GPU_0), "0.last.weight": Place(True, GPU_1), "1.weight": Place(True, GPU_1)}
    loader.connect_devices(model, tensor_slots(model), placed, None)
    assert {"": GPU_0, "0": GPU_0, "0.first": GPU_0, "0.last": GPU_0, "1": GPU_1} == planned


def test_hooks_move_the_inputs_of_a_module_to_its_device_and_the_result_back(net):
    """The CPU stands in for several devices."""
    x = torch.randn(5, 8)
    expected = net(x)
    move_activations(net, {"": torch.device("cpu"), "layers.1": torch.device("cpu")}, skip_keys=["mask"])

    hooks = {name: module._hf_hook for name, module in net.named_modules() if hasattr(module, "_hf_hook")}
    assert {"": True, "layers.1": False} == {name: hook.io_same_device for name, hook in hooks.items()}
    assert {torch.device("cpu")} == {hook.execution_device for hook in hooks.values()}
    assert [["mask"], ["mask"]] == [hook.skip_keys for hook in hooks.values()]
    assert not any(hook.offload for hook in hooks.values())
    assert torch.equal(expected, net(x))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.gpu
@pytest.mark.parametrize(
    ("device_map", "on_gpu"),
    [
        *((word, {"layers.0", "layers.1", "layers.2", "head"}) for word in (0, "cuda:0", "disk:cuda:0", "disk")),
        ({"": "disk:cpu", "layers.1": "disk:cuda:0"}, {"layers.1"}),
        ({"layers.0": "cpu", "layers.1": 0, "layers.2": "disk", "head": 0}, {"layers.1", "layers.2", "head"}),
    ],
)
def test_modules_run_on_the_gpu_and_off_it_in_one_model(device_map, on_gpu, net, checkpoint):
    x = torch.randn(5, 8)
    loaded = offload.load_checkpoint_and_dispatch(empty_net(), checkpoint, device_map)

    modules = {f"layers.{n}": loaded.layers[n] for n in range(3)} | {"head": loaded.head}
    for name, module in modules.items():
        expected = "cuda" if name in on_gpu else "cpu"
        assert {expected} == {tensor.device.type for tensor in (*module.parameters(), *module.buffers())}
    given = x if on_gpu != set(modules) else x.cuda()
    torch.testing.assert_close(net(x), loaded(given).cpu())
