"""torchao's `quantize_` on disk: the same model as in memory, also saved and loaded again."""

import copy
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import contents
from torch import nn

import offload
from offload import OffloadedTensor
from offload.errors import MapError, UnknownSubclassError, WriteError
from offload.integrations import torchao as ours
from offload.storage import subclasses
from tests.processes import run_script
from tests.quantized import IN_TORCHAOS_FORM, WEIGHT_ONLY, identical
from tests.tiny import tiny_checkpoint

torchao = pytest.importorskip("torchao.quantization")
transformers = pytest.importorskip("transformers")

TOKENS = torch.arange(8)[None]
MODELS = {"plain": (False, "float32"), "tied, of 16 bits": (True, "bfloat16")}
CONFIGS = [name for name in WEIGHT_ONLY if name not in ("int1x", "int2x", "int5x", "int6x", "int7x")]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1, "num_key_value_heads": 4}
    sizes |= {"vocab_size": 64, "max_position_embeddings": 64, "max_shard_size": "5GB"}
    return {
        name: tiny_checkpoint(tmp_path_factory.mktemp("llama"), **sizes, tie_word_embeddings=tied, dtype=dtype)
        for name, (tied, dtype) in MODELS.items()
    }


@pytest.fixture
def folder(folders: dict[str, Path]) -> Path:
    return folders["plain"]


def in_memory(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto")


def int8() -> Any:
    return WEIGHT_ONLY["int8"]()


@torch.no_grad()
def logits(model: nn.Module) -> torch.Tensor:
    return model(TOKENS).logits


def assert_same(expected: nn.Module, found: nn.Module) -> None:
    """Name by name, class by class, bit by bit; and all of `found` is on disk."""
    parameters = dict(expected.named_parameters())
    assert list(parameters) == [name for name, _ in found.named_parameters()]
    for name, parameter in found.named_parameters():
        assert offload.is_offloaded(parameter), name
        assert isinstance(parameter, nn.Parameter)
        assert parameters[name].requires_grad == parameter.requires_grad, name
        assert identical(parameters[name].detach(), parameter.materialize()), name


def is_head(_: nn.Module, name: str) -> bool:
    return name == "lm_head"


# As in memory


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("config", CONFIGS)
def test_a_model_quantized_on_disk_is_that_quantized_in_memory(folders, tmp_path, config, kind):
    """Weights and logits, bit for bit; also saved, and loaded again by transformers and on disk."""
    expected, found = in_memory(folders[kind]), offload.from_pretrained(folders[kind])
    for model, quantize in ((expected, torchao.quantize_), (found, offload.quantize_)):
        torch.manual_seed(0)  # codebooks start at random, and take long
        quantize(model, WEIGHT_ONLY[config](), is_head if config == "codebook" else None)

    assert_same(expected, found)
    assert torch.equal(logits(expected), logits(found))
    if config in IN_TORCHAOS_FORM:
        found.save_pretrained(tmp_path)
        for loaded in (in_memory(tmp_path), offload.from_pretrained(tmp_path)):
            assert torch.equal(logits(expected), logits(loaded))
        assert_same(in_memory(tmp_path), loaded)


def dynamic_int4() -> Any:
    return torchao.Int8DynamicActivationIntxWeightConfig(torch.int4, torchao.PerGroup(32))


def is_linear_or_embedding(module: nn.Module, _: str) -> bool:
    return isinstance(module, nn.Linear | nn.Embedding)


def is_in_a_layer(module: nn.Module, name: str) -> bool:
    return isinstance(module, nn.Linear) and "layers" in name


BY_NAME = {"re:.*q_proj.weight": WEIGHT_ONLY["int4x"], "lm_head": WEIGHT_ONLY["int8"]}
OTHER_WAYS: dict[str, list[tuple[Callable[[], Any], Any]]] = {
    "dynamic int8": [(lambda: torchao.Int8DynamicActivationInt8WeightConfig(set_inductor_config=False), None)],
    "dynamic int4": [(dynamic_int4, None)],
    "embeddings": [(WEIGHT_ONLY["int8x"], is_linear_or_embedding)],
    "a filter": [(WEIGHT_ONLY["int8"], is_in_a_layer)],
    "by name": [(lambda: torchao.FqnToConfig({name: config() for name, config in BY_NAME.items()}), None)],
}


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("way", OTHER_WAYS)
def test_other_configurations_and_filters_do_as_in_memory(folders, way, kind):
    """With quantized activations, for embeddings, by name, and with modules that are replaced."""
    expected, found = in_memory(folders[kind]), offload.from_pretrained(folders[kind])
    for config, wanted in OTHER_WAYS[way]:
        torchao.quantize_(expected, config(), wanted)
        offload.quantize_(found, config(), wanted)

    assert_same(expected, found)
    assert torch.equal(logits(expected), logits(found))


@pytest.mark.parametrize("on_disk", [False, True], ids=["in-memory", "on-disk"])
@pytest.mark.parametrize("config", ["int8", "int4x-group", "float8", "nvfp4"])
def test_torchao_rebuilds_weights_from_shards_in_its_own_form(tmp_path, config, on_disk):
    """In memory, and from tensors on disk; a dtype that is asked for does not apply to inner tensors."""
    from safetensors import safe_open
    from safetensors.torch import load_file
    from torchao.prototype.safetensors.safetensors_support import unflatten_tensor_state_dict

    model, x = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256)), torch.randn(2, 256)
    torchao.quantize_(model, WEIGHT_ONLY[config]())
    stored = offload.disk_offload(copy.deepcopy(model)) if on_disk else model
    files = offload.save_checkpoint(stored, tmp_path, 2000, dtype=torch.bfloat16)[:-1]
    with safe_open(files[0], "pt") as file:
        metadata = file.metadata()

    assert len(files) > 2
    for load in (load_file, offload.load_file):
        tensors = {name: value for path in files for name, value in load(path).items()}
        found, rest = unflatten_tensor_state_dict(tensors, metadata)
        assert {} == rest
        assert model.state_dict().keys() == found.keys()
        for layer, name in zip(model, "01", strict=True):
            assert type(layer.weight.data) is type(found[f"{name}.weight"])
            assert torch.equal(F.linear(x, layer.weight), F.linear(x, found[f"{name}.weight"]))
            assert torch.equal(layer.bias.bfloat16(), found[f"{name}.bias"])


