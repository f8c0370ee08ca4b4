"""Each source of rows does what all of them do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tests.integrations.row_sources import RowFileTests, RowSourceTests

Values = dict[str, np.ndarray[Any, Any]]


def structured(values: Values) -> np.ndarray[Any, Any]:
    kinds = [(name, part.dtype, part.shape[1:]) for name, part in values.items()]
    rows = np.zeros(len(values["id"]), dtype=kinds)
    for name, part in values.items():
        rows[name] = part
    return rows


def tensors(values: Values) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(part) for name, part in values.items()}


class TestArray(RowSourceTests):
    def source(self, folder: Path, values: Values) -> Any:
        return structured(values)


class TestNpyFile(RowFileTests):
    def source(self, folder: Path, values: Values) -> Any:
        np.save(folder / "rows.npy", structured(values))
        return folder / "rows.npy"


class TestDictOfTensors(RowSourceTests):
    def source(self, folder: Path, values: Values) -> Any:
        return tensors(values)


class TestSafetensorsFile(RowFileTests):
    def source(self, folder: Path, values: Values) -> Any:
        save_file(tensors(values), folder / "rows.safetensors")
        return folder / "rows.safetensors"


class TestFileOfTorchSave(RowFileTests):
    def source(self, folder: Path, values: Values) -> Any:
        torch.save(tensors(values), folder / "rows.pt")
        return folder / "rows.pt"


class TestHdf5File(RowFileTests):
    def source(self, folder: Path, values: Values) -> Any:
        h5py = pytest.importorskip("h5py")
        with h5py.File(folder / "rows.h5", "w") as file:
            file.update(values)
        return folder / "rows.h5"


class TestHdf5Group(RowSourceTests):
    def source(self, folder: Path, values: Values) -> Any:
        h5py = pytest.importorskip("h5py")
        file = h5py.File(folder / "rows.h5", "w")
        file.update({f"group/{name}": part for name, part in values.items()})
        return file["group"]


def arrow_table(values: Values) -> Any:
    pa = pytest.importorskip("pyarrow")
    pair = pa.FixedSizeListArray.from_arrays(pa.array(values["pair"].reshape(-1)), 2)
    return pa.table({"id": values["id"], "score": values["score"], "pair": pair})


class TestArrowTable(RowSourceTests):
    def source(self, folder: Path, values: Values) -> Any:
        return arrow_table(values)


class TestArrowFile(RowFileTests):
    def source(self, folder: Path, values: Values) -> Any:
        pa = pytest.importorskip("pyarrow")
        table = arrow_table(values)
        with pa.OSFile(str(folder / "rows.arrow"), "wb") as sink, pa.ipc.new_file(sink, table.schema) as file:
            file.write_table(table)
        return folder / "rows.arrow"


class TestArrowStream(RowFileTests):
    def source(self, folder: Path, values: Values) -> Any:
        pa = pytest.importorskip("pyarrow")
        table = arrow_table(values)
        with pa.OSFile(str(folder / "rows.arrow"), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as file:
            file.write_table(table)
        return folder / "rows.arrow"


class TestParquetFile(RowFileTests):
    def source(self, folder: Path, values: Values) -> Any:
        table, pq = arrow_table(values), pytest.importorskip("pyarrow.parquet")
        pq.write_table(table, folder / "rows.parquet", row_group_size=5)
        return folder / "rows.parquet"


class TestParquetFolder(RowFileTests):
    def source(self, folder: Path, values: Values) -> Any:
        table, pq = arrow_table(values), pytest.importorskip("pyarrow.parquet")
        (folder / "shards").mkdir()
        pq.write_table(table.slice(0, 9), folder / "shards" / "0.parquet")
        pq.write_table(table.slice(9), folder / "shards" / "1.parquet")
        return folder / "shards"


class TestDataset(RowSourceTests):
    def source(self, folder: Path, values: Values) -> Any:
        datasets = pytest.importorskip("datasets")
        return datasets.Dataset(arrow_table(values))


class TestFolderOfADataset(RowFileTests):
    def source(self, folder: Path, values: Values) -> Any:
        datasets = pytest.importorskip("datasets")
        if not len(values["id"]):
            pytest.skip("datasets 5 can't load a dataset without rows that it saved")
        datasets.Dataset(arrow_table(values)).save_to_disk(folder / "saved")
        return folder / "saved"


class TestTensorDict(RowSourceTests):
    def source(self, folder: Path, values: Values) -> Any:
        tensordict = pytest.importorskip("tensordict")
        return tensordict.TensorDict(tensors(values), batch_size=[len(values["id"])])


class TestFolderOfATensorDict(RowFileTests):
    def source(self, folder: Path, values: Values) -> Any:
        tensordict = pytest.importorskip("tensordict")
        tensordict.TensorDict(tensors(values), batch_size=[len(values["id"])]).memmap(folder / "saved")
        return folder / "saved"
