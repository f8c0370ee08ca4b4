"""Writing checkpoints: what safetensors readers find, and what is there after a failure."""

import copy
import errno
import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import accelerate
import pytest
import torch
from conftest import contents
from huggingface_hub import load_torch_model, save_torch_model, save_torch_state_dict
from safetensors import safe_open
from safetensors.torch import load_file, load_model, save_file, save_model
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor
from transformers import AutoModelForCausalLM

import offload
from offload import OffloadedTensor, save_checkpoint
from offload.checkpoints.checkpoint import open_checkpoint
from offload.checkpoints.conversion import convert_checkpoint
from offload.errors import ForeignFileError, UnknownSubclassError, UnsupportedOpError, WriteError
from offload.storage import write as write_module
from offload.storage.layout import WORDS, dtype_name
from tests.equal import assert_equal
from tests.faults import Call, killed_at_each
from tests.models.networks import Network, network
from tests.processes import run_script

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
FLOAT4 = getattr(torch, "float4_e2m1fn_x2", None)


@pytest.fixture
def model() -> Network:
    return network()


def loaded(folder: Path) -> dict[str, torch.Tensor]:
    """Everything that the safetensors library finds, copied."""
    if (folder / INDEX).exists():
        shards = set(json.loads((folder / INDEX).read_text())["weight_map"].values())
        return {key: value.clone() for shard in sorted(shards) for key, value in load_file(folder / shard).items()}
    return {key: bits(value).clone().view(value.dtype) for key, value in load_file(folder / SINGLE).items()}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same bytes in a dtype that torch can copy and compare, NaNs included."""
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize])


# The written files


@pytest.mark.parametrize("max_shard_size", ["5GB", "300B", 1])
@pytest.mark.parametrize("on_disk", [False, True], ids=["in-memory", "on-disk"])
def test_the_files_hold_what_huggingface_hub_writes(model, tmp_path, max_shard_size, on_disk):
    """The same names, values and metadata, and tied weights once; the hub's own function gets the model in memory."""
    (tmp_path / "theirs").mkdir()
    save_torch_model(model, tmp_path / "theirs", max_shard_size=300 if max_shard_size == "300B" else max_shard_size)
    if on_disk:
        offload.disk_offload(model, tmp_path / "values", offload_buffers=True)
    paths = save_checkpoint(model, tmp_path / "ours", max_shard_size)

    assert sorted(os.listdir(tmp_path / "theirs")) == sorted(path.name for path in paths)
    assert sorted(paths) == sorted((tmp_path / "ours").iterdir())
    for theirs in (tmp_path / "theirs").glob("*.safetensors"):
        assert_equal(load_file(theirs), load_file(tmp_path / "ours" / theirs.name), strides=False)
        with safe_open(theirs, "pt") as expected, safe_open(tmp_path / "ours" / theirs.name, "pt") as found:
            assert expected.metadata() == {key: text for key, text in found.metadata().items() if key != "offload"}
    if len(paths) == 1:
        again = Network()
        assert "head.weight" not in load_file(paths[0])
        assert (set(), []) == load_model(again, paths[0])
        assert torch.equal(model.base.weight, again.base.weight)
    else:
        assert tmp_path / "ours" / INDEX == paths[-1]
        expected, found = (json.loads((tmp_path / whose / INDEX).read_text()) for whose in ("theirs", "ours"))
        assert expected["weight_map"] == found["weight_map"]
        assert expected["metadata"].items() <= found["metadata"].items()


