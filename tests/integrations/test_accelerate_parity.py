"""The requirements in accelerate's own offloading tests, applied to ours.

The models, inputs and expectations are those of accelerate's tests (1.13 to 1.15); names and code are ours. Each test
names the upstream tests it corresponds to. Where upstream allows 1e-5, results here are bit-identical on the CPU. What
is written as `.bin` there is written as safetensors here. What needs a GPU there runs on the CPU here, and on a GPU if
there is one.

Covered in other files here:
- big_modeling: cpu_offload, cpu_offload_with_unused_submodules, cpu_offload_with_hook; offload: offload_weights_loader;
  hooks: align_devices_as_cpu_offload, attach_align_device_hook_as_cpu_offload, and with_weight_map: `test_accelerate`
- modeling_utils: infer_auto_device_map and its variants, get_balanced_memory, clean_device_map: `test_device_map`, as
  accelerate's functions do the work and the maps are equal
- modeling_utils: convert_file_size: `test_memory` and `test_device_map`, for `as_bytes`
- hooks: align_devices_as_model_parallelism: where things would run is in `test_device_map`

Not applicable:
- big_modeling: init_on_device: there is no such function, as `torch.device` is a context
- big_modeling: dispatch_model_with_accelerator: device indices are torch's own
- big_modeling: dispatch_model_force_hooks: no hooks are needed
- big_modeling: dispatch_model_tied_weights_memory, and nested: they measure GPU memory; the results, and tied weights
  in one file, are tested below
- big_modeling: cpu_offload_gpt2, disk_offload_gpt2, dispatch_model_gpt2_on_two_devices: they download GPT-2; a tiny
  Llama generates below
- big_modeling: dispatch_model_bnb, int8_simple, fp4_simple: bitsandbytes; its 8-bit weights are refused
  (`test_accelerate`)
- big_modeling: RefuseRecurrentLayersTester: sequence parallelism
- modeling_utils: infer_auto_device_map_on_t0pp: downloads, and tests only accelerate's function
- modeling_utils: get_module_size_with_ties, extract_model_from_parallel: internals of accelerate
- modeling_utils: set_module_tensor_between_gpus, load_checkpoint_in_model_two_gpu: two GPUs; with one, below
- hooks: add_and_remove_hooks, append_and_remove_hooks: internals of accelerate
- load_checkpoint_and_dispatch_with_broadcast: FSDP

Different here:
- dispatch_model_move_offloaded_model and move_model_warning: moving raises or warns; here a model on disk can be moved
- load_checkpoint_and_dispatch: "cpu" means on meta between forwards, and run on the GPU; here it means in memory,
  and run there
- load_checkpoint_in_model_disk_offload: values on disk are on meta; here they are tensors
- load_checkpoint_in_model(offload_state_dict=...): there is no such option, as no state dict is kept in memory
- preload_module_classes: there is no such option, as weights are always available
"""

from __future__ import annotations

import copy
import inspect
import json
import logging
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.hooks import ModelHook, SequentialHook, add_hook_to_module, remove_hook_from_module
from accelerate.utils import (
    align_module_device,
    compute_module_sizes,
    find_tied_parameters,
    infer_auto_device_map,
    named_module_tensors,
    retie_parameters,
    set_module_tensor_to_device,
)
from accelerate.utils.modeling import compute_module_total_buffer_size, get_state_dict_offloaded_model
from safetensors.torch import save_file
from torch import nn
from torch.fx import symbolic_trace
from transformers import AutoModelForCausalLM

import offload
from offload.errors import CheckpointError, DeviceMapError, DtypeMismatchError, ShapeMismatchError
from offload.models.device_map import infer_device_map, places

GPU = pytest.param(
    0, marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
)
DEVICES = ["cpu", GPU]
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


class Three(nn.Module):
    """Linear, norm, linear: 3 to 4 to 5."""

    def __init__(self) -> None:
        super().__init__()
        self.linear1, self.batchnorm, self.linear2 = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear2(self.batchnorm(self.linear1(x)))


