"""Files and tables of other formats become rows of a cache, bit for bit, one batch at a time."""

import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from offload.errors import CacheError, CheckpointError, CorruptFileError, DtypeMismatchError
from offload.integrations import cache_from
from tests.integrations.test_row_sources import parquet_folder, small_batches  # noqa: F401
from tests.processes import run_script

h5py = pytest.importorskip("h5py")
pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

N = 17


@pytest.mark.parametrize("order", ["C", "F"])
def test_a_plain_array_is_a_column(tmp_path: Path, order: Any) -> None:
    values = np.asarray(np.random.default_rng(0).random((N, 3, 2)), order=order)
    np.save(tmp_path / "rows.npy", values)
    for source in (values, np.load(tmp_path / "rows.npy", mmap_mode="r")):
        cache = cache_from(source, metadata={"from": "numpy"})

        assert torch.equal(torch.from_numpy(values.copy()), cache[:]["values"])
        assert {"from": "numpy"} == cache.metadata


def test_hdf5(tmp_path: Path) -> None:
    columns = {
        "group/x": np.random.default_rng(0).random((N, 2, 3)),
        "half": np.arange(N, dtype=np.float16),
        "big": np.arange(N, dtype=">i8"),
        "flag": np.arange(N) % 2 == 0,
    }
    text = [f"té{number}" for number in range(N)]
    with h5py.File(tmp_path / "rows.h5", "w") as file:
        file.update(columns | {"text": text, "fixed": np.array([f"r{number}" for number in range(N)], dtype="S4")})
        file.create_dataset("packed", data=np.arange(N), chunks=(3,), compression="gzip")

        group = cache_from(file["group"])[:]
        again = cache_from(file, tmp_path / "cache")[:]

    assert torch.equal(torch.from_numpy(columns["group/x"]), group["x"])
    for name, values in (columns | {"packed": np.arange(N)}).items():
        assert torch.equal(torch.from_numpy(values.astype(values.dtype.newbyteorder("="))), again[name])
    assert text == again["text"]
    assert [f"r{number}" for number in range(N)] == again["fixed"]


def table() -> Any:
    numbers = list(range(N))
    return pa.table(
        {
            "i": pa.array(numbers, pa.int32()),
            "f": pa.array(np.arange(N, dtype=np.float16)),
            "u": pa.array(numbers, pa.uint16()),
            "b": [bool(number % 2) for number in numbers],
            "s": [f"té{number}" if number % 4 else None for number in numbers],
            "l": [list(range(number % 4)) for number in numbers],
            "v": pa.array([[number, 2.5] for number in numbers], pa.list_(pa.float32(), 2)),
            "lv": pa.array([[[number, 1.0]] * (number % 3) for number in numbers], pa.list_(pa.list_(pa.float64(), 2))),
            "st": [{"a": number, "b": [None, "x"]} for number in numbers],
            "d": pa.array([f"k{number % 2}" for number in numbers]).dictionary_encode(),
        }
    )


@pytest.mark.parametrize("form", ["table", "sliced", "parquet", "folder"])
def test_arrow_and_parquet(tmp_path: Path, form: str) -> None:
    expected, path = table(), tmp_path / "x"
    if form == "sliced":
        expected = pa.concat_tables([expected.slice(3, 5), expected.slice(1)])
    elif form == "parquet":
        pq.write_table(expected, path, row_group_size=5)
    elif form == "folder":
        parquet_folder(path, expected)

    found = cache_from(path if path.exists() else expected, tmp_path / "cache")[:]

    for name in expected.column_names:
        rows = [row.tolist() if isinstance(row, torch.Tensor) else row for row in found[name]]
        assert expected[name].to_pylist() == rows, name
    assert (torch.int32, torch.float16, torch.uint16) == (found["i"].dtype, found["f"].dtype, found["u"].dtype)