def test_every_dtype_of_the_format_comes_back(tmp_path):
    torch.manual_seed(0)
    dtypes = [*WORDS, *([FLOAT4] if FLOAT4 else [])]
    values = {}
    for dtype in dtypes:
        raw = torch.randint(0, 2 if dtype == torch.bool else 256, (6, 10 * dtype.itemsize), dtype=torch.uint8)
        whole = raw.view(dtype)
        name = dtype_name(dtype)
        values |= {name: whole, f"{name}.columns": whole[:, 2:7], f"{name}.empty": whole[:0]}
        if dtype != FLOAT4:
            values |= {f"{name}.turned": whole.t(), f"{name}.scalar": whole[1, 3]}
    on_disk = {name: OffloadedTensor.from_original_tensor(value, name) for name, value in values.items()}
    wholes = {name: on_disk[name] for name in map(dtype_name, dtypes)}
    cuts = {f"{name}.cut": whole[1:3, 2:7] for name, whole in wholes.items()}
    runs = {f"{name}.run": whole[2:4] for name, whole in wholes.items()}

    save_checkpoint(values, tmp_path / "plain")
    save_checkpoint({**on_disk, **cuts, **runs}, tmp_path / "on-disk")

    assert_equal(values, loaded(tmp_path / "plain"), strides=False)
    plain_cuts = {f"{name}.cut": values[name][1:3, 2:7] for name in wholes}
    plain_runs = {f"{name}.run": values[name][2:4] for name in wholes}
    assert_equal({**values, **plain_cuts, **plain_runs}, loaded(tmp_path / "on-disk"), strides=False)


def test_lazy_conjugates_and_negatives_are_written_as_what_they_show(tmp_path):
    value = torch.complex(torch.arange(4.0), torch.ones(4))
    stored = OffloadedTensor.from_original_tensor(value, "z")
    save_checkpoint({"c": stored.conj(), "n": stored.conj().imag, "p": value.conj()}, tmp_path)

    expected = {"c": value.conj(), "n": value.conj().imag, "p": value.conj()}
    assert_equal(
        {name: each.resolve_conj().resolve_neg() for name, each in expected.items()}, loaded(tmp_path), strides=False
    )


def test_a_value_that_is_gathered_in_pieces_is_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(write_module, "_BLOCK", 64)
    values = {"turned": torch.randn(7, 30).t(), "flat": torch.randn(100)[::2], "whole": torch.randn(9, 33)}
    stored = {name: OffloadedTensor.from_original_tensor(value, name) for name, value in values.items()}
    save_checkpoint({**values, **{f"{name}.stored": each for name, each in stored.items()}}, tmp_path / "same")
    save_checkpoint({**values, **stored}, tmp_path / "half", dtype=torch.float16)

    expected = {**values, **{f"{name}.stored": each for name, each in values.items()}}
    assert_equal(expected, loaded(tmp_path / "same"), strides=False)
    assert_equal({name: value.half() for name, value in values.items()}, loaded(tmp_path / "half"), strides=False)


def test_data_and_values_are_aligned(tmp_path):
    """Data to 4096, every value to its element size, and to 64 bytes if its size allows it."""
    sizes = {"a": (3, torch.uint8), "b": (5, torch.float64), "c": (64, torch.int8), "d": (7, torch.float16)}
    sizes |= {"e": (1, torch.float32), "f": (48, torch.float32), "g": (0, torch.float64), "h": (2, torch.complex64)}
    [path] = save_checkpoint({name: torch.ones(count, dtype=dtype) for name, (count, dtype) in sizes.items()}, tmp_path)

    entries = open_checkpoint(path)["a"].file.entries
    assert 0 == min(entry.start for entry in entries.values()) % 4096
    assert all(entry.start % entry.layout.dtype.itemsize == 0 for entry in entries.values())
    assert all(entry.start % 64 == 0 for entry in entries.values() if entry.layout.nbytes % 64 == 0)


