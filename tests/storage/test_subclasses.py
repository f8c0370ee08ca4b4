"""A tensor subclass is stored as its inner tensors, and only a known class is rebuilt."""

from __future__ import annotations

import dataclasses
import enum
import json
import os
import struct
from collections import defaultdict
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch.utils._python_dispatch import return_and_correct_aliasing

import offload
import offload.storage.subclasses as subclasses
from offload.errors import CorruptFileError, UnknownSubclassError
from offload.storage.file import TensorFile
from offload.storage.handle import Handle
from offload.storage.header import MARK
from offload.storage.owning import create_value, duplicate, replace_whole
from offload.storage.subclasses import flatten, layout_from, register_subclass, unflatten


class Rounding(enum.Enum):
    UP = 1
    DOWN = 2


@dataclasses.dataclass
class Recipe:
    bits: int
    rounding: Rounding


class Block(NamedTuple):
    rows: int
    columns: int


class Scaled(torch.Tensor):
    """A tensor times a scale, with an arbitrary `context`."""

    inner: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, inner, scale, context=None):
        self = torch.Tensor._make_wrapper_subclass(cls, inner.shape, strides=inner.stride(), dtype=torch.float32)
        self.inner, self.scale, self.context = inner, scale, context
        return self

    def __tensor_flatten__(self):
        return ["inner", "scale"], self.context

    @classmethod
    def __tensor_unflatten__(cls, inner, context, size, stride):
        return cls(inner["inner"], inner["scale"], context)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return return_and_correct_aliasing(func, args, kwargs, cls(args[0].inner, args[0].scale, args[0].context))
        plain = [arg.plain() if isinstance(arg, cls) else arg for arg in args]
        return func(*plain, **(kwargs or {}))

    def plain(self):
        inner = self.inner.plain() if isinstance(self.inner, Scaled) else self.inner
        return inner.float() * self.scale


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setattr(subclasses, "_REGISTERED", {})
    register_subclass(Scaled, Rounding, Recipe, Block)


def scaled(context: Any = None) -> Scaled:
    return Scaled(torch.arange(6, dtype=torch.int8).reshape(2, 3), torch.tensor(0.5), context)


CONTEXT = {
    "none": None,
    "flag": True,
    "number": 3,
    "fraction": 0.1,
    "text": "é",
    "dtype": torch.bfloat16,
    "device": torch.device("cpu"),
    "enum": Rounding.DOWN,
    "object": Recipe(4, Rounding.UP),
    "named": Block(1, 128),
    "size": torch.Size([2, 3]),
    "tuple": (1, (2.0, None)),
    "list": [1, [torch.int4]],
    "dict": {"a": {"b": ()}},
    "numbers as keys": {1: 2},
    "not finite": float("inf"),
    "computed": Recipe(4, Rounding.DOWN),
}


VALUES = {
    "a context": lambda: scaled(CONTEXT),
    "no context": scaled,
    "another context": lambda: scaled((1, [torch.float16])),
    "one inside another": lambda: Scaled(scaled("inside"), torch.tensor(3.0), "outside"),
    "strides": lambda: Scaled(torch.arange(6, dtype=torch.int8).reshape(2, 3).t(), torch.tensor(0.5)),
    "an odd number of bytes first": lambda: Scaled(torch.ones(3, dtype=torch.int8), torch.tensor([0.5])),
}


def told(value: Scaled) -> list[object]:
    """All that it consists of; text, which tells types, too."""
    inner = told(value.inner) if isinstance(value.inner, Scaled) else [value.inner.tolist(), value.inner.stride()]
    return [type(value), repr(value.context), value.stride(), value.scale.tolist(), inner]


@pytest.mark.parametrize("value", VALUES)
def test_a_subclass_comes_back_from_its_file_and_as_a_copy(tmp_path, value):
    expected = VALUES[value]()
    handle = create_value(expected, "w", tmp_path)
    file = TensorFile.open(tmp_path / "w.safetensors")

    found = Handle.reference(file, "w")

    assert told(expected) == told(found.base()) == told(duplicate(found).base())
    assert expected.stride() == handle.layout.stride
    assert {0} == {entry.start % entry.layout.dtype.itemsize for entry in file.entries.values()}
    assert {"w.scale"} < set(load_file(file.path))  # for any reader


def test_a_value_may_become_a_subclass_and_plain_again(tmp_path):
    handle = create_value(torch.zeros(2, 3), "w", tmp_path)

    replace_whole(handle, scaled())
    assert type(handle.base()) is Scaled
    assert handle.is_subclass
    replace_whole(handle, torch.ones(2, 3))
    assert torch.equal(torch.ones(2, 3), handle.base())
    assert not handle.is_subclass


class Unknown(Scaled):
    pass


def test_an_unknown_class_is_refused_with_its_name_and_how_to_register_it(tmp_path, monkeypatch):
    """In a context, too."""
    value = Unknown(torch.ones(2), torch.tensor(1.0))

    with pytest.raises(UnknownSubclassError, match=r"tensor 'w': .*Unknown \(of .*register_subclass\(.*Unknown\)"):
        create_value(value, "w", tmp_path)
    monkeypatch.delitem(subclasses._REGISTERED, subclasses._word(Rounding))
    with pytest.raises(UnknownSubclassError, match="Rounding"):
        create_value(scaled(Recipe(4, Rounding.UP)), "w", tmp_path)
    assert [] == os.listdir(tmp_path)