def test_datasets(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = {"x": torch.randn(N, 2, 3).tolist(), "text": [f"t{number}" for number in range(N)], "n": list(range(N))}
    kinds = {"x": datasets.Array2D((2, 3), "float32"), "text": datasets.Value("string"), "n": datasets.Value("int8")}
    rows["varying"] = [[[number, 1, 2]] * (number % 4 + 1) for number in range(N)]
    kinds["varying"] = datasets.Array2D((None, 3), "int64")
    dataset = datasets.Dataset.from_dict(rows, features=datasets.Features(kinds)).shuffle(seed=0).select(range(9))
    dataset.save_to_disk(tmp_path / "saved")

    for source in (dataset, dataset.with_format("torch"), datasets.load_from_disk(tmp_path / "saved")):
        found = cache_from(source)[:]
        assert dataset["n"][:] == found["n"].tolist()
        assert dataset["text"][:] == found["text"]
        assert torch.equal(torch.tensor(np.array(dataset["x"][:])).float(), found["x"])
        assert dataset["varying"][:] == [row.tolist() for row in found["varying"]]


class Planted:
    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, ("planted",)


def test_nothing_in_a_file_is_unpickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"x": torch.ones(2), "y": Planted()}, tmp_path / "x.pt")

    with pytest.raises(CheckpointError):
        cache_from(tmp_path / "x.pt", tmp_path / "cache")

    assert not (tmp_path / "planted").exists()
    assert not (tmp_path / "cache").exists()


def test_values_that_cannot_be_kept_are_refused(tmp_path):
    save_file({"a": torch.ones(3), "b": torch.ones(2)}, tmp_path / "x.safetensors")

    with pytest.raises(CacheError, match=r"differ in length \('a': 3, 'b': 2\): choose with columns="):
        cache_from(tmp_path / "x.safetensors")
    with pytest.raises(CacheError, match="'values' in the array is of dtype datetime64"):
        cache_from(np.zeros(2, dtype="M8[s]"))
    with pytest.raises(CacheError, match=r"differ in length \(there are none\)"):
        cache_from({})
    with pytest.raises(CacheError, match="no rows can be read from int"):
        cache_from(3)
    (tmp_path / "text").write_text("hello, this is no file of tensors")
    with pytest.raises(CorruptFileError, match="text can't be used"):
        cache_from(tmp_path / "text")
    with pytest.raises(CacheError, match=r"has no \.parquet files"):
        cache_from(tmp_path)


def test_hdf5_data_that_cannot_be_kept_is_refused(tmp_path: Path) -> None:
    """HDF5 gives zeros for a virtual dataset whose source is gone."""
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["a"], file["b"], file["version"], file["nothing"] = np.arange(3), np.zeros(2), 7, h5py.Empty("f4")
        file.create_dataset("to", (3,), dtype=h5py.ref_dtype)
        file["fields"], file["link"] = np.zeros(3, dtype=[("x", "f4")]), h5py.SoftLink("a")
        file.create_dataset("outside", (3,), "f8", external=[(tmp_path / "raw", 0, 24)])[:] = 1
        layout = h5py.VirtualLayout(shape=(3,), dtype="f8")
        layout[:] = h5py.VirtualSource("gone.h5", "x", shape=(3,))
        file.create_virtual_dataset("virtual", layout)
        file.create_dataset("lengths", (3,), dtype=h5py.vlen_dtype(np.int32))
    refused = {
        "outside": "the values of 'outside' in .* are in other files",
        "virtual": "the values of 'virtual' in .* are in other files",
        "b": r"differ in length \('a': 3, 'b': 2\)",
        "version": "'version': a single value",
        "nothing": "'nothing': a single value",
        "to": "'to' in .* is of dtype object, neither torch's nor text",
        "lengths": "'lengths' in .* is of dtype object, neither torch's nor text",
        "fields": r"'fields' in .* is of dtype \[\('x', '<f4'\)\], neither torch's nor text",
        "link": "has no column 'link'",
    }
    with h5py.File(tmp_path / "x.h5") as file:
        for name, words in refused.items():
            with pytest.raises(CacheError, match=words):
                cache_from(file, columns=["a", name])

        assert [0, 1, 2] == cache_from(file, columns=["a"])[:]["a"].tolist()