def test_only_floating_point_values_of_more_than_a_byte_are_converted(tmp_path):
    values = {
        "wide": torch.randn(40, 3, dtype=torch.float64),
        "view": torch.randn(6, 4).t(),
        "eight": torch.randn(4).to(torch.float8_e4m3fn),
        "count": torch.arange(5),
        "yes": torch.tensor(True),
    }
    stored = {name: OffloadedTensor.from_original_tensor(value, name) for name, value in values.items()}

    save_checkpoint(values, tmp_path / "plain", dtype=torch.bfloat16)
    save_checkpoint(stored, tmp_path / "stored", dtype=torch.bfloat16)

    wide = {"wide", "view"}
    expected = {name: value.bfloat16() if name in wide else value for name, value in values.items()}
    assert_equal(expected, loaded(tmp_path / "plain"), strides=False)
    assert_equal(expected, loaded(tmp_path / "stored"), strides=False)
    assert all(value.dtype == values[name].dtype for name, value in stored.items())
    for other in (torch.int8, "flot16"):
        with pytest.raises(ValueError, match="floating-point"):
            save_checkpoint(values, tmp_path / "ints", dtype=other)
    save_checkpoint(values, tmp_path / "by name", dtype="bfloat16")
    assert_equal(expected, loaded(tmp_path / "by name"), strides=False)


def test_unflushed_writes_of_ops_are_saved(tmp_path):
    stored = OffloadedTensor.from_original_tensor(torch.zeros(1000), "w", tmp_path / "values")
    stored[5:] = 3.0
    save_checkpoint({"w": stored}, tmp_path / "saved")

    assert_equal({"w": stored.materialize()}, loaded(tmp_path / "saved"), strides=False)


def test_parts_of_one_value_are_each_saved_whole(tmp_path):
    whole = OffloadedTensor.from_original_tensor(torch.arange(6.0), "w")
    plain = torch.arange(6.0)
    values = {"a": whole[:4], "b": whole[2:], "c": plain[:4], "d": plain[2:], "e": torch.empty(0), "f": torch.empty(0)}
    save_checkpoint(values, tmp_path)

    assert_equal({name: value.clone() for name, value in values.items()}, loaded(tmp_path), strides=False)


def test_a_checkpoint_is_converted_with_what_its_files_say(tmp_path):
    values = {"a": torch.randn(3, 4), "b": torch.arange(3)}
    save_file(values, tmp_path / "source.safetensors", metadata={"format": "pt", "origin": "here"})
    convert_checkpoint(tmp_path / "source.safetensors", tmp_path / "saved", max_shard_size=10)

    assert_equal(values, loaded(tmp_path / "saved"), strides=False)
    for path in (tmp_path / "saved").glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            assert "here" == file.metadata()["origin"]


def test_an_empty_model_is_an_empty_file(tmp_path):
    assert [tmp_path / SINGLE] == save_checkpoint(nn.Identity(), tmp_path)

    assert {} == load_file(tmp_path / SINGLE)


class Plain(Network):
    """Without a `tie_weights` to tie it again."""

    tie_weights = None


@pytest.mark.parametrize("by", ["save_model", "save_checkpoint", "in shards", "converted to shards", "converted back"])
def test_weights_that_a_checkpoint_says_are_one_are_one_parameter(tmp_path, by):
    model = Plain()
    if by == "save_model":
        save_model(model, str(tmp_path / SINGLE))
    else:
        save_checkpoint(model, tmp_path / "0", "300B" if by in ("in shards", "converted back") else "5GB")
    folder = tmp_path if by == "save_model" else tmp_path / "0"
    if by.startswith("converted"):
        folder = tmp_path / "1"
        size = "300B" if by == "converted to shards" else "5GB"
        convert_checkpoint(tmp_path / "0", folder, max_shard_size=size)
    with offload.init_empty_weights():
        empty = Plain()
    assert empty.head.weight is not empty.base.weight

    again = offload.load_checkpoint_and_dispatch(empty, folder, strict=True)

    assert again.head.weight is again.base.weight
    assert torch.equal(model.head.weight, again.head.weight)
    assert isinstance(again.head.weight, nn.Parameter)
    assert {"head.weight": "base.weight"} == open_checkpoint(folder).ties


def test_weights_with_data_are_not_tied_by_a_checkpoint(tmp_path):
    """They are missing in it, as for any loader."""
    save_checkpoint(Plain(), tmp_path)
    untied = Plain()
    untied.head.weight = nn.Parameter(torch.ones(8, 8))
    report = offload.load_checkpoint_in_model(untied, tmp_path)

    assert ["head.weight"] == report.missing_keys
    assert torch.equal(torch.ones(8, 8), untied.head.weight)


