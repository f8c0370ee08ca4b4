"""Nested data in a folder: it is loaded as it was saved, or an error says where it differs."""

from __future__ import annotations

import dataclasses
import enum
import json
import math
import os
import shutil
import sys
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from transformers import DynamicCache
from transformers.modeling_outputs import CausalLMOutputWithPast

import offload
from offload import OffloadedTensor, load_tree, save_tree
from offload.errors import (
    CorruptFileError,
    ForeignFileError,
    MissingFileError,
    UnknownTypeError,
    UnsupportedOpError,
    WriteError,
)
from offload.storage.layout import TORCH_DTYPES
from offload.tensor.deferred import deferred
from offload.tree import saved
from tests.conftest import contents
from tests.processes import run_script


class Point(NamedTuple):
    """A named tuple with any fields."""

    x: Any
    y: Any = None


@dataclasses.dataclass
class Batch:
    """A dataclass with a computed field."""

    ids: Any
    mask: Any = None
    total: Any = dataclasses.field(init=False, default=0)


@dataclasses.dataclass(frozen=True)
class Frozen:
    """A frozen dataclass."""

    value: Any
    computed: Any = dataclasses.field(init=False, default=None)


@dataclasses.dataclass
class Items(list):
    """A list with a field."""

    unit: Any = None


class Colour(enum.Enum):
    """An enum."""

    RED = "r"


def same(expected: Any, found: Any) -> bool:
    """Equal in structure, types and values, bit for bit; tensors on disk are compared by value."""
    if isinstance(expected, torch.Tensor):
        plain, there = offload.materialize(expected.detach()), offload.materialize(found.detach())
        return (plain.dtype, plain.shape) == (there.dtype, there.shape) and torch.equal(
            bytes_of(plain), bytes_of(there)
        )
    if type(expected) is not type(found):
        return False
    if dataclasses.is_dataclass(expected):
        names = [field.name for field in dataclasses.fields(expected)]
        return all(same(getattr(expected, name), getattr(found, name)) for name in names)
    if isinstance(expected, dict):
        return list(expected) == list(found) and all(same(expected[key], found[key]) for key in expected)
    if isinstance(expected, list | tuple):
        return len(expected) == len(found) and all(map(same, expected, found))
    return expected == found or (expected != expected and found != found)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


# Loaded again