def test_an_offload_folder_keeps_weights_of_any_class(folder, tmp_path):
    """Even those that torchao's format does not support: the quantized values are there, and restore the model."""
    found = offload.from_pretrained(folder, offload_dir=tmp_path)
    offload.quantize_(found, WEIGHT_ONLY["int4-opaque"]())
    names = {name for name, _ in found.named_parameters() if "proj" in name or "lm_head" in name}
    again = offload.from_pretrained(folder)
    again.load_state_dict(offload.load_file(tmp_path), assign=True, strict=False)

    assert {f"{name}.safetensors" for name in names} == {path.name for path in tmp_path.glob("[!.]*")}
    assert torch.equal(logits(found), logits(again))


# Where weights are


def test_a_checkpoint_stays_as_it_is_and_values_of_a_folder_are_replaced(folder, tmp_path):
    """Referenced values go to files of their own; those in a folder change there, under their names."""
    before = contents(folder)
    dispatched = offload.load_checkpoint_and_dispatch(transformers.LlamaForCausalLM(in_memory(folder).config), folder)
    stored = offload.disk_offload(in_memory(folder), tmp_path)
    paths = {name: parameter.offload_path for name, parameter in stored.named_parameters()}
    expected = in_memory(folder)
    torchao.quantize_(expected, int8())
    for model in (dispatched, stored):
        offload.quantize_(model, int8())
        assert_same(expected, model)

    assert before == contents(folder)
    assert paths == {name: parameter.offload_path for name, parameter in stored.named_parameters()}
    assert set(paths) == set(offload.load_file(tmp_path))
    assert identical(expected.lm_head.weight.detach(), offload.load_file(tmp_path)["lm_head.weight"].materialize())


def test_weights_in_memory_stay_in_memory(folder):
    model = offload.from_pretrained(folder, device_map={"": "disk", "lm_head": "cpu"})
    offload.quantize_(model, int8())

    assert "Int8Tensor" == type(model.lm_head.weight).__name__
    assert "Int8Tensor" == type(model.model.layers[0].mlp.up_proj.weight.materialize()).__name__


