"""tensordict: its folders open here in place, ours open there, and offloaded tensors work as leaves."""

import copy
import json
import os
import pickle
import sys
from functools import partial
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import pytest
import torch

import offload
from offload import OffloadedTensor
from offload.errors import (
    ArgumentTypeError,
    ChangedFileError,
    CorruptFileError,
    ForeignFileError,
    MissingFileError,
    ShapeMismatchError,
    UnknownTypeError,
    UnsupportedOpError,
)
from offload.integrations.tensordict import load_memmap, load_memmap_, memmap_like, save_memmap
from tests import equal
from tests.conftest import contents
from tests.processes import in_fork, run_script

tensordict = pytest.importorskip("tensordict")
from tensordict import (  # noqa: E402
    LazyStackedTensorDict,
    NonTensorData,
    NonTensorStack,
    TensorDict,
    is_tensor_collection,
    tensorclass,
)

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning:tensordict.*", "ignore::UserWarning:torch.nested.*")


@tensorclass
class Sample:
    hidden: torch.Tensor
    text: str = "x"
    score: torch.Tensor | None = None


DTYPES = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64]
DTYPES += [torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128]
NESTED = TensorDict({"x": torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)])})


def bits(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    count = torch.Size(shape).numel() * dtype.itemsize
    return (torch.arange(count) * 37 % (2 if dtype == torch.bool else 63)).to(torch.uint8).view(dtype).reshape(shape)


def rich() -> TensorDict:
    """One of everything that both sides support."""
    rows = TensorDict(
        {
            **{str(dtype).removeprefix("torch."): bits(3, 2, dtype=dtype) for dtype in DTYPES},
            "deep": TensorDict({"deeper": TensorDict({"y": bits(3, 2, 5)}, [3, 2], names=["time", "n"])}, [3]),
            "no elements": torch.empty(3, 0, 2),
            "odd/..\\%* key\n": bits(3),
            "": bits(3),
            "..": bits(3),
            "none": TensorDict({}, [3]),
            "sample": Sample(hidden=bits(3, 4), text="hello", batch_size=[3]),
            "data": NonTensorData({"k": [1, 2.5, None, True, "s"]}, batch_size=[3]),
            "stack": NonTensorStack("a", "b", "c"),
            "lazy": LazyStackedTensorDict(
                *[TensorDict({"a": bits(size), f"only{size}": bits(2)}) for size in (1, 2, 3)]
            ),
        },
        batch_size=[3],
        names=["time"],
    )
    return TensorDict({"of no dimension": torch.tensor(2.5), "rows": rows, "text": "hi"})


def assert_same(expected: object, found: object) -> None:
    assert type(expected) is type(found)
    assert expected.batch_size == found.batch_size
    assert list(expected.names) == list(found.names)
    assert expected.device == found.device
    if isinstance(expected, NonTensorStack | NonTensorData):
        assert expected.tolist() == found.tolist()
    elif isinstance(expected, LazyStackedTensorDict):
        assert expected.stack_dim == found.stack_dim
        for one, other in zip(expected.tensordicts, found.tensordicts, strict=True):
            assert_same(one, other)
    else:
        assert set(expected.keys()) == set(found.keys())
        for key in expected.keys():  # noqa: SIM118
            one, other = expected.get(key), found.get(key)
            if is_tensor_collection(one):
                assert_same(one, other)
            else:
                assert_equal(one, other)


assert_equal = partial(equal.assert_equal, strides=False)


def leaves(td: object) -> list[torch.Tensor]:
    """The tensors in a collection; for a lazy stack, those of its layers."""
    if isinstance(td, LazyStackedTensorDict):
        return [leaf for layer in td.tensordicts for leaf in leaves(layer)]
    if not is_tensor_collection(td):
        return [td] if isinstance(td, torch.Tensor) else []
    return [leaf for key in td.keys() for leaf in leaves(td.get(key))]  # noqa: SIM118


# A folder written by tensordict, opened here


def test_a_folder_of_tensordicts_opens_as_what_tensordict_gives(tmp_path):
    rich().memmap(tmp_path)
    before = contents(tmp_path)
    found = load_memmap(tmp_path)

    assert_same(TensorDict.load_memmap(tmp_path), found)
    assert all(isinstance(leaf, OffloadedTensor) for leaf in leaves(found) if leaf.numel())
    assert tmp_path / "rows" / "float32.memmap" == found["rows", "float32"].offload_path
    assert "rows.float32" == found["rows", "float32"].name
    assert contents(tmp_path) == before


def test_a_nested_tensor_is_refused(tmp_path):
    NESTED.memmap(tmp_path)

    with pytest.raises(UnsupportedOpError, match=r"'x' in .* is a nested tensor: open it by TensorDict"):
        load_memmap(tmp_path)


def test_a_root_of_another_class_opens_too_and_so_do_files_whose_names_are_not_escaped(tmp_path):
    Sample(hidden=bits(2, 2), text="t", batch_size=[2]).memmap(tmp_path / "sample")
    parts = [TensorDict({"a": bits(2)}, [2]) for _ in range(2)]
    LazyStackedTensorDict(*parts, stack_dim=1).memmap(tmp_path / "stack")
    TensorDict({"a b": bits(2), "c d": TensorDict({"x y": bits(3)})}).memmap(tmp_path / "old", robust_key=False)

    for folder in (tmp_path / "sample", tmp_path / "stack", tmp_path / "old"):
        assert_same(TensorDict.load_memmap(folder), load_memmap(folder))


def test_a_file_that_is_longer_than_its_leaf_is_read_as_tensordict_reads_it(tmp_path):
    TensorDict({"x": bits(100)}).memmap(tmp_path)
    TensorDict({"x": bits(10)}).memmap(tmp_path)  # leaves the longer file
    assert 400 == (tmp_path / "x.memmap").stat().st_size

    assert_equal(bits(10), load_memmap(tmp_path)["x"])


def test_a_first_write_copies_the_leaf_and_leaves_the_folder(tmp_path):
    TensorDict({"x": bits(4)}).memmap(tmp_path / "a")
    before = contents(tmp_path / "a")
    found = load_memmap(tmp_path / "a", offload_dir=tmp_path / "copies")
    found["x"] += 1

    assert_equal(bits(4) + 1, found["x"])
    assert tmp_path / "copies" / "x.safetensors" == found["x"].offload_path
    assert contents(tmp_path / "a") == before


def test_leaves_go_to_other_processes_by_reference(tmp_path):
    TensorDict({"x": bits(4)}).memmap(tmp_path)

    passed = pickle.loads(bytes(ForkingPickler.dumps(load_memmap(tmp_path)["x"])))

    assert tmp_path / "x.memmap" == passed.offload_path
    assert_equal(bits(4), passed)


def test_on_meta_leaves_have_no_values(tmp_path):
    TensorDict({"x": bits(4, 2)}).memmap(tmp_path)
    meta = load_memmap(tmp_path, device="meta")

    assert meta["x"].is_meta
    assert (4, 2) == meta["x"].shape


def test_a_leaf_may_be_larger_than_memory(tmp_path):
    """4 TB, in a file that takes no disk space."""
    memmap_like({"x": torch.empty(1, device="meta").expand(1 << 40)}, tmp_path / "a")

    assert [0, 0] == load_memmap(tmp_path / "a")["x"][[5, -1]].tolist()


# What is wrong with a folder


def test_a_class_that_a_folder_names_is_not_imported(tmp_path):
    TensorDict({"x": bits(2)}).memmap(tmp_path)
    meta = json.loads((tmp_path / "meta.json").read_text())
    meta |= {"_type": "<class 'this.Antigravity'>", "_class": "this:Antigravity"}
    (tmp_path / "meta.json").write_text(json.dumps(meta))

    with pytest.raises(CorruptFileError, match=r"Could not find the class this\.Antigravity.*Import the module"):
        load_memmap(tmp_path)

    assert "this" not in sys.modules


class Boom:
    """Unpickling it has a visible effect."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self):
        return (os.mkdir, (self.path,))


@pytest.mark.parametrize("stacked", [False, True])
def test_pickled_data_is_not_opened(tmp_path, stacked):
    trace = tmp_path / "trace"
    value = NonTensorStack(Boom(trace), "b") if stacked else NonTensorData(Boom(trace), batch_size=[2])
    deep = TensorDict({"y": bits(2)}, [2])
    deep.set("bad", value)
    TensorDict({"x": bits(2), "deep": deep}, [2]).memmap(tmp_path / "a")

    with pytest.raises(CorruptFileError, match=rf"{tmp_path}/a can't be opened .*Refusing to load pickled"):
        load_memmap(tmp_path / "a")

    assert not trace.exists()


def test_a_short_or_missing_file_or_folder_is_an_error_that_names_it(tmp_path):
    TensorDict({"x": bits(4), "deep": TensorDict({"y": bits(2)})}).memmap(tmp_path)
    os.truncate(tmp_path / "x.memmap", 15)

    with pytest.raises(CorruptFileError, match=r"x\.memmap is cut off: 'x', torch.float32 \[4\], takes 16 bytes, and"):
        load_memmap(tmp_path)
    assert 15 == (tmp_path / "x.memmap").stat().st_size
    os.truncate(tmp_path / "x.memmap", 16)
    (tmp_path / "deep" / "y.memmap").unlink()
    with pytest.raises(MissingFileError, match=r"deep/y\.memmap: the file is missing"):
        load_memmap(tmp_path)
    with pytest.raises(MissingFileError, match=r"nowhere/meta\.json: this is not a folder that TensorDict"):
        load_memmap(tmp_path / "nowhere")


@pytest.mark.parametrize(
    "change",
    [
        "not json",
        "[]",
        {"x": {"shape": [-1], "dtype": "torch.float32"}},
        {"x": {"shape": [4], "dtype": "torch.float33"}},
        {"shape": [9]},
        {"device": "tpu:3"},
        {"_type": "<class 'tensordict._lazy.LazyStackedTensorDict'>", "_class": None},
        {"z": {"type": "TensorDict"}},
        {"z": {"shape": [4], "dtype": "torch.float32"}},
    ],
    ids=str,
)
def test_a_damaged_meta_json_is_an_error_of_its_folder(tmp_path, change):
    TensorDict({"x": bits(4)}, [4]).memmap(tmp_path)
    path = tmp_path / "meta.json"
    path.write_text(change if isinstance(change, str) else json.dumps(json.loads(path.read_text()) | change))

    with pytest.raises((CorruptFileError, MissingFileError), match=str(tmp_path)):
        load_memmap(tmp_path)


def test_a_lazy_view_says_what_to_do(tmp_path):
    TensorDict({"x": bits(4)}, [4])._get_sub_tensordict(slice(0, 2)).memmap(tmp_path / "view")

    with pytest.raises(UnknownTypeError, match=r"holds a _SubTensorDict: save it as a TensorDict"):
        load_memmap(tmp_path / "view")


# Another process writes


def test_leaves_changed_by_another_process_are_an_error_until_the_folder_is_read_again(tmp_path):
    TensorDict({"x": bits(4), "deep": TensorDict({"y": bits(2)})}).memmap(tmp_path)
    os.utime(tmp_path / "x.memmap", ns=(1, 1))
    found = load_memmap(tmp_path)
    assert_equal(bits(4), found["x"])

    assert in_fork(lambda: TensorDict.load_memmap(tmp_path)["x"].fill_(7))

    with pytest.raises(ChangedFileError, match=r"x\.memmap has changed"):
        found["x"] + 1
    assert load_memmap_(found, tmp_path) is found
    assert_equal(torch.full((4,), 7.0), found["x"])


def test_entries_that_another_process_added_or_removed_are_taken_over_but_no_other_batch_size(tmp_path):
    TensorDict({"x": bits(4), "old": bits(1)}, []).memmap(tmp_path)
    found = load_memmap(tmp_path).lock_()
    TensorDict({"x": bits(4) + 1, "new": bits(2), "text": "t"}, []).memmap(tmp_path)
    load_memmap_(found, tmp_path)
    TensorDict({"x": bits(6)}, [6]).memmap(tmp_path / "other")

    with pytest.raises(ShapeMismatchError, match=r"batch size torch.Size\(\[6\]\), not torch.Size\(\[\]\)"):
        load_memmap_(found, tmp_path / "other")
    assert_same(TensorDict.load_memmap(tmp_path), found)


# A folder of ours, opened by tensordict


@pytest.mark.parametrize("where", ["plain", "offloaded"])
def test_a_folder_written_here_opens_in_tensordict(tmp_path, where):
    td = rich()
    td.memmap(tmp_path / "theirs")
    source = td if where == "plain" else load_memmap(tmp_path / "theirs")
    result = save_memmap(source, tmp_path / "parents" / "ours")

    expected = TensorDict.load_memmap(tmp_path / "theirs")
    assert_same(expected, TensorDict.load_memmap(tmp_path / "parents" / "ours"))
    assert_same(expected, result)
    assert {tmp_path / "parents"} == {path for path in tmp_path.iterdir() if path.name != "theirs"}
    assert ["ours"] == os.listdir(tmp_path / "parents")


def test_the_files_are_those_that_tensordict_writes(tmp_path):
    rich().memmap(tmp_path / "theirs")
    save_memmap(rich(), tmp_path / "ours")

    theirs, ours = (
        {name: json.loads(data) if name.endswith(".json") else data for name, (_, data) in contents(folder).items()}
        for folder in (tmp_path / "theirs", tmp_path / "ours")
    )
    assert theirs == ours


def test_a_dict_is_written_too_and_views_and_strided_leaves_are(tmp_path):
    whole = OffloadedTensor.from_original_tensor(bits(6, 4), "w")
    save_memmap(
        {"view": whole[1:3], "turned": bits(4, 3).t(), "part": whole.t(), "par": torch.nn.Parameter(bits(2))},
        tmp_path / "a",
    )

    found = TensorDict.load_memmap(tmp_path / "a")
    expected = {"view": bits(6, 4)[1:3], "turned": bits(4, 3).t(), "part": bits(6, 4).t(), "par": bits(2)}
    assert_equal(expected, {name: found[name] for name in expected})


def test_a_folder_that_is_there_is_left_alone(tmp_path):
    save_memmap({"x": bits(4)}, tmp_path / "a")
    before = contents(tmp_path)

    for write in (save_memmap, memmap_like):
        with pytest.raises(ForeignFileError, match="a exists, and is not an empty folder"):
            write({"x": bits(5)}, tmp_path / "a")

    assert before == contents(tmp_path)


@pytest.mark.parametrize(
    ("value", "kind", "words"),
    [
        ({"a": {"x": torch.empty(2, device="meta")}}, UnsupportedOpError, r"\('a', 'x'\).*on the meta device"),
        ({"x": torch.eye(2).to_sparse()}, UnsupportedOpError, "'x'.*is not a dense tensor"),
        ({1: torch.ones(2)}, ArgumentTypeError, "this dict is no dict of tensors by name"),
        (NESTED, UnsupportedOpError, "'x' in .* is a nested tensor"),
        ({"shape": {"a": torch.ones(2)}}, UnsupportedOpError, "'shape': tensordict's format reserves this key"),
        ({"shape": torch.ones(2)}, UnsupportedOpError, "'shape': tensordict's format reserves this key"),
        ({"x": torch.ones(2).to(torch.float8_e5m2)}, UnsupportedOpError, "can't write this so that it opens it"),
        (TensorDict({"a": NonTensorData(object())}), UnsupportedOpError, "pickled .*leave it out with td.exclude"),
        (TensorDict({"a": NonTensorData({1: 2})}), UnsupportedOpError, "pickled .*leave it out with td.exclude"),
        ([torch.ones(2)], TypeError, "this list is no dict of tensors by name"),
    ],
)
def test_unsupported_values_are_refused_before_anything_is_written(tmp_path, value, kind, words):
    with pytest.raises(kind, match=words):
        save_memmap(value, tmp_path / "a")

    assert not list(tmp_path.iterdir())


def test_a_folder_of_zeros_is_there_to_be_filled(tmp_path):
    like = TensorDict(
        {"x": torch.empty(1000, 10, device="meta"), "deep": TensorDict({"y": torch.empty(2, device="meta")})}
    )

    zeros = memmap_like(like, tmp_path / "a")
    assert zeros["x"].eq(0).all()
    zeros["x"][3] = 1.5

    found = load_memmap(tmp_path / "a")
    assert_equal(torch.zeros(2), found["deep", "y"])
    assert found["x"][3].eq(1.5).all()
    assert 15 == found["x"].sum()


def test_saving_takes_no_memory_for_what_is_on_disk(tmp_path):
    """40 MiB of values, whole and as part of a file, with less than 12 MiB of anonymous memory."""
    nbytes = run_script(
        """
        import sys, torch
        from pathlib import Path
        from offload import OffloadedTensor
        from offload.integrations.tensordict import load_memmap, save_memmap
        from tests.peak import Peak

        folder = Path(sys.argv[1])
        x = OffloadedTensor.empty((10 << 20,), name="x", offload_dir=folder)
        save_memmap(save_memmap({"warm": x[:10]}, folder / "warm"), folder / "again")
        with Peak() as peak:
            save_memmap(save_memmap({"x": x, "part": x[5:]}, folder / "a"), folder / "b")
        print(peak.nbytes)
        """,
        tmp_path,
    )

    assert int(nbytes) < 12 << 20


# Leaves


def offloaded(td: TensorDict) -> TensorDict:
    numbers = iter(range(100))
    return td.apply(lambda leaf: OffloadedTensor.from_original_tensor(leaf.clone(), f"leaf{next(numbers)}"))


def plain() -> TensorDict:
    deep = TensorDict({"y": torch.linspace(-1, 1, 16).reshape(4, 2, 2)}, [4])
    return TensorDict({"x": torch.arange(12.0).reshape(4, 3), "n": torch.arange(4), "deep": deep}, [4])


MASK = torch.tensor([True, False, True, False])
STAY = {  # offloaded leaves, without reading
    "int": lambda td: td[1],
    "slice": lambda td: td[1:3],
    "unbind": lambda td: td.unbind(0)[2],
    "reshape": lambda td: td.reshape(2, 2),
    "permute": lambda td: td.reshape(2, 2).permute(1, 0),
    "device": lambda td: td.to("cpu"),
    "update_": lambda td: td.update_(plain() * 3),
    "set_": lambda td: td.set_("x", torch.ones(4, 3)),
    "item": lambda td: td.__setitem__(slice(1, 3), plain()[:2] * 5) or td,
    "apply_": lambda td: td.apply_(lambda leaf: leaf.mul_(2)),
    "load_state_dict": lambda td: (td.load_state_dict((plain() * 2).state_dict()), td)[1],
    "state_dict": lambda td: TensorDict({key: td.state_dict()[key] for key in ("x", "n")}),
}
COME = {  # plain leaves
    "mask": lambda td: td[MASK],
    "list": lambda td: td[[0, 2]],
    "stack": lambda td: torch.stack([td, td]),
    "cat": lambda td: torch.cat([td, td]),
    "dtype": lambda td: td.to(torch.float64),
    "deepcopy": copy.deepcopy,
    "mul": lambda td: td * 2,
    "pickle": lambda td: pickle.loads(pickle.dumps(td)),
    "consolidate": lambda td: td.consolidate(),
}


@pytest.mark.parametrize("act", STAY.values(), ids=STAY)
def test_methods_that_inspect_or_change_leaves_keep_them_on_disk(act):
    td = offloaded(plain())
    found = act(td)

    assert_same(act(plain()), found)
    assert all(offload.is_offloaded(leaf) for leaf in leaves(found))


@pytest.mark.parametrize("act", COME.values(), ids=COME)
def test_methods_that_compute_give_the_results_of_plain_leaves(act):
    td = offloaded(plain())
    found = act(td)

    assert_same(act(plain()), found)
    assert not any(offload.is_offloaded(leaf) for leaf in leaves(found))


SAVES = {  # as on tensordict's page about saving
    "memmap": lambda td, path: TensorDict.load_memmap((td.memmap(path), path)[1]),
    "memmap_like": lambda td, path: td.memmap_like(path).update_(td),
    "torch.save": lambda td, path: torch.load((torch.save(td, path), path)[1], weights_only=False),
    "load_memmap_": lambda td, path: (td.memmap(path), (plain() * 0).load_memmap_(path))[1],
}


@pytest.mark.parametrize("save", SAVES.values(), ids=SAVES)
def test_tensordicts_own_ways_to_save_take_offloaded_leaves(tmp_path, save):
    found = save(offloaded(plain()), tmp_path / "a")

    assert (found == plain()).all()