NESTS: dict[str, Any] = {
    "a tensor": torch.arange(3.0),
    "nothing": None,
    "text": "some\n\udcff text",
    "numbers": [0, -1, 10**30, 2.5, -0.0, math.inf, -math.inf, math.nan, 1j, complex(math.nan, -math.inf), True, False],
    "bytes": [b"", b"\x00\xff"],
    "torch's": [torch.float8_e4m3fn, torch.device("cuda:1"), torch.Size([2, 3]), torch.Size([])],
    "empty": [{}, [], (), OrderedDict()],
    "in each other": {"a": [({"b": torch.ones(2)},), [[torch.zeros(1)]]]},
    "keys": {1: "int", "1": "text", 2.5: "float", None: "none", (1, ("a", b"b")): 0, Colour.RED: torch.ones(1)},
    "an ordered dict": OrderedDict([("b", 1), ("a", torch.ones(1)), (3, 2)]),
    "a named tuple": Point(torch.ones(2), [Point(None)]),
    "a dataclass": Batch(torch.arange(3), {"x": Batch(None)}),
    "an enum": [Colour.RED],
    "like nodes": {"tensor": "w", "list": [{"dict": {}}], "float": "nan"},
    "names that read the same": {"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}, "a.b~2": torch.ones(2)},
    "odd names": {"": torch.ones(2), "/..": torch.ones(3), "é" * 300: torch.ones(4), "A": torch.ones(5)},
    "of the format": {"__metadata__": torch.ones(1), "offload": torch.ones(2)},
    "shapes": [torch.tensor(2.5), torch.empty(0), torch.empty(2, 0, 3), torch.ones(2, 1, 3)],
    "strides": [torch.arange(6.0).reshape(2, 3).t(), torch.arange(12.0)[::2], torch.ones(1).expand(3)],
    "a conjugate": torch.ones(2, dtype=torch.cfloat).conj(),
}  # fmt: skip


NESTS["every dtype"] = [
    torch.arange(48, dtype=torch.uint8).remainder(2).view(dtype)
    for dtype in (*TORCH_DTYPES.values(), torch.complex128, torch.complex32)
]
NESTS["an empty dataclass of items"] = Items("m")
NESTS["an output of transformers"] = CausalLMOutputWithPast(
    logits=torch.ones(2, 3), hidden_states=(torch.zeros(1),) * 2
)


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("tree", NESTS.values(), ids=NESTS)
def test_saved_trees_come_back(tmp_path, tree):
    manifest = save_tree(tree, tmp_path / "parents" / "tree")

    assert tmp_path / "parents" / "tree" / "tree.json" == manifest
    assert same(tree, load_tree(manifest.parent, types=[Point, Batch, Items, Colour, CausalLMOutputWithPast]))
    assert not list(tmp_path.rglob(".*"))


def test_tensors_come_back_as_offloaded_ones_over_readable_files(tmp_path):
    save_tree({"model": [{"weight": torch.ones(2)}], 3: torch.zeros(1)}, tmp_path)
    tree = load_tree(tmp_path)

    weight = tree["model"][0]["weight"]
    assert offload.is_offloaded(weight)
    assert tmp_path / "tensors-1.safetensors" == weight.offload_path
    assert ["tensors-1.safetensors", "tree.json"] == sorted(contents(tmp_path))
    assert torch.equal(torch.ones(2), load_file(weight.offload_path)["model.0.weight"])
    assert torch.device("meta") == load_tree(tmp_path, device="meta")[3].device


def test_strides_parameters_and_requires_grad_are_kept(tmp_path):
    """Of a result of autograd too, which comes back as a leaf."""
    parameters = [torch.nn.Parameter(torch.ones(1), requires_grad) for requires_grad in (True, False)]
    image = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    trained = torch.ones(1, requires_grad=True)
    save_tree([*parameters, trained, image, trained * 2], tmp_path)

    found = load_tree(tmp_path)
    assert [True, True, False, False, False] == [isinstance(tensor, torch.nn.Parameter) for tensor in found]
    assert [True, False, True, False, True] == [tensor.requires_grad for tensor in found]
    assert image.stride() == found[3].stride()
    assert found[4].is_leaf


def test_a_shared_tensor_is_stored_once_and_is_one_again(tmp_path):
    weight = torch.nn.Parameter(torch.randn(3, 2))
    save_tree({"a": weight, "b": [weight, weight.detach()], "other": weight.clone()}, tmp_path)

    tree = load_tree(tmp_path)
    assert {"a", "other"} == load_file(tmp_path / "tensors-1.safetensors").keys()
    assert tree["a"] is tree["b"][0]
    assert tree["a"].untyped_storage().data_ptr() == tree["b"][1].untyped_storage().data_ptr()
    tree["b"][1].fill_(7)
    assert tree["a"].eq(7).all()


def test_views_of_offloaded_tensors_and_wrapped_ones_are_saved(tmp_path):
    """Into other folders, where they are copied, and over the tree that they are of."""

    def parts(whole: torch.Tensor, wave: torch.Tensor) -> dict[str, torch.Tensor]:
        views = {"row": whole[1], "turned": whole.t(), "some": whole[:, 1:], "part": wave.conj().imag}
        return {"whole": whole, "wave": wave, **views, "conj": wave.conj(), "computed": (whole + 1j).conj()}

    plain = torch.arange(12.0).reshape(4, 3), torch.arange(3.0) + 1j
    stored = (OffloadedTensor.from_original_tensor(value, name) for value, name in zip(plain, "wc", strict=True))
    save_tree(parts(*stored), tmp_path / "a")
    assert same(parts(*plain), load_tree(tmp_path / "a"))
    for folder in ("b", "a"):
        tree = load_tree(tmp_path / "a")
        save_tree(parts(tree["whole"], tree["wave"]), tmp_path / folder)
        assert same(parts(*plain), load_tree(tmp_path / folder))
    shutil.rmtree(tmp_path / "a")

    assert same(parts(*plain), load_tree(tmp_path / "b"))


def test_quantized_weights_are_refused_by_place(tmp_path):
    pytest.importorskip("torchao")
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    linear = torch.nn.Linear(64, 32)
    quantize_(linear, Int8WeightOnlyConfig())
    offloaded = OffloadedTensor.from_original_tensor(linear.weight.detach(), "w")

    for weight in (linear.weight.detach(), offloaded):
        with pytest.raises(UnsupportedOpError, match=r"'a\.0' is a tensor subclass.*save_checkpoint"):
            save_tree({"a": [weight]}, tmp_path)


# Classes


def test_a_class_that_was_not_given_is_an_error_with_the_way_out(tmp_path):
    save_tree({"p": Point(1)}, tmp_path)

    with pytest.raises(UnknownTypeError, match=r"holds a Point \(of .*test_tree\).*pass types=\[Point\]"):
        load_tree(tmp_path, types=[Batch])


def test_a_registered_class_need_not_be_given(tmp_path, monkeypatch):
    monkeypatch.setattr("offload.storage.subclasses._REGISTERED", {})
    save_tree(Point(1, 2), tmp_path)
    offload.register_subclass(Point)

    assert Point(1, 2) == load_tree(tmp_path)


def test_a_class_of_the_same_name_that_moved_is_taken_if_it_is_the_only_one(tmp_path):
    """But not one of another kind, which is not called."""
    save_tree(Point(1, 2), tmp_path)
    names, uncalled = {"__module__": "elsewhere", "__qualname__": "Point"}, lambda *_, **__: 1 / 0
    moved = type("Point", (Point,), names)

    assert moved is type(load_tree(tmp_path, types=[moved]))
    assert Point is type(load_tree(tmp_path, types=[moved, Point]))
    with pytest.raises(UnknownTypeError, match="Other is not a dataclass or named tuple"):
        load_tree(tmp_path, types=[type("Other", (), {**names, "__module__": Point.__module__, "__init__": uncalled})])


@pytest.mark.parametrize("word", ["this:Point", "os:system", "builtins:eval"])
def test_no_class_is_imported_or_called_by_the_name_in_a_file(tmp_path, word):
    save_tree(Point(1), tmp_path)
    manifest = tmp_path / "tree.json"
    manifest.write_text(manifest.read_text().replace(f"{Point.__module__}:Point", word))
    assert word in manifest.read_text()

    with pytest.raises(UnknownTypeError):
        load_tree(tmp_path)
    assert "this" not in sys.modules


def test_fields_that_are_computed_come_back_as_they_were(tmp_path):
    batch, frozen = Batch(1), Frozen(2)
    batch.total = 5
    object.__setattr__(frozen, "computed", torch.ones(2))
    save_tree([batch, frozen], tmp_path)

    assert same([batch, frozen], load_tree(tmp_path, types=[Batch, Frozen]))


def test_a_class_whose_fields_have_changed_is_an_error_that_names_them(tmp_path):
    save_tree([Batch(1)], tmp_path)
    changed = dataclasses.make_dataclass("Batch", ["other"])

    words = r"a Batch can't be made of the fields \['ids', 'mask', 'total'\] that were saved"
    with pytest.raises(UnknownTypeError, match=words):
        load_tree(tmp_path, types=[changed])


# Not supported


def cyclic() -> list[Any]:
    ring: list[Any] = [1]
    ring.append({"again": ring})
    return ring


class Color(enum.Flag):
    """A flag, of which several may be set."""

    RED = enum.auto()
    BLUE = enum.auto()


def items() -> Items:
    made = Items("m")
    made.append(1)
    return made


def tensorclass() -> Any:
    tensordict = pytest.importorskip("tensordict")
    rows = type("Rows", (), {"__annotations__": {"x": torch.Tensor}})
    return tensordict.tensorclass(rows)(x=torch.ones(4, 3), batch_size=(4,))


def a_tensordict() -> Any:
    return pytest.importorskip("tensordict").TensorDict({"x": torch.ones(2)}, [2])


def deep() -> list[Any]:
    nest: list[Any] = []
    for _ in range(5000):
        nest = [nest]
    return nest


SET = r"'a\.0' is a builtins:set, which can't be stored as plain data: make it"
UNSTORABLE: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: {"a": [{1, 2}]}, UnknownTypeError, SET),
    (lambda: object(), UnknownTypeError, "the value itself is a builtins:object"),
    (lambda: {"m": torch.nn.Linear(1, 1)}, UnknownTypeError, r"'m' is a torch.*:Linear.*save its state_dict\(\)"),
    (lambda: [torch.ones(1).numpy()], UnknownTypeError, "'0' is a numpy:ndarray.*make it a .* tensor, number or text"),
    (lambda: {"f": print}, UnknownTypeError, "'f' is a builtins:builtin_function_or_method"),
    (lambda: {"c": Point}, UnknownTypeError, "'c' is a builtins:type"),
    (lambda: {torch.ones(1): 1}, UnknownTypeError, "a dict in the value itself has a tensor as a key"),
    (lambda: {"c": DynamicCache()}, UnknownTypeError, "'c' is a transformers.cache_utils:DynamicCache"),
    (cyclic, UnknownTypeError, r"'1\.again' is a list that contains itself"),
    (deep, UnknownTypeError, "nested more than 200 containers deep"),
    (lambda: {"w": torch.ones(2, device="meta")}, UnsupportedOpError, "'w' is on the meta device"),
    (lambda: {"w": [torch.eye(2).to_sparse()]}, UnsupportedOpError, r"'w\.0' is not a dense tensor"),
    (lambda: {"td": a_tensordict()}, UnknownTypeError, r"'td' is a tensordict.*tensordict\.save_memmap keeps such"),
    (lambda: [tensorclass()], UnknownTypeError, r"'0' is a .*Rows, which is more than its fields: .*save_memmap keeps"),
    (lambda: [items()], UnknownTypeError, r"'0' is a .*Items, which is more than its fields"),
    (lambda: {"\ud800": torch.ones(1)}, ValueError, "name must be valid unicode"),
    (lambda: [Color.RED | Color.BLUE], UnknownTypeError, r"'0' is a .*Color, which can't be stored"),
]