# Refused


UNSTORABLE: list[tuple[str, object, type]] = [
    ("z", torch.ones(2, dtype=torch.complex128), UnsupportedOpError),
    ("m", torch.ones(2, device="meta"), UnsupportedOpError),
    ("s", torch.eye(2).to_sparse(), UnsupportedOpError),
    ("t", TwoTensor(torch.ones(2), torch.ones(2)), UnknownSubclassError),
    ("n", 3, TypeError),
    ("__metadata__", torch.ones(2), ValueError),
    ("\ud800", torch.ones(2), ValueError),
]


@pytest.mark.parametrize(("name", "value", "error"), UNSTORABLE, ids=[repr(name) for name, *_ in UNSTORABLE])
def test_an_unstorable_value_is_named_in_the_error(tmp_path, name, value, error):
    with pytest.raises(error, match=r"'t' is a TwoTensor.*disk_offload" if name == "t" else re.escape(repr(name))):
        save_checkpoint({"ok": torch.ones(3), name: value}, tmp_path / "saved")

    assert not (tmp_path / "saved").exists()


@pytest.mark.parametrize("size", [0, "0", "much", -1])
def test_an_invalid_size_or_another_object_is_refused(tmp_path, size):
    with pytest.raises(ValueError, match=repr(size)):
        save_checkpoint({"w": torch.ones(2)}, tmp_path, size)
    with pytest.raises(TypeError, match="list"):
        save_checkpoint([torch.ones(2)], tmp_path)  # type: ignore[arg-type]


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("theirs", ["single", "shards", "index", "link", "an offload folder"])
def test_a_foreign_checkpoint_is_left_as_it_is(tmp_path, theirs, sharded):
    """Even without any common name: readers would take one of the two."""
    if theirs == "index":
        (tmp_path / INDEX).write_text('{"metadata": {}, "weight_map": {}}')
    elif theirs == "link":
        save_checkpoint({"w": torch.ones(2)}, tmp_path / "elsewhere")
        (tmp_path / SINGLE).symlink_to(tmp_path / "elsewhere" / SINGLE)
    elif theirs == "an offload folder":
        OffloadedTensor.from_original_tensor(torch.ones(2), "model", tmp_path)
    else:
        save_torch_state_dict(
            {"w": torch.ones(2), "v": torch.ones(2)}, tmp_path, max_shard_size=8 if theirs == "shards" else "5GB"
        )
    before = contents(tmp_path)

    with pytest.raises(
        ForeignFileError, match="offload" if theirs == "an offload folder" else "Save to another folder"
    ):
        save_checkpoint({"w": torch.zeros(2), "v": torch.zeros(2)}, tmp_path, 8 if sharded else "5GB")

    assert before == contents(tmp_path)


@pytest.mark.parametrize("before", [8, "5GB"])
@pytest.mark.parametrize("size", ["5GB", 8])
def test_a_checkpoint_that_live_tensors_refer_to_is_not_replaced(tmp_path, before, size):
    """By saving others, or these themselves; garbage does not count."""
    folder, link = tmp_path / "saved", tmp_path / "link"
    save_checkpoint({"a": torch.ones(2), "b": torch.zeros(2)}, folder, before)
    link.symlink_to(folder)
    live = [offload.load_file(folder)]
    live.append(live)  # a cycle
    stood = contents(folder)

    for values, place in (({"a": torch.zeros(2)}, folder), (live[0], link)):
        with pytest.raises(ForeignFileError, match=r"tensors of this process refer to .*another folder"):
            save_checkpoint(values, place, size)

    assert stood == contents(folder)
    assert [1.0, 1.0] == live[0]["a"].tolist()
    del live, values
    assert save_checkpoint({"a": torch.zeros(2)}, folder, size)


# Existing checkpoints


