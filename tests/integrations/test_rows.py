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
from offload.integrations.rows import rows_of
from tests.integrations.test_row_sources import arrow_file, hdf5_file, parquet_folder, small_batches  # noqa: F401
from tests.processes import run_script

h5py = pytest.importorskip("h5py")
pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

N = 17


def structured() -> np.ndarray[Any, Any]:
    kinds = [("id", ">i8"), ("v", "f2", (2,)), ("in", [("ok", "?"), ("name", "U5")]), ("raw", "S4"), ("z", "c8")]
    rows = np.zeros(N, dtype=kinds)
    rows["id"], rows["v"], rows["z"] = np.arange(N), np.random.default_rng(0).random((N, 2)), 1j
    rows["in"]["ok"], rows["in"]["name"] = np.arange(N) % 2 == 0, [f"é{number}" for number in range(N)]
    rows["raw"] = [f"r{number}" for number in range(N)]
    return rows


def test_wide_text_comes_in_batches_of_few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of 8,000 bytes is more than what is guessed for a value of varying size."""
    monkeypatch.setattr("offload.cache.incoming._BATCH", 20_000)
    found = rows_of(np.array(["x" * 2000] * N))

    assert [2] * 8 + [1] == [len(next(iter(batch.values()))) for batch in found.batches]


@pytest.mark.parametrize("from_file", [True, False])
def test_a_structured_array_of_numpy(tmp_path: Path, from_file: bool) -> None:
    rows = structured()
    np.save(tmp_path / "rows.npy", rows)
    found = cache_from(tmp_path / "rows.npy" if from_file else rows, tmp_path / "cache")[:]

    assert ["id", "v", "in.ok", "in.name", "raw", "z"] == list(found)
    numbers = {"id": rows["id"].astype("i8"), "v": rows["v"], "in.ok": rows["in"]["ok"], "z": rows["z"]}
    for name, values in numbers.items():
        assert torch.equal(torch.from_numpy(values.copy()), found[name])
    assert rows["in"]["name"].tolist() == found["in.name"]
    assert [raw.decode() for raw in rows["raw"]] == found["raw"]


@pytest.mark.parametrize("order", ["C", "F"])
def test_a_plain_array_is_a_column(tmp_path: Path, order: Any) -> None:
    values = np.asarray(np.random.default_rng(0).random((N, 3, 2)), order=order)
    np.save(tmp_path / "rows.npy", values)
    cache = cache_from(tmp_path / "rows.npy", metadata={"from": "numpy"})

    assert torch.equal(torch.from_numpy(values.copy()), cache[:]["values"])
    assert {"from": "numpy"} == cache.metadata
    assert torch.equal(torch.from_numpy(values.copy()), cache_from(np.load(tmp_path / "rows.npy", "r"))[:]["values"])


def test_hdf5(tmp_path: Path) -> None:
    rows = structured()
    with h5py.File(tmp_path / "rows.h5", "w") as file:
        file["group/x"] = np.random.default_rng(0).random((N, 2, 3))
        file["half"] = rows["v"]
        file["flag"] = rows["in"]["ok"]
        file["text"] = rows["in"]["name"].tolist()
        file["fixed"] = rows["raw"]
        file["table"] = rows[["id", "v"]]
        lengths = file.create_dataset("lengths", (N,), dtype=h5py.vlen_dtype(np.int32))
        for number in range(N):
            lengths[number] = np.arange(number % 4)
        file.create_dataset("packed", data=np.arange(N), chunks=(3,), compression="gzip")

        group = cache_from(file["group"])[:]
        found = cache_from(file, tmp_path / "open")[:]
        x = file["group/x"][:]
    again = cache_from(tmp_path / "rows.h5")[:]

    assert torch.equal(torch.from_numpy(x), group["x"])
    assert set(found) == set(again)
    numbers = {"group/x": x, "half": rows["v"], "table.v": rows["v"], "table.id": np.arange(N), "packed": np.arange(N)}
    for name, values in numbers.items():
        assert torch.equal(torch.from_numpy(values.copy()), again[name])
    assert rows["in"]["ok"].tolist() == again["flag"].tolist()
    assert rows["in"]["name"].tolist() == again["text"]
    assert [raw.decode() for raw in rows["raw"]] == again["fixed"]
    assert [list(range(number % 4)) for number in range(N)] == [row.tolist() for row in again["lengths"]]


def table() -> Any:
    numbers = list(range(N))
    return pa.table(
        {
            "i": pa.array([number if number % 3 else None for number in numbers], pa.int32()),
            "f": pa.array(np.arange(N, dtype=np.float16)),
            "u": pa.array(numbers, pa.uint16()),
            "b": [bool(number % 2) for number in numbers],
            "s": [f"té{number}" if number % 4 else None for number in numbers],
            "l": [list(range(number % 4)) if number % 5 else None for number in numbers],
            "v": pa.array([[number, 2.5] if number % 6 else None for number in numbers], pa.list_(pa.float32(), 2)),
            "lv": pa.array([[[number, 1.0]] * (number % 3) for number in numbers], pa.list_(pa.list_(pa.float64(), 2))),
            "st": [{"a": number, "b": [None, "x"]} for number in numbers],
            "by": pa.array([bytes([number]) if number % 2 else None for number in numbers], pa.binary()),
            "d": pa.array([f"k{number % 2}" for number in numbers]).dictionary_encode(),
        }
    )


def matches(expected: Any, found: dict[str, Any]) -> None:
    """Every column of a table is in the batch, with nulls marked."""
    for name in expected.column_names:
        for row, value in enumerate(expected[name].to_pylist()):
            there = f"{name}.present" not in found or bool(found[f"{name}.present"][row])
            assert there or value is None, (name, row)
            if there:
                got = found[name][row]
                expected_row = list(value) if isinstance(value, bytes) else value
                assert expected_row == (got.tolist() if isinstance(got, torch.Tensor) else got), (name, row)
    assert "u.present" not in found
    assert torch.int32 == found["i"].dtype
    assert torch.float16 == found["f"].dtype
    assert torch.uint16 == found["u"].dtype
    assert 0 == found["i"][0]


@pytest.mark.parametrize("form", ["table", "sliced", "parquet", "arrow", "stream", "folder"])
def test_arrow_and_parquet(tmp_path: Path, form: str) -> None:
    expected, path = table(), tmp_path / "x"
    if form == "sliced":
        expected = pa.concat_tables([expected.slice(3, 5), expected.slice(1)])
    elif form == "parquet":
        pq.write_table(expected, path, row_group_size=5)
    elif form == "folder":
        parquet_folder(path, expected)
    elif form != "table":
        arrow_file(path, expected, pa.ipc.new_file if form == "arrow" else pa.ipc.new_stream, max_chunksize=4)

    cache = cache_from(path if path.exists() else expected, tmp_path / "cache")

    assert expected.num_rows == len(cache)
    matches(expected, cache[:])


def test_datasets(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = {"x": torch.randn(N, 2, 3).tolist(), "text": [f"t{number}" for number in range(N)], "n": list(range(N))}
    kinds = {"x": datasets.Array2D((2, 3), "float32"), "text": datasets.Value("string"), "n": datasets.Value("int8")}
    dataset = datasets.Dataset.from_dict(rows, features=datasets.Features(kinds)).shuffle(seed=0).select(range(9))
    dataset.save_to_disk(tmp_path / "saved")

    for source in (dataset, dataset.with_format("torch"), tmp_path / "saved"):
        found = cache_from(source)[:]
        assert dataset["n"][:] == found["n"].tolist()
        assert dataset["text"][:] == found["text"]
        assert torch.equal(torch.tensor(np.array(dataset["x"][:])).float(), found["x"])


class Planted:
    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, ("planted",)


def test_nothing_in_a_file_is_unpickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    np.save(tmp_path / "x.npy", np.array([Planted()], dtype=object), allow_pickle=True)
    torch.save({"x": torch.ones(2), "y": Planted()}, tmp_path / "x.pt")

    with pytest.raises(CorruptFileError, match=r"x\.npy can't be read \(.*Python objects in dtype"):
        cache_from(tmp_path / "x.npy", tmp_path / "cache")
    with pytest.raises(CheckpointError):
        cache_from(tmp_path / "x.pt", tmp_path / "cache")

    assert not (tmp_path / "planted").exists()
    assert not (tmp_path / "cache").exists()


def test_values_that_cannot_be_kept_are_refused(tmp_path):
    save_file({"a": torch.ones(3), "b": torch.ones(2)}, tmp_path / "x.safetensors")

    with pytest.raises(CacheError, match=r"differ in length \('a': 3, 'b': 2\): choose with columns="):
        cache_from(tmp_path / "x.safetensors")
    with pytest.raises(CacheError, match="'when' in the array is of dtype datetime64"):
        cache_from(np.zeros(2, dtype=[("when", "M8[s]")]))
    with pytest.raises(CacheError, match=r"differ in length \(there are none\)"):
        cache_from({})
    with pytest.raises(CacheError, match="no rows can be read from int"):
        cache_from(3)
    (tmp_path / "text").write_text("hello, this is no file of tensors")
    with pytest.raises(CorruptFileError, match="text can't be used"):
        cache_from(tmp_path / "text")
    with pytest.raises(CacheError, match=r"has no saved dataset, TensorDict or \.parquet files"):
        cache_from(tmp_path)


def test_hdf5_data_that_cannot_be_kept_is_refused_or_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """HDF5 gives zeros for a virtual dataset whose source is gone."""
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["a"], file["b"], file["version"], file["nothing"] = np.arange(3), np.zeros(2), 7, h5py.Empty("f4")
        file.create_dataset("to", (3,), dtype=h5py.ref_dtype)
        file["opaque"], file["kind"], file["link"] = np.zeros(3, dtype="V5"), np.dtype("f4"), h5py.SoftLink("a")
        file.create_dataset("outside", (3,), "f8", external=[(tmp_path / "raw", 0, 24)])[:] = 1
        layout = h5py.VirtualLayout(shape=(3,), dtype="f8")
        layout[:] = h5py.VirtualSource("gone.h5", "x", shape=(3,))
        file.create_virtual_dataset("virtual", layout)
        file.create_dataset("deep", (3, 2), dtype=h5py.vlen_dtype(np.int32))
    refused = {
        "outside": "the values of 'outside' in .* are in other files",
        "virtual": "the values of 'virtual' in .* are in other files",
        "b": r"differ in length \('a': 3, 'b': 2\)",
        "version": "'version': a single value",
        "nothing": "'nothing': a single value",
        "to": "'to' in .* is of dtype object, neither torch's nor text",
        "deep": "'deep' in .* has several variable-length values per row",
        "link": "has no column 'link'",
    }
    for name, words in refused.items():
        with pytest.raises(CacheError, match=words):
            cache_from(tmp_path / "x.h5", columns=["a", name])
    with h5py.File(tmp_path / "x.h5", "a") as file:
        for name in ("b", "outside", "virtual", "deep"):
            del file[name]
    with caplog.at_level("INFO", "offload"):
        rows = cache_from(tmp_path / "x.h5")[:]

    assert {"a": [0, 1, 2]} == {name: values.tolist() for name, values in rows.items()}
    assert all(f"'{name}'" in caplog.text for name in ("version", "nothing", "to", "opaque"))


@pytest.mark.parametrize("form", ["file", "stream"])
@pytest.mark.parametrize("columns", [None, ["l"], ["s"]])
def test_places_outside_of_an_arrow_file_are_an_error(tmp_path: Path, form: str, columns: list[str] | None) -> None:
    """pyarrow itself follows them, which kills the process."""
    table = pa.table({"l": [list(range(7777)), []], "s": ["x" * 7777, ""]})
    arrow_file(tmp_path / "x", table, pa.ipc.new_file if form == "file" else pa.ipc.new_stream)
    ends = struct.pack("<2i", 7777, 7777)
    written = (tmp_path / "x").read_bytes()
    assert 2 == written.count(ends)
    (tmp_path / "x").write_bytes(written.replace(ends, struct.pack("<2i", 1 << 30, 1 << 30)))

    with pytest.raises(CorruptFileError, match=r"x can't be read \(.*\): is it complete\?"):
        cache_from(tmp_path / "x", tmp_path / "cache", columns=columns)
    assert not (tmp_path / "cache").exists()


def _table(values: np.ndarray[Any, Any]) -> Any:
    return pa.table({"x": pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), values.shape[1])})


def _parquet(path: Path, values: np.ndarray[Any, Any]) -> None:
    pq.write_table(_table(values), path, row_group_size=4, use_dictionary=False, compression="none")


WRITERS: dict[str, Any] = {
    "npy": np.save,
    "h5": lambda path, values: hdf5_file(path, {"inner/x": values}),
    "parquet": _parquet,
    "arrow": lambda path, values: arrow_file(path, _table(values), pa.ipc.new_file),
}


@pytest.mark.parametrize("form", WRITERS)
def test_a_damaged_file_is_an_error_that_names_it(tmp_path, form):
    path = tmp_path / f"x.{form}"
    WRITERS[form](path, np.arange(1000).reshape(1000, 1))
    data = bytearray(path.read_bytes())
    if form == "npy":
        data = data.replace(b"{'descr'", b"{{{{{{{{")
    elif form == "h5":
        data = data.replace(b"TREE", b"EERT")
    elif form == "parquet":
        data[4:400] = b"\xff" * 396
    else:
        data[-200:-10] = b"\xff" * 190
    path.write_bytes(data)

    words = rf"(?s)x\.{form} can't be read \(.*\): is it complete\? Download or copy it again"
    with pytest.raises(CorruptFileError, match=words):
        cache_from(path, tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_a_shard_of_parquet_may_have_no_row_groups(tmp_path: Path) -> None:
    table = pa.table({"x": [1, 2]})
    pq.ParquetWriter(tmp_path / "0.parquet", table.schema).close()
    pq.write_table(table, tmp_path / "1.parquet")

    assert [1, 2] == cache_from(tmp_path)[:]["x"].tolist()


def test_arrow_data_that_cannot_be_kept_is_refused(tmp_path: Path) -> None:
    import datetime

    with pytest.raises(DtypeMismatchError, match=r"column 't' .* datetime is not JSON serializable"):
        cache_from(pa.table({"t": [datetime.datetime(2020, 1, 1)]}), tmp_path / "cache")
    with pytest.raises(CacheError, match="'l' in the table has a null inside a row"):
        cache_from(pa.table({"l": [[1, None]]}), tmp_path / "cache")
    assert not (tmp_path / "cache").exists()
    pq.write_table(pa.table({"x": [1]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"x": ["1"]}), tmp_path / "b.parquet")
    with pytest.raises(CacheError, match=r"b\.parquet has other columns or types than"):
        cache_from(tmp_path)


@pytest.mark.parametrize("form", ["h5", "parquet"])
def test_a_file_is_streamed_in_little_memory(tmp_path, form):
    values = np.random.default_rng(0).integers(0, 255, (64, 1 << 20), dtype=np.uint8)  # 64 MB
    small, path = tmp_path / f"s.{form}", tmp_path / f"x.{form}"
    WRITERS[form](small, values[:2])
    WRITERS[form](path, values)
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