@pytest.mark.parametrize(("make", "kind", "words"), UNSTORABLE)
def test_unstorable_values_are_refused_by_place_before_anything_is_written(tmp_path, make, kind, words):
    with pytest.raises(kind, match=words):
        save_tree(make(), tmp_path / "tree")

    assert not list(tmp_path.iterdir())


# Saving again


def test_a_recipe_over_a_value_of_the_tree_is_saved_as_what_it_makes(tmp_path):
    save_tree({"a": torch.arange(6.0)}, tmp_path)
    save_tree({"a": deferred(load_tree(tmp_path)["a"]).to(torch.float64).stored("a")}, tmp_path)

    assert same({"a": torch.arange(6.0, dtype=torch.float64)}, load_tree(tmp_path))


def test_a_second_save_replaces_the_tree_and_keeps_a_file_that_its_tensors_refer_to(tmp_path):
    save_tree({"a": torch.zeros(2), "b": torch.ones(2), "c": torch.ones(3)}, tmp_path)
    tree = load_tree(tmp_path)
    tree["a"] += 5
    del tree["c"]
    for _ in range(2):
        save_tree({"moved": tree["b"], **tree}, tmp_path)

        assert same({"moved": torch.ones(2), "a": torch.full((2,), 5.0), "b": torch.ones(2)}, load_tree(tmp_path))
    assert ["tensors-1.safetensors", "tensors-3.safetensors", "tree.json"] == sorted(contents(tmp_path))
    assert tree["b"].eq(1).all()
    save_tree([1], tmp_path)
    assert ["tree.json"] == sorted(contents(tmp_path))