class Nested(nn.Module):
    """One model in another."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Three()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x)


class Numbered(Three):
    """Returns a number of its own beside the result."""

    def __init__(self) -> None:
        super().__init__()
        self.id = 1

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x), self.id


class Square(nn.Module):
    """Two linear layers that can share a weight, and do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear1, self.batchnorm, self.linear2 = nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3)
        self.linear1.weight = self.linear2.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear2(self.batchnorm(self.linear1(x)))


class Five(nn.Module):
    """3 to 4 to 5, a norm, to 6 to 5."""

    part: Callable[[int, int], nn.Module] = nn.Linear

    def __init__(self) -> None:
        super().__init__()
        part = type(self).part
        self.linear1, self.linear2, self.batchnorm = part(3, 4), part(4, 5), nn.BatchNorm1d(5)
        self.linear3, self.linear4 = part(5, 6), part(6, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear4(self.linear3(self.batchnorm(self.linear2(self.linear1(x)))))


class Uncalled(nn.Module):
    """Uses the weights of a linear without calling it."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.linear = nn.Linear(rows, columns)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.linear.weight.t() + self.linear.bias


class FiveUncalled(Five):
    """Like `Five`, with modules that are registered and never called."""

    part = Uncalled


class Buffered(nn.Module):
    """A linear of buffers; the bias is not persistent."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.register_buffer("weight", torch.rand(columns, rows))
        self.register_buffer("bias", torch.rand(columns), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight, self.bias)


class ThreeBuffered(nn.Module):
    """Like `Three`, with buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear1, self.batchnorm, self.linear2 = Buffered(3, 4), nn.BatchNorm1d(4), Buffered(4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear2(self.batchnorm(self.linear1(x)))


class Borrower(nn.Module):
    """Holds another module's parameter."""

    def __init__(self, parameter: nn.Parameter) -> None:
        super().__init__()
        self.parameter = parameter

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.parameter.max()


class Lender(nn.Linear):
    """A linear layer whose submodules refer to its weight."""

    def __init__(self) -> None:
        super().__init__(3, 3, bias=False)
        self.parts = nn.ModuleList([Borrower(self.weight) for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum(nn.functional.linear(part(x), self.weight) for part in self.parts)


class Lenders(nn.Module):
    """Two of them with the same input."""

    def __init__(self) -> None:
        super().__init__()
        self.compute, self.compute1 = Lender(), Lender()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.compute(x) + self.compute1(x)


class SeveralDtypes(nn.Module):
    """An integer buffer and a float parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("int_param", torch.randint(high=10, size=(15, 30)))
        self.float_param = nn.Parameter(torch.rand(10, 5))


MODELS = [Three, Nested, Square, Five, FiveUncalled, ThreeBuffered, Lenders]


def made(kind: Callable[[], nn.Module]) -> Any:
    """Always the same model; in training mode, as upstream."""
    torch.manual_seed(0)
    return kind()


def given() -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(2, 3)


def saved(model: nn.Module, folder: Path) -> Path:
    """Its checkpoint; a tied weight once, under its first name."""
    state, seen = {}, set()
    for name, tensor in model.state_dict().items():
        if tensor.data_ptr() not in seen:
            state[name] = tensor
        seen.add(tensor.data_ptr())
    save_file(state, folder / "model.safetensors")
    return folder / "model.safetensors"


def agree(expected: torch.Tensor, result: torch.Tensor) -> None:
    """Bit-identical if both were computed on the CPU."""
    on_gpu = torch.cuda.is_available()
    torch.testing.assert_close(expected, result.cpu(), rtol=1e-5 if on_gpu else 0, atol=1e-5 if on_gpu else 0)


# Empty weights


def test_empty_weights_take_no_memory_and_leave_torch_as_it_was() -> None:
    """big_modeling: init_empty_weights, init_empty_weights_very_large_model."""
    methods = nn.Module.register_parameter, nn.Module.register_buffer

    with offload.init_empty_weights():
        norm, large = nn.BatchNorm1d(4), nn.Sequential(*(nn.Linear(10_000, 10_000) for _ in range(1000)))
    with offload.init_empty_weights(include_buffers=True):
        bare = nn.BatchNorm1d(4)

    assert norm.weight.is_meta
    assert not norm.running_mean.is_meta
    assert bare.weight.is_meta
    assert bare.running_mean.is_meta
    assert 100_010_000_000 == sum(parameter.numel() for parameter in large.parameters())
    assert methods == (nn.Module.register_parameter, nn.Module.register_buffer)
    assert not nn.BatchNorm1d(4).weight.is_meta


# disk_offload


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("offload_buffers", [False, True])
@pytest.mark.parametrize("kind", MODELS)
def test_a_model_on_disk_gives_what_it_gave(
    kind: type[nn.Module], offload_buffers: bool, device: Any, tmp_path: Path
) -> None:
    """big_modeling: disk_offload, disk_offload_with_unused_submodules; and all of the other models."""
    model, x = made(kind), given()
    expected = made(kind)(x)

    offload.disk_offload(model, tmp_path, execution_device=device, offload_buffers=offload_buffers)

    if not offload_buffers:  # buffers are not moved
        model.to(device)
    agree(expected, model(x.to(device)))
    assert all(offload.is_offloaded(parameter) for parameter in model.parameters())
    assert all(offload_buffers == offload.is_offloaded(buffer) for buffer in model.buffers())


@pytest.mark.parametrize("kind", MODELS)
def test_it_can_be_offloaded_again_with_its_buffers(kind: type[nn.Module], tmp_path: Path) -> None:
    """Upstream removes the hooks in between."""
    model, x = offload.disk_offload(made(kind), tmp_path), given()

    offload.disk_offload(model, tmp_path, offload_buffers=True)

    agree(made(kind)(x), model(x))
    assert all(offload.is_offloaded(buffer) for buffer in model.buffers())


def test_there_is_a_file_for_each_weight(tmp_path: Path) -> None:
    """offload: offload_state_dict."""
    model = offload.disk_offload(made(Three), tmp_path, offload_buffers=True)

    assert {f"{name}.safetensors" for name in model.state_dict()} <= {path.name for path in tmp_path.iterdir()}
    stored = offload.load_file(tmp_path)
    assert made(Three).state_dict().keys() == stored.keys()
    assert all(torch.equal(tensor, stored[name].materialize()) for name, tensor in made(Three).state_dict().items())


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.bfloat16])
def test_a_weight_comes_back_from_its_file(dtype: torch.dtype, tmp_path: Path) -> None:
    """offload: offload_weight."""
    weight = torch.randn(2, 3, dtype=dtype)

    stored = offload.OffloadedTensor.from_original_tensor(weight, "weight", tmp_path)

    again = offload.OffloadedTensor.from_file(stored.offload_path)
    assert ((2, 3), dtype, "weight") == (again.shape, again.dtype, again.name)
    assert torch.equal(weight, again.materialize())


@pytest.mark.parametrize("kind", [Three, Nested])
def test_the_state_dict_has_the_values(kind: type[nn.Module]) -> None:
    """modeling_utils: get_state_dict_offloaded_model, which is not needed, but works."""
    model, original = offload.disk_offload(made(kind)), made(kind).state_dict()

    for state in (model.state_dict(), get_state_dict_offloaded_model(model)):
        assert original.keys() == state.keys()
        assert all(torch.equal(tensor, state[name]) for name, tensor in original.items())


@pytest.mark.parametrize("kind", MODELS)
def test_weights_are_there_outside_forward_too(kind: type[nn.Module]) -> None:
    """Upstream they are on meta then."""
    plain, model = made(kind), offload.disk_offload(made(kind))

    for expected, parameter in zip(plain.parameters(), model.parameters(), strict=True):
        assert not parameter.is_meta
        assert torch.equal(expected.square().sum(), parameter.square().sum())


@pytest.mark.parametrize("kind", MODELS)
def test_a_submodule_runs_by_itself(kind: type[nn.Module]) -> None:
    """Even one that the model never calls; upstream those need preload_module_classes."""
    plain, model = made(kind), offload.disk_offload(made(kind))

    called = 0
    for expected, module in zip(plain.modules(), model.modules(), strict=True):
        if isinstance(expected, nn.Linear) and not isinstance(expected, Lender):
            x = torch.ones(2, expected.in_features)
            assert torch.equal(expected(x), module(x))
            called += 1
    assert called or kind in (ThreeBuffered, Lenders)


@pytest.mark.parametrize("kind", [kind for kind in MODELS if kind is not ThreeBuffered])
def test_it_trains_as_the_plain_one(kind: type[nn.Module]) -> None:
    """Upstream, gradients go to tensors that the hooks throw away."""
    plain, model, x = made(kind), offload.disk_offload(made(kind)), given()

    for each in (plain, model):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            each(x).square().sum().backward()
            optimizer.step()

    for name, expected in plain.state_dict().items():
        assert torch.equal(expected, model.state_dict()[name]), name


def test_a_model_on_disk_generates(llama_folder: Path, tokens: torch.Tensor) -> None:
    """big_modeling: cpu_offload_gpt2, disk_offload_gpt2."""
    plain = AutoModelForCausalLM.from_pretrained(llama_folder)
    model = offload.disk_offload(AutoModelForCausalLM.from_pretrained(llama_folder))

    options = {"max_new_tokens": 10, "do_sample": False}
    assert torch.equal(plain.generate(tokens, **options), model.generate(tokens, **options))


# Device maps


def mixed(device: Any) -> list[Any]:
    """Models with upstream's maps; `device` in place of the first GPU."""
    return [
        (Three, {"linear1": "cpu", "batchnorm": "cpu", "linear2": device}),
        (Three, {"linear1": "disk", "batchnorm": "cpu", "linear2": device}),
        (Three, {"linear1": "disk", "batchnorm": "disk", "linear2": "disk"}),
        (Three, {"": "disk"}),
        (Three, {"": device}),
        (ThreeBuffered, {"linear1": device, "batchnorm": "cpu", "linear2": "disk"}),
        (Square, {"linear1": device, "batchnorm": device, "linear2": device}),
        (Square, {"linear1": device, "batchnorm": device, "linear2": "disk"}),
        (Five, {"linear1": "cpu", "linear2": "disk", "batchnorm": "cpu", "linear3": device, "linear4": device}),
        (FiveUncalled, {"linear1": "cpu", "linear2": "disk", "batchnorm": "cpu", "linear3": device, "linear4": device}),
        (FiveUncalled, {"linear1": "cpu", "linear2": "cpu", "batchnorm": device, "linear3": device, "linear4": device}),
        (Lenders, {"compute": device, "compute1": "cpu"}),
        (Lenders, {"compute": device, "compute1": "disk"}),
    ]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", range(len(mixed("cpu"))))
@pytest.mark.parametrize("offload_buffers", [False, True])
def test_a_model_under_a_map_gives_what_it_gave(case: int, device: Any, offload_buffers: bool, tmp_path: Path) -> None:
    """big_modeling: dispatch_model, _with_non_persistent_buffers, _tied_weights, _with_unused_submodules, _disk_only,
    _tied_weights_memory_with_nested_offload_cpu and _disk, load_checkpoint_and_dispatch, _with_unused_submodules.
    """
    kind, device_map = mixed(device)[case]
    x = given()
    expected = made(kind)(x)

    model = offload.load_checkpoint_and_dispatch(
        made(kind), saved(made(kind), tmp_path), device_map, offload_buffers=offload_buffers
    )

    agree(expected, model(x if len({*device_map.values()} - {"disk"}) > 1 else x.to(next(model.parameters()).device)))
    for name, place in places(dict(model.named_parameters()), device_map).items():
        assert place.on_disk == offload.is_offloaded(model.get_parameter(name)), name
        assert place.device == model.get_parameter(name).device, name


@two_gpus
@pytest.mark.gpu
@pytest.mark.parametrize("kind", [Five, FiveUncalled])
@pytest.mark.parametrize("second", ["disk", "cpu", "disk:cuda:1"])
def test_a_model_over_two_accelerators_gives_what_it_gave(kind: type[nn.Module], second: str, tmp_path: Path) -> None:
    """big_modeling: dispatch_model_multi_devices, load_checkpoint_and_dispatch_multi_device, and with unused ones."""
    device_map = {"linear1": "cpu", "linear2": second, "batchnorm": 0, "linear3": 0, "linear4": 1}
    x = given()

    model = offload.load_checkpoint_and_dispatch(made(kind), saved(made(kind), tmp_path), device_map)

    agree(made(kind)(x), model(x))


def test_tied_weights_are_one_tensor_and_one_file(tmp_path: Path) -> None:
    """big_modeling: dispatch_model_tied_weights, _tied_weights_memory."""
    square = offload.disk_offload(made(Square), tmp_path / "square")
    lenders = offload.disk_offload(made(Lenders), tmp_path / "lenders")

    assert square.linear1.weight is square.linear2.weight
    assert {"linear1.weight", "linear1.bias", "linear2.bias", "batchnorm.weight", "batchnorm.bias"} == set(
        offload.load_file(tmp_path / "square")
    )
    assert all(part.parameter is lenders.compute1.weight for part in lenders.compute1.parts)
    assert {"compute.weight", "compute1.weight"} == set(offload.load_file(tmp_path / "lenders"))


def test_a_copy_is_a_model_of_its_own(tmp_path: Path) -> None:
    """big_modeling: dispatch_model_copy."""
    x = given()
    expected, _ = made(Numbered)(x)
    model = offload.load_checkpoint_and_dispatch(
        made(Numbered), saved(made(Numbered), tmp_path), {"linear1": "disk", "batchnorm": "cpu", "linear2": "disk"}
    )

    copied = copy.deepcopy(model)
    copied.id = 2

    assert [1, 2] == [model(x)[1], copied(x)[1]]
    agree(expected, copied(x)[0])
    with torch.no_grad():
        copied.linear1.weight.zero_()
    agree(expected, model(x)[0])


def test_a_model_on_disk_may_be_moved(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    """big_modeling: dispatch_model_move_offloaded_model, _move_model_warning, _and_remove_hook."""
    model = offload.load_checkpoint_and_dispatch(
        made(Three), saved(made(Three), tmp_path), {"linear1": "disk", "batchnorm": "cpu", "linear2": "disk"}
    )

    with caplog.at_level(logging.WARNING):
        assert model.to("cpu") is model

    assert not caplog.records
    assert {"linear1.weight", "linear1.bias", "linear2.weight", "linear2.bias"} == {
        name for name, parameter in model.named_parameters() if offload.is_offloaded(parameter)
    }
    agree(made(Three)(given()), model(given()))


def test_no_hooks_are_needed(tmp_path: Path) -> None:
    """big_modeling: dispatch_model_and_remove_hook, _force_hooks."""
    model = offload.load_checkpoint_and_dispatch(
        made(Three), saved(made(Three), tmp_path), {"linear1": "disk", "batchnorm": "cpu", "linear2": "disk"}
    )

    assert not any(hasattr(module, "_hf_hook") for module in model.modules())
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_name_is_no_prefix_of_a_longer_one() -> None:
    """offload: extract_submodules_state_dict."""
    placed = places(["a.1", "a.10", "a.2", "a.1.a", "a.10.a"], {"": "cpu", "a.1": "disk", "a.2": "disk"})

    assert ["a.1", "a.2", "a.1.a"] == [name for name, place in placed.items() if place.on_disk]


def test_a_map_has_to_have_a_place_for_everything(tmp_path: Path) -> None:
    """modeling_utils: check_device_map, check_device_map_invalid_keys."""
    checkpoint = saved(made(Three), tmp_path)

    offload.load_checkpoint_in_model(
        made(Three), checkpoint, {"linear1": "cpu", "linear2": "disk", "batchnorm": "disk"}
    )
    with pytest.raises(DeviceMapError, match=r"no place for 'batchnorm\.weight'"):
        offload.load_checkpoint_in_model(made(Three), checkpoint, {"linear1": "cpu", "linear2": "disk"})
    with pytest.warns(UserWarning, match="they are ignored: 'invalid_module', 'another_invalid'"):
        offload.load_checkpoint_in_model(
            made(Three), checkpoint, {"": "cpu", "invalid_module": "cpu", "another_invalid": "disk"}
        )


@pytest.mark.parametrize("kind", [Three, Square, Nested, Five])
@pytest.mark.parametrize("fits", [120, 200, 10_000])
@pytest.mark.filterwarnings("ignore:Current model requires")  # accelerate's, about buffers
def test_maps_are_inferred_for_models_on_disk_as_for_plain_ones(kind: type[nn.Module], fits: int) -> None:
    """modeling_utils: infer_auto_device_map, _with_tied_weights, _with_fallback_allocation_*."""
    shares: dict[Any, Any] = {0: fits, "cpu": fits}
    expected = infer_auto_device_map(made(kind), max_memory=dict(shares))

    for model in (made(kind), offload.disk_offload(made(kind))):
        assert expected == infer_device_map(
            model, "sequential", max_memory=shares, no_split_module_classes=None, dtype=None
        )


# Checkpoints


def in_shards(model: nn.Module, folder: Path) -> Path:
    """One shard per module, and their index."""
    weight_map = {name: f"part_{name.split('.')[0]}.safetensors" for name in model.state_dict()}
    for shard in set(weight_map.values()):
        save_file({name: t for name, t in model.state_dict().items() if weight_map[name] == shard}, folder / shard)
    (folder / "weight_map.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder / "weight_map.safetensors.index.json"


@pytest.mark.parametrize("form", ["whole", "index", "folder"])
@pytest.mark.parametrize("device", DEVICES)
def test_a_checkpoint_is_loaded_in_each_of_its_forms(form: str, device: Any, tmp_path: Path) -> None:
    """modeling_utils: load_checkpoint_in_model, _one_gpu."""
    path = saved(made(Three), tmp_path) if form == "whole" else in_shards(made(Three), tmp_path)
    torch.manual_seed(7)
    model = Three()

    report = offload.load_checkpoint_in_model(
        model,
        tmp_path if form == "folder" else path,
        {"linear1": device, "batchnorm": "cpu", "linear2": "cpu"},
    )

    assert "all match" == str(report)
    assert torch.empty(0, device=device).device == model.linear1.weight.device
    assert {"cpu"} == {tensor.device.type for tensor in (model.batchnorm.weight, model.linear2.weight)}
    for name, expected in made(Three).state_dict().items():
        assert torch.equal(expected, model.state_dict()[name].cpu()), name


@pytest.mark.parametrize("offload_buffers", [False, True])
def test_buffers_of_a_module_on_disk_are_there_if_asked(offload_buffers: bool, tmp_path: Path) -> None:
    """modeling_utils: load_checkpoint_in_model_disk_offload."""
    model = made(Three)

    offload.load_checkpoint_in_model(
        model,
        saved(made(Three), tmp_path),
        {"linear1": "cpu", "batchnorm": "disk", "linear2": "cpu"},
        tmp_path / "values",
        offload_buffers=offload_buffers,
    )

    assert not offload.is_offloaded(model.linear1.weight)
    assert offload.is_offloaded(model.batchnorm.weight)
    assert offload_buffers == offload.is_offloaded(model.batchnorm.running_mean)
    assert not offload.is_offloaded(model.linear2.weight)


@pytest.mark.parametrize("device_map", ["disk", {"": "cpu"}])
def test_a_dtype_is_for_floats(device_map: Any, tmp_path: Path) -> None:
    """modeling_utils: load_checkpoint_in_model_dtype."""
    model, path = SeveralDtypes(), saved(SeveralDtypes(), tmp_path)

    offload.load_checkpoint_in_model(model, path, device_map, dtype=torch.float16, offload_buffers=True)

    assert torch.int64 == model.int_param.dtype
    assert torch.float16 == model.float_param.dtype


@pytest.mark.parametrize("device_map", ["disk", {"": "cpu"}])
def test_unexpected_keys_are_told_and_refused_if_strict(
    device_map: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """modeling_utils: load_checkpoint_in_model_unexpected_keys."""
    save_file({**made(Three).state_dict(), "foo": torch.rand(4, 5)}, tmp_path / "model.safetensors")

    with caplog.at_level(logging.WARNING):
        report = offload.load_checkpoint_in_model(made(Three), tmp_path, device_map)

    assert ["foo"] == report.unexpected_keys
    assert "1 unexpected: foo" in caplog.text
    with pytest.raises(CheckpointError, match="1 unexpected: foo"):
        offload.load_checkpoint_in_model(made(Three), tmp_path, device_map, strict=True)


def test_no_map_is_no_map(tmp_path: Path) -> None:
    """big_modeling: load_checkpoint_and_dispatch_device_map_none: it loads to memory."""
    path = saved(made(Three), tmp_path)
    torch.manual_seed(7)

    model = offload.load_checkpoint_and_dispatch(Three(), path, None)

    for (name, expected), (its_name, tensor) in zip(
        made(Three).state_dict().items(), model.state_dict().items(), strict=True
    ):
        assert name == its_name
        assert torch.equal(expected, tensor)
        assert type(tensor) is torch.Tensor


@pytest.mark.parametrize("device", DEVICES)
def test_a_file_s_tensors_are_for_a_device(device: Any, tmp_path: Path) -> None:
    """modeling_utils: load_state_dict."""
    state = {key: torch.randn(4, 5) for key in "abc"}
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})

    loaded = offload.load_file(tmp_path / "model.safetensors", device)

    assert {torch.empty(0, device=device).device} == {tensor.device for tensor in loaded.values()}
    assert all(torch.equal(tensor, loaded[name].cpu().materialize()) for name, tensor in state.items())


# accelerate's own functions, over models on disk


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize(
    "measure", [find_tied_parameters, compute_module_sizes, compute_module_total_buffer_size], ids=lambda f: f.__name__
)
def test_what_it_measures_of_a_model_is_the_same_on_disk(kind: type[nn.Module], measure: Callable[..., object]) -> None:
    """modeling_utils: find_tied_parameters, compute_module_sizes, compute_module_total_buffer_size."""
    assert measure(made(kind)) == measure(offload.disk_offload(made(kind), offload_buffers=True))


@pytest.mark.parametrize("recurse", [False, True])
@pytest.mark.parametrize("include_buffers", [False, True])
def test_the_names_that_it_lists_are_the_same_on_disk(recurse: bool, include_buffers: bool) -> None:
    """modeling_utils: named_tensors."""
    for kind in (Three, ThreeBuffered):
        plain, model = made(kind), offload.disk_offload(made(kind), offload_buffers=True)
        options = {"recurse": recurse, "include_buffers": include_buffers, "remove_non_persistent": True}

        for expected, module in zip(plain.modules(), model.modules(), strict=True):
            assert [name for name, _ in named_module_tensors(expected, **options)] == [
                name for name, _ in named_module_tensors(module, **options)
            ]


def test_it_ties_parameters_on_disk() -> None:
    """modeling_utils: retie_parameters."""
    names = [f"linear{n}" for n in range(1, 4)]
    model = offload.disk_offload(nn.Sequential(OrderedDict((name, nn.Linear(4, 4)) for name in names)))

    retie_parameters(model, [[f"{name}.weight" for name in names]])

    assert model.linear1.weight is model.linear2.weight
    assert model.linear1.weight is model.linear3.weight


@pytest.mark.parametrize("name", ["linear1.weight", "batchnorm.running_mean"])
@pytest.mark.parametrize("device", DEVICES)
def test_it_empties_and_fills_a_tensor_on_disk(name: str, device: Any) -> None:
    """modeling_utils: set_module_tensor_to_meta_and_cpu, _to_cpu_and_gpu, _to_meta_and_gpu."""
    model = offload.disk_offload(made(Three), offload_buffers=True)
    value = torch.full_like(made(Three).state_dict()[name], 2.0)

    set_module_tensor_to_device(model, name, device)
    assert torch.empty(0, device=device).device == model.state_dict()[name].device
    set_module_tensor_to_device(model, name, "meta")
    assert model.state_dict()[name].is_meta
    with pytest.raises(ValueError, match="on the meta device"):
        set_module_tensor_to_device(model, name, device)
    set_module_tensor_to_device(model, name, device, value=value)

    assert torch.equal(value, model.state_dict()[name].cpu())


def test_values_of_another_shape_or_dtype_are_refused() -> None:
    """modeling_utils: set_module_tensor_checks_shape, _sets_dtype."""
    weight = offload.disk_offload(made(Three)).linear1.weight

    with pytest.raises(ShapeMismatchError, match=r"'linear1\.weight' has shape \(4, 3\), the new value \(2, 2\)"):
        weight.update_values(torch.zeros(2, 2))
    with pytest.raises(DtypeMismatchError, match=r"'linear1\.weight' has dtype torch\.float32"):
        weight.update_values(torch.zeros(4, 3, dtype=torch.float16))
    weight.update_values(torch.zeros(4, 3, dtype=torch.float16), strict_dtype=False)

    assert torch.float16 == weight.dtype


@pytest.mark.parametrize("kind", [Three, Nested])
@pytest.mark.parametrize("execution_device", [None, *DEVICES])
def test_modules_on_disk_are_aligned_and_come_back(kind: type[nn.Module], execution_device: Any) -> None:
    """modeling_utils: align_module_device_simple, _offloaded, _offloaded_nested."""
    model = offload.disk_offload(made(kind))
    expected = torch.empty(0, device="cpu" if execution_device is None else execution_device).device

    for module in model.modules():
        with align_module_device(module, execution_device):
            assert {expected} >= {parameter.device for parameter in module.parameters(recurse=False)}

    assert {torch.device("cpu")} == {parameter.device for parameter in model.parameters()}
    assert all(offload.is_offloaded(parameter) for parameter in model.parameters())
    agree(made(kind)(given()), model(given()))


class PlusOne(ModelHook):
    """Adds one before or after."""

    def __init__(self, *, before: bool) -> None:
        self.before = before

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return tuple(arg + self.before for arg in args), kwargs

    def post_forward(self, module: nn.Module, output: torch.Tensor) -> torch.Tensor:
        return output + (not self.before)


@pytest.mark.parametrize("before", [True, False])
def test_its_hooks_run_over_a_model_on_disk(before: bool) -> None:
    """hooks: pre_forward_hook_is_executed, post_forward_hook_is_executed, no_grad_in_hook."""
    model, x = offload.disk_offload(made(Three)), given()
    hook = PlusOne(before=before)

    add_hook_to_module(model, SequentialHook(hook, hook))
    agree(made(Three)(x + 1 + 1) if before else made(Three)(x) + 1 + 1, model(x))

    add_hook_to_module(model, hook)
    agree(made(Three)(x + 1) if before else made(Three)(x) + 1, model(x))
    assert model(x).requires_grad
    hook.no_grad = True
    assert not model(x).requires_grad
    assert ["x"] == list(inspect.signature(model.forward).parameters)
    remove_hook_from_module(model)
    agree(made(Three)(x), model(x))


def test_a_traced_model_on_disk_takes_hooks_and_loses_them() -> None:
    """hooks: add_remove_hook_fx_graph_module."""
    traced, x = symbolic_trace(offload.disk_offload(made(Three))), given()

    add_hook_to_module(traced, ModelHook())
    remove_hook_from_module(traced, recurse=True)
    graph = traced.graph
    last = next(node for node in graph.nodes if node.name == "linear2")
    with graph.inserting_after(last):
        bent = graph.call_function(torch.sigmoid, (last,))
    next(node for node in graph.nodes if node.op == "output").replace_input_with(last, bent)
    traced.recompile()

    agree(made(Three)(x).sigmoid(), traced(x))
