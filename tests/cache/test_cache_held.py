"""A cache of existing tensors, in memory or in a file."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from offload import OffloadedTensor, TensorCache
from offload.errors import (
    ArgumentTypeError,
    CacheError,
    ChangedFileError,
    CheckpointError,
    ForeignFileError,
    MissingFileError,
    OffloadError,
    UnsupportedOpError,
    WriteError,
)
from offload.storage.file import TensorFile
from offload.storage.layout import _NAMED
from tests.cache.stores import logps
from tests.equal import assert_equal
from tests.processes import run_script


def test_tensors_in_memory_are_not_copied() -> None:
    tensors = logps()
    cache = TensorCache(tensors=tensors)

    tensors["chosen_logps"][1] = 7

    assert 7 == cache[1]["chosen_logps"]


def test_to_disk_makes_folders_and_any_safetensors_reader_opens_the_file(tmp_path: Path) -> None:
    tensors = {name: value for name, value in logps().items() if name != "wide"}
    path = tmp_path / "made" / "here" / "cache"

    TensorCache(tensors=tensors, metadata={"model": "tiny"}).to_disk(path)

    assert_equal(tensors, load_file(path))
    assert [path.name] == os.listdir(path.parent)


def test_to_disk_writes_the_columns_that_are_named(tmp_path: Path) -> None:
    tensors = {"a": torch.arange(3), "b": torch.rand(3, 2), "c": torch.zeros(3)}

    TensorCache(tensors=tensors).to_disk(tmp_path / "x.safetensors", ["b", "a"])

    assert_equal({"b": tensors["b"], "a": tensors["a"]}, load_file(tmp_path / "x.safetensors"))


def test_to_disk_refuses_ragged_and_missing_rows_without_writing(tmp_path: Path) -> None:
    schema = {"x": (torch.float32, ()), "tokens": (torch.int64, (None,))}
    with TensorCache.create(tmp_path / "cache", schema, 2) as cache:
        cache[:] = {"tokens": [torch.arange(2), torch.arange(3)]}
        for column, told in (("tokens", "'tokens' have no rows of one size"), ("x", "2 of 2 rows")):
            with pytest.raises(OffloadError, match=told):
                cache.to_disk(tmp_path / "x.safetensors", [column])

    assert ["cache"] == os.listdir(tmp_path)


def test_every_element_lies_at_a_multiple_of_its_size(tmp_path: Path) -> None:
    tensors = {"a": torch.ones(5, dtype=torch.bool), "b": torch.ones(5), "c": torch.ones(5, dtype=torch.int16)}

    TensorCache(tensors=tensors).to_disk(tmp_path / "c")

    entries = TensorFile.open(tmp_path / "c").entries
    assert [0] * 3 == [entries[name].start % tensor.itemsize for name, tensor in tensors.items()]


def test_columns_keep_their_order_and_metadata_their_words(tmp_path: Path) -> None:
    TensorCache(tensors=logps(), metadata={"model": "tiny", "n": [1, 2]}).to_disk(tmp_path / "c")

    cache = TensorCache.from_disk(tmp_path / "c", expect={"model": "tiny"})

    assert list(logps()) == list(cache.schema) == list(cache[0])
    assert {"model": "tiny", "n": [1, 2]} == cache.metadata
    with pytest.raises(CacheError, match=r"has other metadata than expected: 'model' is 'tiny', expected 'large'"):
        TensorCache.from_disk(tmp_path / "c", expect={"model": "large"})


DTYPES = [
    dtype for dtype in sorted(set(_NAMED.values()), key=str) if not re.search(r"bits|int[1-7]$|float4", str(dtype))
]


def test_to_disk_replaces_its_own_file_and_open_readers_continue(tmp_path: Path) -> None:
    def opened() -> int:
        return sum(str(path) in os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd"))

    path = tmp_path / "cache"
    TensorCache(tensors={"x": torch.zeros(3), "y": torch.arange(3)}).to_disk(path)
    old, unread = TensorCache.from_disk(path), TensorCache.from_disk(path)
    assert 4 == opened()  # two per file, not per column
    assert [0.0] * 3 == old[:]["x"].tolist()

    TensorCache(tensors={"x": torch.ones(4)}).to_disk(path)

    assert [1.0] * 4 == TensorCache.from_disk(path)[:]["x"].tolist()
    for cache in (old, unread):
        assert [0.0] * 3 == cache[:]["x"].tolist()
        assert [2, 0] == cache[[2, 0]]["y"].tolist()
        with pytest.raises(ChangedFileError, match="has changed since it was opened"):  # it is over that file
            cache.column("x").sum()
        cache.close()
    assert 0 == opened()


def test_a_cache_can_be_saved_over_the_file_that_it_is_from(tmp_path: Path) -> None:
    path, tensors = tmp_path / "cache", logps()
    TensorCache(tensors=tensors, metadata={"model": "tiny"}).to_disk(path)
    cache = TensorCache.from_disk(path)
    more = TensorCache({**cache.tensors, "more": torch.arange(5)}, metadata=cache.metadata)

    more.to_disk(path)

    assert {"model": "tiny"} == TensorCache.from_disk(path).metadata
    for found, names in ((cache, [*tensors]), (TensorCache.from_disk(path), more.schema)):
        assert list(names) == list(found.schema)
        assert_equal({name: {**tensors, "more": torch.arange(5)}[name] for name in names}, found[:])
    cache.to_disk(path, ["good"])
    assert torch.equal(tensors["hidden"][[4, 1]], cache[[4, 1]]["hidden"])
    assert torch.equal(tensors["good"], TensorCache.from_disk(path).column("good").clone())


def test_a_file_that_is_written_into_while_it_is_open_is_an_error(tmp_path: Path) -> None:
    TensorCache(tensors={"x": torch.zeros(3)}).to_disk(tmp_path / "cache")
    cache = TensorCache.from_disk(tmp_path / "cache")
    with open(tmp_path / "cache", "r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(b"1234")

    with pytest.raises(ChangedFileError, match="has changed since it was opened"):
        cache[:]


def test_a_tensor_whose_value_is_replaced_gives_the_new_one(tmp_path: Path) -> None:
    tensor = OffloadedTensor.from_original_tensor(torch.zeros(3), "x", tmp_path)
    cache = TensorCache(tensors={"x": tensor})
    assert [0.0] * 3 == cache[:]["x"].tolist()

    tensor.update_values(torch.ones(3))

    assert [1.0] * 3 == cache[:]["x"].tolist()
    tensor.mul_(2)
    assert [2.0] * 3 == cache[[0, 1, 2]]["x"].tolist()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["x.pt", "x.safetensors"])
def test_rows_of_every_dtype_go_to_a_file_and_back(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    raw = torch.arange(5 * 3 * dtype.itemsize, dtype=torch.uint8).view(5, -1)
    tensor = (raw % 2 if dtype == torch.bool else raw).view(dtype).view(5, -1)

    expected = {"x": tensor, "none": tensor[:, :0]}

    if name == "x.pt":
        torch.save(expected, tmp_path / name)
    else:
        TensorCache(tensors=expected).to_disk(tmp_path / name)

    found = TensorCache.from_disk(tmp_path / name)
    assert dtype == found.schema["x"].dtype
    assert_equal(expected, found[:])


def test_tensors_that_lie_in_other_ways_are_written_as_they_read(tmp_path: Path) -> None:
    base = torch.randn(4, 5)
    tensors = {
        "turned": base.t(),
        "conjugate": torch.randn(5, 2, dtype=torch.complex64).conj(),
        "negative": torch._neg_view(torch.randn(5)),
        "same": torch.ones(1).expand(5),
        "apart": torch.randn(10, 2)[::2],
        "slice": torch.arange(1000)[10:15],
    }

    TensorCache(tensors=tensors).to_disk(tmp_path / "cache")

    assert_equal(tensors, TensorCache.from_disk(tmp_path / "cache")[:], strides=False)
    assert (tmp_path / "cache").stat().st_size < 8000  # the slice without the rest of its storage


def test_saving_a_pt_file_takes_little_memory(tmp_path: Path) -> None:
    """And its rows are read in place by index."""
    most = run_script(
        """
        import sys, torch
        from offload import TensorCache
        from tests.peak import Peak
        path, rows = sys.argv[1] + "/x.pt", 24_000
        with TensorCache.create(sys.argv[1] + "/cache", {"x": (torch.float32, (1024,))}, rows) as cache:
            for start in range(0, rows, 1000):
                cache[start : start + 1000] = {"x": torch.full((1000, 1024), float(start))}
        cache = TensorCache.open(sys.argv[1] + "/cache", "r+")
        with Peak() as peak:
            torch.save(dict(cache.tensors), path)
        found = TensorCache.from_disk(path)
        assert found[[23_999, 5]]["x"][:, 0].tolist() == [23_000.0, 0.0]
        print(peak.nbytes >> 20)
        """,
        tmp_path,
    )

    assert int(most) < 16  # MiB, of 94


def test_the_tensors_of_a_cache_are_a_mapping_to_read() -> None:
    cache = TensorCache(tensors=logps())

    with pytest.raises(TypeError, match="does not support item assignment"):
        cache.tensors["more"] = torch.arange(5)  # type: ignore[index]

    assert list(logps()) == list(cache.tensors)


def test_a_foreign_file_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "cache.safetensors"
    save_file({"x": torch.zeros(3)}, path)
    before = path.read_bytes()

    with pytest.raises(ForeignFileError, match=r"cache\.safetensors exists and was not written by offload"):
        TensorCache(tensors={"x": torch.ones(3)}).to_disk(path)

    assert before == path.read_bytes()
    with pytest.raises(ForeignFileError):
        TensorCache(tensors={"x": torch.ones(3)}).to_disk(tmp_path)


def test_a_folder_that_can_not_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(WriteError, match="a file is where a folder should be"):
        TensorCache(tensors={"x": torch.ones(3)}).to_disk(tmp_path / "file" / "cache")


def test_rows_that_are_missing_are_not_written_as_if_they_were_there(tmp_path: Path) -> None:
    with TensorCache.create(tmp_path / "folder", {"x": (torch.float32, ())}, 3) as cache:
        cache[[0, 2]] = {"x": torch.ones(2)}

        with pytest.raises(LookupError, match=r"1 of 3 rows of .*folder are not filled: 1"):
            cache.to_disk(tmp_path / "file")

    assert not (tmp_path / "file").exists()


def test_batches_land_on_the_device(tmp_path: Path) -> None:
    TensorCache(tensors=logps()).to_disk(tmp_path / "cache")

    cache = TensorCache.from_disk(tmp_path / "cache", device="meta")

    assert "meta" == cache[:2]["chosen_logps"].device.type
    assert "cpu" == TensorCache.from_disk(tmp_path / "cache", device=None)[:2]["chosen_logps"].device.type


def test_columns_that_share_a_storage_or_are_turned_are_read_right(tmp_path: Path) -> None:
    both = torch.randn(2, 6, 4)
    torch.save({"left": both[0], "right": both[1], "turned": torch.randn(3, 6).t()}, tmp_path / "cache.pt")
    expected = torch.load(tmp_path / "cache.pt", weights_only=True)

    batch = TensorCache.from_disk(tmp_path / "cache.pt")[[5, 0, 5]]

    assert_equal({name: value[[5, 0, 5]] for name, value in expected.items()}, batch, strides=False)


class Planted:
    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, ("planted",)


def test_a_pickle_that_holds_code_is_refused_and_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"x": torch.ones(2), "y": Planted()}, tmp_path / "cache.pt")

    with pytest.raises(CheckpointError, match=r"cache\.pt"):
        TensorCache.from_disk(tmp_path / "cache.pt")

    assert not (tmp_path / "planted").exists()


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({}, "there are no tensors: a cache has at least one column"),
        ({"a": torch.ones(3), "b": torch.ones(2)}, "the tensors differ in length ('a' has 3, 'b' has 2)"),
        ({"a": torch.tensor(1.0)}, "column 'a' is a scalar: a column needs a first dimension"),
    ],
)
def test_tensors_that_form_no_table_are_refused_in_memory_and_from_a_file(
    tmp_path: Path, tensors: dict[str, torch.Tensor], words: str
) -> None:
    with pytest.raises(CacheError) as found:
        TensorCache(tensors=tensors)
    assert words in str(found.value)
    if tensors:
        save_file(tensors, tmp_path / "x.safetensors")
        with pytest.raises(CacheError) as found:
            TensorCache.from_disk(tmp_path / "x.safetensors")
        assert words in str(found.value)


@pytest.mark.parametrize("tensors", [[1, 2], 3, [torch.ones(2)], torch.ones(2)])
def test_tensors_without_names_are_refused(tensors: object) -> None:
    with pytest.raises(ArgumentTypeError, match=": give a dict of names and tensors"):
        TensorCache(tensors=tensors)


def test_a_tensor_without_values_is_refused() -> None:
    with pytest.raises(UnsupportedOpError, match="'x' is on the meta device"):
        TensorCache(tensors={"x": torch.ones(2, device="meta")})


def test_reading_some_rows_of_a_file_takes_little_memory(tmp_path: Path) -> None:
    torch.save({"logps": torch.zeros(1 << 14), "hidden": torch.zeros(1 << 14, 1 << 10)}, tmp_path / "cache.pt")  # 64 MB
    script = """
        import sys, torch
        from offload import TensorCache
        from offload.memory import anonymous_bytes
        torch.save({"x": torch.zeros(8)}, sys.argv[1] + ".small")
        TensorCache.from_disk(sys.argv[1] + ".small")[[1, 2]]
        before, most = anonymous_bytes(), 0
        cache = TensorCache.from_disk(sys.argv[1])
        for at in range(50):
            batch = cache[torch.randint(1 << 14, (256,))]
            most = max(most, anonymous_bytes() - before)
        print(most)
    """

    assert 32 << 20 > int(run_script(script, tmp_path / "cache.pt"))


def test_a_file_is_not_written_among_those_of_a_cache(tmp_path):
    cache = TensorCache.create(tmp_path / "cache", {"x": (torch.int64, ())}, 3)
    cache[:] = {"x": [1, 2, 3]}

    with pytest.raises(CacheError, match="is in the folder of a cache: choose another folder"):
        cache.to_disk(tmp_path / "cache" / "x.safetensors")

    assert [1, 2, 3] == cache[:]["x"].tolist()


def test_a_missing_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError, match="nowhere"):
        TensorCache.from_disk(tmp_path / "nowhere")


@pytest.mark.parametrize(
    "write", [lambda cache, value: cache.append(value), lambda cache, value: cache.__setitem__(0, value)]
)
def test_rows_are_given_by_column(tmp_path, write):
    cache = TensorCache.create(tmp_path, {"x": (torch.int64, ())}, 3)

    with pytest.raises(CacheError, match=r"not as a Tensor: cache\[rows\] = \{name: values\}"):
        write(cache, torch.tensor(1))


def test_a_file_of_no_columns_and_one_for_torch_load_are_not_written(tmp_path: Path) -> None:
    cache = TensorCache(tensors={"x": torch.ones(2)})

    with pytest.raises(CacheError, match="columns= is empty: name at least one"):
        cache.to_disk(tmp_path / "x.safetensors", columns=[])
    with pytest.raises(CacheError, match=r"x\.pt: to_disk writes safetensors; torch\.save"):
        cache.to_disk(tmp_path / "x.pt")

    assert [] == list(tmp_path.iterdir())