def test_a_mapped_model_is_saved_over_its_own_file(tmp_path):
    first = {"a": torch.randn(5000), "b": torch.randn(5000)}
    save_checkpoint(first, tmp_path)
    mapped = load_file(tmp_path / SINGLE)
    save_checkpoint({"b": mapped["a"], "a": mapped["b"]}, tmp_path)

    assert_equal({"b": first["a"], "a": first["b"]}, loaded(tmp_path), strides=False)
    assert_equal(first, mapped, strides=False)


VALUES = {name: torch.full((4,), float(number)) for number, name in enumerate("abcd")}
OTHERS = {name: value + 10 for name, value in VALUES.items()}
SIZES = [1000, 16, 32]  # one file, four, two
PAIRS = [(1000, 1000), (1000, 16), (16, 1000), (32, 32)]  # before, and after


@pytest.mark.parametrize("before", SIZES)
@pytest.mark.parametrize("after", SIZES)
def test_an_own_checkpoint_is_replaced_as_a_whole(tmp_path, before, after):
    (tmp_path / "config.json").write_text("{}")
    save_file({"x": torch.ones(1)}, tmp_path / "model-00009-of-00009.safetensors")
    others = contents(tmp_path)
    save_checkpoint(VALUES, tmp_path, before)
    paths = save_checkpoint(OTHERS, tmp_path, after)

    assert {*others, *(path.name for path in paths)} == set(os.listdir(tmp_path))
    assert others.items() <= contents(tmp_path).items()
    assert_equal(OTHERS, {name: value.clone() for name, value in loaded(tmp_path).items()}, strides=False)


def loaded_by(load: Callable[..., object], folder: Path, **options: object) -> dict[str, torch.Tensor]:
    model = nn.ParameterDict({name: torch.zeros_like(value) for name, value in VALUES.items()})
    load(model, folder, **options)
    return dict(model.state_dict())


READERS: list[Callable[[Path], dict[str, torch.Tensor]]] = [
    lambda folder: {name: value.materialize() for name, value in offload.load_file(folder).items()},
    lambda folder: loaded_by(accelerate.load_checkpoint_in_model, folder),
    lambda folder: loaded_by(load_torch_model, folder, strict=True),
]


def assert_readers_find_a_whole_one(folder: Path) -> None:
    """Old values, or new ones. The hub's own reader does not accept other files beside a single one."""
    for read in READERS[:2]:
        values = read(folder)
        assert_equal(VALUES if torch.equal(values["a"], VALUES["a"]) else OTHERS, values, strides=False)


@pytest.mark.campaign("kills")
@pytest.mark.parametrize(
    ("before", "after"),
    [(1000, 32), (32, 1000), *(pytest.param(*pair, marks=pytest.mark.campaign("kills", only=True)) for pair in PAIRS)],
)
def test_a_process_that_is_killed_leaves_the_old_checkpoint_or_the_new_one(quick_folder, before, after):
    """At each call that changes files. The next save cleans up."""

    def begin() -> Path:
        folder = Path(quick_folder)
        paths = save_checkpoint(VALUES, folder, before)
        assert sorted(paths) == sorted(folder.iterdir())
        return folder

    def check(folder: Path, _: Call) -> None:
        assert_readers_find_a_whole_one(folder)

    died_at = killed_at_each(begin, lambda folder: save_checkpoint(OTHERS, folder, after), check)

    assert {"os.replace", "os.pwrite", "os.fsync"} <= {call.name for call in died_at}


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize(("before", "after"), PAIRS)
def test_other_readers_find_a_checkpoint_that_replaced_another(read, tmp_path, before, after):
    for values, size in ((VALUES, before), (OTHERS, after), (VALUES, after), (OTHERS, before)):
        save_checkpoint(values, tmp_path, size)

        assert_equal(values, read(tmp_path), strides=False)