def test_a_tied_embedding_stays_when_the_head_is_quantized(folders, tmp_path):
    """The head gets a file under its own name, and the model says that they are no longer tied."""
    model = offload.disk_offload(in_memory(folders["tied, of 16 bits"]), tmp_path)
    embedding = model.model.embed_tokens.weight
    before = embedding.materialize()
    offload.quantize_(model, int8())

    assert embedding is model.model.embed_tokens.weight
    assert torch.equal(before, embedding.materialize())
    assert ("lm_head.weight", tmp_path) == (model.lm_head.weight.name, model.lm_head.weight.offload_dir)
    assert not model.config.tie_word_embeddings
    assert {} == model.all_tied_weights_keys
    model.tie_weights()
    assert "Int8Tensor" == type(model.lm_head.weight.materialize()).__name__


def test_a_weight_tied_to_a_quantized_one_becomes_separate(tmp_path):
    """Also for two layers that share a weight, which torchao splits."""
    layers = nn.ModuleDict({"b": nn.Linear(256, 64), "a": nn.Linear(256, 64), "e": nn.Embedding(64, 256)})
    stored = OffloadedTensor.from_original_tensor(torch.randn(64, 256), "a.weight", tmp_path)
    for layer in layers.values():
        layer.weight = nn.Parameter(stored.detach()) if layer is layers["b"] else layers["b"].weight
    plain = stored.materialize()
    offload.quantize_(layers, int8())

    assert ["b.weight", "a.weight.quantized", "a.weight"] == [layer.weight.name for layer in layers.values()]
    assert torch.equal(plain, layers["e"].weight.materialize())
    assert identical(layers["a"].weight.materialize(), layers["b"].weight.materialize())


def test_a_module_that_replaces_another_goes_to_disk(tmp_path):
    """Its weight, which torchao never assigned to the old module, replaces the old value."""
    from torchao.core.config import AOBaseConfig

    class Swapped(AOBaseConfig):
        """Replaces a layer by a new one made in memory."""

    @torchao.register_quantize_module_handler(Swapped)
    def swap(module: nn.Linear, _: Swapped) -> nn.Module:
        made = nn.Linear(module.in_features, module.out_features, bias=False)
        made.weight = nn.Parameter(module.weight.detach() * 2)
        torchao.quantize_(made, int8())
        return made

    model = nn.Sequential(nn.Linear(256, 64, bias=False), nn.Linear(64, 256, bias=False))
    offload.disk_offload(model, tmp_path)
    expected = nn.Linear(256, 64, bias=False)
    expected.weight = nn.Parameter(model[0].weight.materialize() * 2)
    torchao.quantize_(expected, int8())

    offload.quantize_(model, Swapped())

    assert identical(expected.weight.detach(), model[0].weight.materialize())
    assert ["0.weight.safetensors", "1.weight.safetensors"] == sorted(path.name for path in tmp_path.glob("[!.]*"))


# One by one


def test_an_interruption_leaves_a_model_that_works_and_a_second_call_does_the_rest(folder):
    model, expected = offload.from_pretrained(folder), in_memory(folder)
    torchao.quantize_(expected, int8())
    seen: list[str] = []

    def interrupted(module: nn.Module, name: str) -> bool:
        if len(seen) == 4:
            raise KeyboardInterrupt
        if isinstance(module, nn.Linear):
            seen.append(name)
        return isinstance(module, nn.Linear)

    with pytest.raises(KeyboardInterrupt):
        offload.quantize_(model, int8(), interrupted)
    kinds = {name: type(parameter.materialize()).__name__ for name, parameter in model.named_parameters()}
    assert {f"{name}.weight" for name in seen[:4]} == {name for name, kind in kinds.items() if kind == "Int8Tensor"}
    assert logits(model).isfinite().all()
    first = model.get_parameter(f"{seen[0]}.weight")
    offload.quantize_(model, int8())

    assert first is model.get_parameter(f"{seen[0]}.weight")
    assert_same(expected, model)


def test_an_error_of_torchao_names_the_layer():
    """Here, a group size that does not divide the columns."""
    config = torchao.IntxWeightOnlyConfig(torch.int4, granularity=torchao.PerGroup(32))
    model = offload.disk_offload(nn.Sequential(nn.Linear(64, 8), nn.ReLU(), nn.Linear(50, 8)))

    with pytest.raises(MapError, match=r"torchao failed at '2' \(AssertionError: .*weights before it are quantized"):
        offload.quantize_(model, config)

    assert "IntxUnpackedToInt8Tensor" == type(model[0].weight.materialize()).__name__
    assert offload.is_offloaded(model[2].weight)