def test_a_write_to_a_loaded_tensor_leaves_the_saved_tree(tmp_path):
    save_tree([torch.zeros(2)], tmp_path / "tree")
    before = contents(tmp_path / "tree")
    tree = load_tree(tmp_path / "tree", offload_dir=tmp_path / "copies")
    tree[0] += 1

    assert before == contents(tmp_path / "tree")
    assert tmp_path / "copies" / "0.safetensors" == tree[0].offload_path


def test_a_tensor_over_the_old_tree_is_an_error_once_it_is_replaced(tmp_path):
    save_tree([torch.zeros(2)], tmp_path)
    old = load_tree(tmp_path)
    save_tree([torch.ones(2)], tmp_path)

    with pytest.raises(MissingFileError, match=r"tensor '0'"):
        old[0] + 1


@pytest.mark.parametrize("where", ["tensor.saved.write_value", "storage.replacing.write_all", "os.replace"])
def test_a_failure_leaves_the_old_tree_and_nothing_else(tmp_path, monkeypatch, where):
    save_tree({"a": torch.zeros(2)}, tmp_path)
    before = contents(tmp_path)

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(where if where.startswith("os.") else f"offload.{where}", fail)
    with pytest.raises(WriteError, match=r"No space left.*nothing was changed"):
        save_tree({"a": torch.ones(2), "b": torch.ones(3)}, tmp_path)
    monkeypatch.undo()

    assert before == contents(tmp_path)


def test_other_files_in_the_folder_are_left(tmp_path):
    """With names like those of a tree's own files, too, and links to those of another tree."""
    mine = OffloadedTensor.from_original_tensor(torch.ones(2), "tensors-1", tmp_path)
    (tmp_path / "tensors-2.safetensors").write_text("mine")
    save_tree([torch.ones(3)], tmp_path / "other")
    (tmp_path / "tensors-3.safetensors").symlink_to(tmp_path / "other" / "tensors-1.safetensors")
    before = contents(tmp_path)
    save_tree([torch.zeros(1)], tmp_path)
    save_tree([torch.zeros(2), mine], tmp_path)

    assert same([torch.zeros(2), torch.ones(2)], load_tree(tmp_path))
    assert before == {name: data for name, data in contents(tmp_path).items() if name in before}
    assert (tmp_path / "tensors-3.safetensors").is_symlink()
    assert mine.eq(1).all()


