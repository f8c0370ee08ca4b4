"""A tensor that is more than its numbers is refused with its name, wherever a file would store only its numbers."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import offload
import offload.storage.subclasses as subclasses
from offload import OffloadedTensor
from offload.errors import UnknownSubclassError


class Packed(nn.Parameter):
    """Like quantizers' tensors: an attribute defines the meaning of the bytes."""


class Image(torch.Tensor):
    """Numbers with extra meaning."""


class Kept(torch.Tensor):
    """A wrapper subclass that keeps its own copy."""

    @staticmethod
    def __new__(cls, inner, scale=1):
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner, made.scale, made._copy = inner, 1, inner.clone()
        return made

    def __tensor_flatten__(self):
        return ["inner"], None

    @classmethod
    def __tensor_unflatten__(cls, inner, context, size, stride):
        return cls(inner["inner"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return args[0]
        return func(*[arg.inner if isinstance(arg, cls) else arg for arg in args], **(kwargs or {}))


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setattr(subclasses, "_REGISTERED", {})
    offload.register_subclass(TwoTensor, Kept)


def packed():
    made = torch.Tensor._make_subclass(Packed, torch.arange(4, dtype=torch.uint8))
    made.quant_state = {"scale": 0.5}
    return made


def image():
    return torch.ones(4).as_subclass(Image)


def model_of(tensor):
    model = nn.Linear(2, 2)
    model.register_buffer("x", tensor)
    return model


def optimizer_of(tensor):
    layer = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(layer.parameters(), momentum=0.9)
    optimizer.state[layer.weight]["momentum_buffer"] = tensor
    return optimizer


def stored(name, tensor):
    return OffloadedTensor.from_original_tensor(torch.zeros_like(tensor.as_subclass(torch.Tensor)), name)


WAYS_IN = {
    "from_original_tensor": lambda tensor, folder: OffloadedTensor.from_original_tensor(tensor, "x"),
    "update_values": lambda tensor, folder: stored("x", tensor).update_values(tensor),
    "data": lambda tensor, folder: setattr(stored("x", tensor), "data", tensor),
    "disk_offload": lambda tensor, folder: offload.disk_offload(model_of(tensor), offload_buffers=True),
    "save_tree": lambda tensor, folder: offload.save_tree({"x": tensor}, folder),
    "save_checkpoint": lambda tensor, folder: offload.save_checkpoint({"x": tensor}, folder),
    "save_training": lambda tensor, folder: offload.training.save_training(nn.Linear(1, 1), folder, x=[tensor]),
    "offloaded_like": lambda tensor, folder: offload.offloaded_like(lambda _: tensor, stored("o", tensor), "x"),
    "offload_optimizer": lambda tensor, folder: offload.training.offload_optimizer(optimizer_of(tensor), min_bytes=1),
    "map_values": lambda tensor, folder: offload.map_values(lambda *_: tensor, {"x": stored("x", tensor)}),
    "cache": lambda tensor, folder: offload.TensorCache.create(folder, {"x": (tensor.dtype, ())}, num_rows=0).append(
        {"x": tensor}
    ),
    "cache_from": lambda tensor, folder: offload.integrations.cache_from({"x": tensor}, folder),
    "from_records": lambda tensor, folder: offload.TensorCache.from_records([{"x": tensor}], folder),
}


TO_PLAIN = {
    "update_values": lambda tensor, _: OffloadedTensor.zeros(4, name="x").update_values(tensor),
    "offloaded_like": lambda tensor, _: offload.offloaded_like(
        lambda _: tensor, OffloadedTensor.zeros(4, name="o"), "x"
    ),
}


@pytest.mark.parametrize("make", [packed, image])
@pytest.mark.parametrize("way", WAYS_IN)
def test_a_class_that_cannot_be_taken_apart_is_refused_by_name(way, make, tmp_path):
    name = {"save_training": r"extra\.x\.0", "offload_optimizer": r"group0\.0\.momentum_buffer"}.get(way, r"(o\.)?x")
    with pytest.raises(UnknownSubclassError, match=rf"tensor '{name}': {type(make()).__name__} .*__tensor_flatten__"):
        WAYS_IN[way](make(), tmp_path / "it")

    assert way == "cache" or not list(tmp_path.rglob("*.safetensors"))


@pytest.mark.parametrize("way", WAYS_IN)
def test_a_class_that_says_only_where_its_numbers_are_is_stored(way, tmp_path):
    tensordict = pytest.importorskip("tensordict")

    WAYS_IN[way](tensordict.MemoryMappedTensor.from_tensor(torch.ones(4)), tmp_path / "it")


def test_a_refused_model_is_as_it_was_and_a_buffer_that_stays_in_memory_may_be_of_any_class():
    model = model_of(packed())

    with pytest.raises(UnknownSubclassError, match="tensor 'x'"):
        offload.disk_offload(model, offload_buffers=True)

    assert (Packed, nn.Parameter) == (type(model.x), type(model.weight))
    offload.disk_offload(model)
    assert type(model.x) is Packed
    assert offload.is_offloaded(model.weight)


def test_in_memory_a_value_may_become_one_of_any_class():
    held = {"x": torch.zeros(4, dtype=torch.uint8)}

    offload.map_values(lambda *_: packed(), held)

    assert type(held["x"]) is Packed


def test_inside_offloading_such_a_parameter_stays_in_memory_unchanged():
    parameter = packed()

    with offload.offloading(min_bytes=1):
        module = nn.Module()
        module.x = parameter

    assert module.x is parameter


def test_saved_for_backward_such_a_tensor_stays_in_memory():
    x = torch.ones(1000, requires_grad=True)
    scale = torch.full((1000,), 2.0).as_subclass(Image)

    with offload.training.offload_activations(min_bytes=1):
        (x * scale).sum().as_subclass(torch.Tensor).backward()

    assert torch.equal(torch.full((1000,), 2.0), x.grad.as_subclass(torch.Tensor))


@pytest.mark.parametrize("way", ["from_original_tensor", "save_tree", "update_values", "offloaded_like"])
def test_an_attribute_that_a_subclass_is_not_rebuilt_with_is_refused_by_name(way, tmp_path):
    tensor = TwoTensor(torch.ones(4), torch.ones(4))
    tensor.quant_state = {"scale": 0.5}

    with pytest.raises(UnknownSubclassError, match=r"x'?: .*TwoTensor has quant_state"):
        {**WAYS_IN, **TO_PLAIN}[way](tensor, tmp_path / "it")


def test_an_attribute_that_a_subclass_is_rebuilt_with_otherwise_is_refused():
    tensor = Kept(torch.ones(4))
    tensor.scale = 3

    with pytest.raises(UnknownSubclassError, match="scale"):
        OffloadedTensor.from_original_tensor(tensor, "x")


def test_private_attributes_of_a_subclass_are_carried_over_but_for_those_that_hold_values():
    parameter = nn.Parameter(Kept(torch.ones(4)))
    parameter._is_hf_initialized, parameter._second_copy = True, torch.ones(4)

    stored = OffloadedTensor.from_original_tensor(parameter, "x")

    assert isinstance(stored, nn.Parameter)
    assert stored._is_hf_initialized
    assert type(stored.materialize().detach()) is Kept
    assert not hasattr(stored, "_second_copy")


def test_an_inner_tensor_of_another_class_is_refused():
    with pytest.raises(UnknownSubclassError, match=r"tensor 'x.a': Image"):
        OffloadedTensor.from_original_tensor(TwoTensor(image(), image()), "x")


@pytest.mark.parametrize(
    ("cls", "why"),
    [
        (Packed, "lacks __tensor_flatten__"),
        (nn.Linear, "is not a tensor subclass, enum, dataclass or named tuple"),
        ("Packed", "is not a class"),
    ],
)
def test_a_class_that_could_not_be_stored_is_not_registered(cls, why):
    with pytest.raises(UnknownSubclassError, match=why):
        offload.register_subclass(Kept, cls)

    assert subclasses._REGISTERED.keys() == {"torch:TwoTensor", f"{__name__.partition('.')[0]}:Kept"}


def marked(tensor):
    tensor.ds_id = 3
    tensor.tensor_model_parallel = True
    tensor._is_hf_initialized = True
    return tensor


def is_marked(tensor):
    return tensor.ds_id == 3 and tensor.tensor_model_parallel and tensor._is_hf_initialized


@pytest.mark.parametrize("make", [lambda: nn.Parameter(torch.ones(2)), lambda: torch.ones(2)])
def test_attributes_of_a_plain_tensor_are_carried_over(make):
    stored = OffloadedTensor.from_original_tensor(marked(make()), "x")

    assert is_marked(stored)
    assert is_marked(copy.copy(stored))


def test_attributes_of_parameters_stay_when_a_model_goes_to_disk_is_loaded_and_comes_back(tmp_path):
    model = nn.Linear(2, 2)
    marked(model.weight)
    offload.save_checkpoint(model, tmp_path / "saved")

    offload.disk_offload(model)
    assert is_marked(model.weight)
    offload.load_checkpoint_and_dispatch(model, tmp_path / "saved")
    assert is_marked(model.weight)
    offload.materialize(model)
    assert is_marked(model.weight)
    assert type(model.weight) is nn.Parameter


def test_a_deep_copy_has_the_attributes_that_torch_gives_it():
    noted = {"notes": [1]}
    for make in (lambda: nn.Parameter(torch.ones(2)), lambda: torch.ones(2)):
        plain = make()
        plain.noted = noted
        stored = OffloadedTensor.from_original_tensor(plain, "x")
        expected, found = copy.deepcopy(plain), copy.deepcopy(stored)

        assert getattr(expected, "noted", None) == getattr(found, "noted", None)
        assert getattr(found, "noted", None) is not noted