def test_another_class_of_a_known_name_is_not_taken_for_it():
    impostor = type("Scaled", (Scaled,), {"__module__": Scaled.__module__})

    with pytest.raises(UnknownSubclassError, match="is not the Scaled that offload stores"):
        flatten(impostor(torch.ones(2), torch.tensor(1.0)), "w")


@pytest.mark.parametrize(
    "context",
    [object(), {"a": lambda: None}, torch.ones(1), {1, 2}, defaultdict(int, a=1)],
    ids=["object", "function", "tensor", "set", "another-dict"],
)
def test_a_context_that_is_not_plain_data_is_refused_when_it_is_stored(tmp_path, context):
    with pytest.raises(UnknownSubclassError, match="can't be stored as plain data"):
        create_value(scaled(context), "w", tmp_path)
    assert [] == os.listdir(tmp_path)


def test_a_stored_class_that_is_not_known_any_more_is_refused(tmp_path, monkeypatch):
    create_value(scaled(), "w", tmp_path)
    monkeypatch.setattr(subclasses, "_REGISTERED", {})

    with pytest.raises(UnknownSubclassError, match=r"register_subclass\(Scaled\)"):
        Handle.reference(TensorFile.open(tmp_path / "w.safetensors"), "w").base()


def test_a_class_of_a_package_that_lacks_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(subclasses._KNOWN, "gone", {"Gone": ("gone.away", "gone.further")})

    with pytest.raises(UnknownSubclassError, match=r"Gone is needed.*install a version of gone that has it"):
        unflatten({}, {"class": "gone:Gone", "inner": {}}, "w")


def edited(path, change) -> None:
    """Change the notes in a file of ours."""
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    notes = json.loads(header["__metadata__"][MARK])
    change(header, notes)
    header["__metadata__"][MARK] = json.dumps(notes)
    text = json.dumps(header).encode()
    text += b" " * (-(len(text) + 8) % 64)  # values begin at multiples of their element size
    path.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])


def test_a_missing_inner_tensor_is_named(tmp_path):
    create_value(scaled(), "w", tmp_path)
    path = tmp_path / "w.safetensors"
    edited(path, lambda header, notes: header.update({"w.other": header.pop("w.scale")}))

    with pytest.raises(CorruptFileError, match=r"tensor 'w': .*: the inner tensor 'w.scale' of a .*Scaled is missing"):
        Handle.reference(TensorFile.open(path), "w").base()


@pytest.mark.parametrize(
    "broken",
    [
        {"shape": None},
        {"shape": [3, 2]},
        {"shape": [2**62, 4]},
        {"shape": [2, 2**63]},
        {"stride": [2**63, 1]},
        {"stride": [2**62, 2**62]},
        {"dtype": "float16"},
        {"shape": [2, -3]},
        {"stride": [1]},
        {"dtype": "no such"},
        {"dtype": 3},
        {"inner": None},
        {"inner": {"inner": None}},
        {"inner": {"inner": 3, "scale": None}},
        {"class": None},
        {"class": ["x"]},
        {"context": {"no such": 1}},
        {"context": {"dtype": "no such"}},
        {"context": {"enum": ["torchao:Int8Tensor", "UP"]}},
        {"context": {"object": ["torchao:MappingType", {"dict": {}}]}},
        {"context": {"device": "no such"}},
        {"context": {}},
    ],
    ids=str,
)
def test_a_recipe_that_is_not_one_is_a_corrupt_file_or_an_unknown_class(tmp_path, broken):
    create_value(scaled(), "w", tmp_path)
    path = tmp_path / "w.safetensors"
    edited(path, lambda header, notes: notes["subclass"].update(broken))

    with pytest.raises((CorruptFileError, UnknownSubclassError), match="tensor 'w'") as caught:
        offload.load_file(path)["w"].materialize()
    assert str(path) in str(caught.value)


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=5)),
    lambda inner: st.one_of(st.lists(inner), st.dictionaries(st.text(max_size=5), inner)),
    max_leaves=8,
)
KINDS = st.sampled_from(["dtype", "device", "enum", "object", "size", "tuple", "dict"])


@given(JSON)
def test_any_recipe_gives_a_layout_or_a_corrupt_file(recipe):
    for broken in (recipe, {"dtype": "float32", "shape": recipe, "stride": recipe}):
        try:
            layout = layout_from(broken)
        except CorruptFileError:
            continue
        assert len(layout.shape) == len(layout.stride)


@given(st.dictionaries(KINDS, st.one_of(JSON, st.lists(JSON, min_size=2, max_size=2)), max_size=2))
def test_any_context_is_decoded_or_refused(context):
    values, recipe = flatten(scaled(), "w")
    try:
        unflatten(values, {**recipe, "context": context}, "w")
    except (CorruptFileError, UnknownSubclassError):
        return