def test_a_failed_write_leaves_the_old_value(tmp_path, monkeypatch):
    model = offload.disk_offload(nn.Sequential(nn.Linear(256, 64), nn.Linear(64, 64)), tmp_path)
    before = model[1].weight.materialize()
    replace = os.replace

    def fails_at_the_second(*args: Any) -> None:
        if args[1].name == "1.weight.safetensors":
            raise OSError(28, "No space left on device")
        replace(*args)

    monkeypatch.setattr(os, "replace", fails_at_the_second)
    with pytest.raises(WriteError, match=r"1\.weight"):
        offload.quantize_(model, int8())

    assert "Int8Tensor" == type(model[0].weight.materialize()).__name__
    assert torch.equal(before, model[1].weight.materialize())
    assert {f"{name}.safetensors" for name, _ in model.named_parameters()} == {p.name for p in tmp_path.glob("[!.]*")}
    assert not list(tmp_path.glob(".offload-tmp*"))


def test_an_unknown_class_is_named_and_the_old_value_stays(monkeypatch):
    monkeypatch.delitem(subclasses._KNOWN["torchao"], "Int8Tensor")
    model = offload.disk_offload(nn.Sequential(nn.Linear(256, 64)))

    with pytest.raises(UnknownSubclassError, match=r"tensor '0.weight': Int8Tensor .*register_subclass\(Int8Tensor\)"):
        offload.quantize_(model, int8())

    assert type(model[0].weight.materialize()) is torch.Tensor


def test_quantizing_does_not_affect_other_threads():
    """A parameter that another thread sets meanwhile is left alone; the same here afterwards."""
    model = offload.disk_offload(nn.Sequential(nn.Linear(256, 64)))
    other = offload.disk_offload(nn.Linear(8, 8))
    plain = nn.Parameter(torch.ones(8, 8))
    hooks = len(nn.modules.module._global_parameter_registration_hooks)

    def wanted(module: nn.Module, _: str) -> bool:
        thread = threading.Thread(target=setattr, args=(other, "weight", plain))
        thread.start()
        thread.join()
        return isinstance(module, nn.Linear)

    offload.quantize_(model, int8(), wanted)

    assert plain is other.weight
    assert hooks == len(nn.modules.module._global_parameter_registration_hooks)


# Memory

SCRIPT = """
import json, sys, torch, offload
from torch import nn
from tests.peak import Peak
from tests.quantized import WEIGHT_ONLY

def model(layers, width):
    layers = [nn.Linear(width, width, bias=False, dtype=torch.bfloat16, device="meta") for _ in range(layers)]
    for number, layer in enumerate(layers):
        stored = offload.OffloadedTensor.zeros((width, width), dtype=torch.bfloat16, name=f"{width}.{number}")
        layer.weight = nn.Parameter(stored)
    return nn.Sequential(*layers)

offload.quantize_(model(1, 256), WEIGHT_ONLY["int8"]())  # imports, first calls
made = model(24, 2048)
with Peak() as quantizing:
    offload.quantize_(made, WEIGHT_ONLY["int8"]())
with Peak() as saving:
    offload.save_checkpoint(made, sys.argv[1])
print(json.dumps([quantizing.nbytes, saving.nbytes]))
"""


def test_quantizing_takes_the_memory_of_one_weight(tmp_path):
    """torchao's temporaries for an 8 MiB weight, four times that in 32 bits, and unreturned freed memory; but
    not the results of all 24, of 4 MiB each.
    """
    quantizing, saving = json.loads(run_script(SCRIPT, tmp_path).splitlines()[-1])

    assert quantizing < (4 * 16 << 20) + (48 << 20)
    assert saving < 16e6


def test_an_interrupt_while_the_hook_is_registered_leaves_no_run_active(monkeypatch):
    def interrupted(hook: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ours, "register_module_parameter_registration_hook", interrupted)

    with pytest.raises(KeyboardInterrupt):
        offload.quantize_(nn.Linear(2, 2), torchao.Int8WeightOnlyConfig())

    assert ours._AT_WORK.get() is None