@pytest.mark.parametrize("columns", [None, ["l"], ["s"]])
def test_places_outside_of_an_arrow_table_are_an_error(tmp_path: Path, columns: list[str] | None) -> None:
    """pyarrow itself follows them, which kills the process."""
    table = pa.table({"l": [list(range(7777)), []], "s": ["x" * 7777, ""]})
    with pa.OSFile(str(tmp_path / "x"), "wb") as sink, pa.ipc.new_file(sink, table.schema) as file:
        file.write_table(table)
    ends = struct.pack("<2i", 7777, 7777)
    written = (tmp_path / "x").read_bytes()
    assert 2 == written.count(ends)
    (tmp_path / "x").write_bytes(written.replace(ends, struct.pack("<2i", 1 << 30, 1 << 30)))
    damaged = pa.ipc.open_file(pa.memory_map(str(tmp_path / "x"))).read_all()

    with pytest.raises(pa.ArrowInvalid, match="1073741824"):
        cache_from(damaged, tmp_path / "cache", columns=columns)
    assert not (tmp_path / "cache").exists()


def _parquet(path: Path, values: np.ndarray[Any, Any]) -> None:
    table = pa.table({"x": pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), values.shape[1])})
    pq.write_table(table, path, row_group_size=4, use_dictionary=False, compression="none")


def test_a_damaged_file_is_an_error_that_names_it(tmp_path):
    _parquet(tmp_path / "x.parquet", np.arange(1000).reshape(1000, 1))
    data = bytearray((tmp_path / "x.parquet").read_bytes())
    data[4:400] = b"\xff" * 396
    (tmp_path / "x.parquet").write_bytes(data)

    words = r"(?s)x\.parquet can't be read \(.*\): is it complete\? Download or copy it again"
    with pytest.raises(CorruptFileError, match=words):
        cache_from(tmp_path / "x.parquet", tmp_path / "cache")
    assert not (tmp_path / "cache").exists()
    (tmp_path / "x.parquet").write_bytes(b"")
    with pytest.raises(CorruptFileError, match=r"can't be read \(.*0 bytes"):
        cache_from(tmp_path)


def test_a_shard_of_parquet_may_have_no_row_groups(tmp_path: Path) -> None:
    table = pa.table({"x": [1, 2]})
    pq.ParquetWriter(tmp_path / "0.parquet", table.schema).close()
    pq.write_table(table, tmp_path / "1.parquet")

    assert [1, 2] == cache_from(tmp_path)[:]["x"].tolist()


def test_arrow_data_that_cannot_be_kept_is_refused(tmp_path: Path) -> None:
    import datetime

    with pytest.raises(DtypeMismatchError, match=r"column 't' .* datetime is not JSON serializable"):
        cache_from(pa.table({"t": [datetime.datetime(2020, 1, 1)]}), tmp_path / "cache")
    for row in (None, [1, None]):
        with pytest.raises(CacheError, match="'l' in the table has a null: fill it, or leave the column out"):
            cache_from(pa.table({"l": [[1], row]}), tmp_path / "cache")
    assert not (tmp_path / "cache").exists()
    pq.write_table(pa.table({"x": [1]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"x": ["1"]}), tmp_path / "b.parquet")
    with pytest.raises(CacheError, match=r"b\.parquet has other columns or types than"):
        cache_from(tmp_path)


def test_a_file_is_streamed_in_little_memory(tmp_path):
    values = np.random.default_rng(0).integers(0, 255, (64, 1 << 20), dtype=np.uint8)  # 64 MB
    small, path = tmp_path / "s.parquet", tmp_path / "x.parquet"
    _parquet(small, values[:2])
    _parquet(path, values)
    script = """
        import sys
        from offload.integrations import cache_from
        from tests.peak import Peak

        small, large, folder = sys.argv[1:]
        cache_from(small, folder + "-small").close()
        with Peak() as peak:
            cache = cache_from(large, folder)
        print(peak.nbytes, cache.nbytes, next(iter(cache[63].values())).sum().item())
    """

    grown, nbytes, total = map(int, run_script(script, small, path, tmp_path / "cache").split())

    assert values.nbytes == nbytes
    assert int(values[63].astype(np.int64).sum()) == total
    assert 40 << 20 > grown