@pytest.mark.parametrize("load", [AutoModelForCausalLM.from_pretrained, offload.from_pretrained])
def test_transformers_loads_and_replaces_shards_that_replaced_others(load, llama_folder, tmp_path):
    """With the same names, tied as it expects, in other numbers; what it then saves replaces all of our shards."""
    model = load(llama_folder)
    for size in ("60KB", "100KB", "100KB"):
        model.model.norm.weight.data.add_(1)
        save_checkpoint(model, tmp_path, size)
        model.config.save_pretrained(tmp_path)
    found = AutoModelForCausalLM.from_pretrained(tmp_path)

    assert any(path.name.startswith("model-2-") for path in tmp_path.iterdir())
    assert "lm_head.weight" not in open_checkpoint(tmp_path)
    assert_equal(model, found, strides=False)
    copy.deepcopy(found).save_pretrained(tmp_path, max_shard_size="100KB")
    shards = {path.name for path in tmp_path.glob("*.safetensors")}
    assert set(json.loads((tmp_path / INDEX).read_text())["weight_map"].values()) == shards


def test_a_full_disk_says_which_file_and_what_to_do(tmp_path, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)

    with pytest.raises(WriteError, match="free some space, or take another folder") as caught:
        save_checkpoint({"w": torch.ones(3)}, tmp_path / "saved")

    assert str(tmp_path / "saved" / SINGLE) == caught.value.filename
    assert [] == os.listdir(tmp_path / "saved")


# Memory

BOUNDED = """
    import json, os, sys, torch, offload
    from huggingface_hub import save_torch_model
    from safetensors.torch import load_model, save_model
    from torch import nn
    from offload.checkpoints.conversion import convert_checkpoint
    from tests.peak import Peak

    def network(source):
        shapes = [value.shape[::-1] for value in offload.load_file(source).values()]
        layers = [nn.Linear(*shape, bias=False, device="meta") for shape in shapes]
        return offload.load_checkpoint_and_dispatch(nn.Sequential(*layers), source)

    def save_by_the_hub(source, to):
        os.mkdir(to)
        save_torch_model(network(source), to)

    def turned(source):
        return {name: value.t() for name, value in offload.load_file(source).items()}

    WAYS = {
        "in shards": lambda source, to: offload.save_checkpoint(offload.load_file(source), to, "10MB"),
        "turned": lambda source, to: offload.save_checkpoint(turned(source), to, dtype=torch.bfloat16),
        "cast": lambda source, to: convert_checkpoint(source, to, dtype=torch.bfloat16),
        "save_model": lambda source, to: save_model(network(source), to + ".safetensors"),
        "save_torch_model": save_by_the_hub,
        "load_model": lambda source, to: load_model(network(source), source),
    }
    small, source, target, way = sys.argv[1:]
    WAYS[way](small, target + "/warm")  # imports, first calls
    with Peak() as peak:
        WAYS[way](source, target + "/saved")
    print(json.dumps(dict(grown=peak.nbytes, looks=peak.calls)))
"""


@pytest.mark.parametrize("way", ["in shards", "turned", "cast", "save_model", "save_torch_model", "load_model"])
def test_a_model_is_saved_and_loaded_in_little_memory_by_safetensors_and_the_hub_too(tmp_path, way):
    """A model of 256 MB in 8 values: less than one of them, plus a few megabytes for the interpreter."""
    values = {f"{layer}.weight": torch.full((2000, 4000), layer + 0.5) for layer in range(8)}
    save_file(values, tmp_path / "source.safetensors")
    save_file({"0.weight": torch.ones(1000, 2000)}, tmp_path / "small.safetensors")
    given = tmp_path / "small.safetensors", tmp_path / "source.safetensors", tmp_path, way
    measured = json.loads(run_script(BOUNDED, *given).splitlines()[-1])

    assert measured["looks"] > 5
    assert measured["grown"] < 16e6
    for path in tmp_path.glob("saved*"):
        found = offload.load_file(path)
        assert values.keys() == found.keys()
        for name, value in values.items():
            expected = value.t() if way == "turned" else value
            assert torch.equal(expected.to(found[name].dtype), found[name].materialize())
            assert (torch.bfloat16 if way in ("turned", "cast") else torch.float32) == found[name].dtype
    assert (way == "load_model") == (not list(tmp_path.glob("saved*")))