def test_a_tree_json_of_another_program_is_left(tmp_path):
    (tmp_path / "tree.json").write_text('{"children": []}')
    before = contents(tmp_path)

    with pytest.raises(ForeignFileError, match=r"tree\.json is not a tree that offload saved: it is left as it is"):
        save_tree([1], tmp_path)
    with pytest.raises(ForeignFileError, match="not a tree that offload saved"):
        load_tree(tmp_path)
    assert before == contents(tmp_path)


def test_two_savers_at_a_time_are_an_error_for_the_second(tmp_path, monkeypatch):
    refused = []

    def meanwhile(_: Path) -> None:
        with pytest.raises(WriteError, match="by another process, or thread: wait for it"):
            save_tree([1], tmp_path)
        refused.append(True)

    monkeypatch.setattr("offload.storage.replacing.sync_folder", meanwhile)
    save_tree([2], tmp_path)

    assert refused
    assert [2] == load_tree(tmp_path)


# Damaged folders


def test_a_missing_or_cut_file_is_an_error_that_names_it(tmp_path, monkeypatch):
    save_tree({"a": torch.ones(2)}, tmp_path)
    path = tmp_path / "tensors-1.safetensors"
    os.truncate(path, 4099)

    with pytest.raises(CorruptFileError, match=r"tensors-1\.safetensors .*cut off"):
        load_tree(tmp_path)
    path.unlink()
    with pytest.raises(MissingFileError, match=r"tensors-1\.safetensors: the file is missing"):
        load_tree(tmp_path)
    with pytest.raises(MissingFileError, match=r"there is no tree here: save_tree writes this file"):
        load_tree(tmp_path / "nowhere")
    monkeypatch.setattr(saved, "_KIND", dataclasses.replace(saved._KIND, most=100))
    with pytest.raises(CorruptFileError, match=r"tree\.json is larger than 100 bytes"):  # and not read to its end
        load_tree(tmp_path)


DAMAGES: list[tuple[Callable[[Any], Any], str]] = [
    (lambda m: m["offload"].update(tree=2), "is of version 2, and this release of offload reads version 1"),
    (lambda m: m.pop("structure"), "names no file of tensors, or no structure"),
    (lambda m: m.update(structure={"tensor": "b"}), "there is no tensor 'b' in tensors-1"),
    (lambda m: m.update(file=None), "there is no tensor 'a' in None"),
    (lambda m: m.update(structure={"dtype": "float99"}), "this torch has no dtype 'float99'"),
    *(
        (lambda m, file=file: m.update(file=file), "names no file of tensors, or no structure")
        for file in ("../tensors-1.safetensors", "/tensors-1.safetensors", ["1"])
    ),
    *(
        (lambda m, structure=structure: m.update(structure=structure), "its structure is malformed")
        for structure in ([1], {"made up": 1}, {"list": 3}, {"bytes": "%"}, {"list": [], "dict": {}})
    ),
]


@pytest.mark.parametrize(("edit", "words"), DAMAGES)
def test_a_damaged_manifest_is_an_error_that_says_how(tmp_path, edit, words):
    path = save_tree({"a": torch.ones(2)}, tmp_path)
    manifest = json.loads(path.read_text())
    edit(manifest)
    path.write_text(json.dumps(manifest))

    with pytest.raises(CorruptFileError, match=words):
        load_tree(tmp_path)


# Memory


def test_saving_values_on_disk_takes_no_memory(tmp_path):
    """40 MiB of values, whole and as part of a file, with less than 12 MiB of anonymous memory."""
    nbytes = run_script(
        """
        import sys, torch
        from pathlib import Path
        from offload import OffloadedTensor, load_tree, save_tree
        from tests.peak import Peak

        folder = Path(sys.argv[1])
        x = OffloadedTensor.empty((10 << 20,), name="x", offload_dir=folder)
        save_tree([x[:10]], folder / "warm")
        with Peak() as peak:
            save_tree({"x": x, "part": x[5:]}, folder / "a")
            save_tree(load_tree(folder / "a"), folder / "b")
        print(peak.nbytes)
        """,
        tmp_path,
    )

    assert int(nbytes) < 12 << 20
