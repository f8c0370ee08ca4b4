"""Each source of rows does what all of them do."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tests.integrations.row_sources import RowFileTests, RowSourceTests

h5py = pytest.importorskip("h5py")
pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

Values = dict[str, np.ndarray[Any, Any]]


def structured(values: Values) -> np.ndarray[Any, Any]:
    kinds = [(name, part.dtype, part.shape[1:]) for name, part in values.items()]
    rows = np.zeros(len(values["id"]), dtype=kinds)
    for name, part in values.items():
        rows[name] = part
    return rows


def tensors(values: Values) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(part) for name, part in values.items()}


def arrow_table(values: Values) -> Any:
    pair = pa.FixedSizeListArray.from_arrays(pa.array(values["pair"].reshape(-1)), 2)
    return pa.table({"id": values["id"], "score": values["score"], "pair": pair})


def a_dataset(values: Values) -> Any:
    return pytest.importorskip("datasets").Dataset(arrow_table(values))


def a_tensordict(values: Values) -> Any:
    return pytest.importorskip("tensordict").TensorDict(tensors(values), batch_size=[len(values["id"])])


def hdf5_group(folder: Path, values: Values) -> Any:
    file = h5py.File(folder / "rows.h5", "w")
    file.update({f"group/{name}": part for name, part in values.items()})
    return file["group"]


def hdf5_file(path: Path, values: Values) -> None:
    with h5py.File(path, "w") as file:
        file.update(values)


def arrow_file(path: Path, values: Values, form: Callable[..., Any]) -> None:
    table = arrow_table(values)
    with pa.OSFile(str(path), "wb") as sink, form(sink, table.schema) as file:
        file.write_table(table)


def parquet_folder(path: Path, values: Values) -> None:
    path.mkdir()
    pq.write_table(arrow_table(values).slice(0, 9), path / "0.parquet")
    pq.write_table(arrow_table(values).slice(9), path / "1.parquet")


def folder_of_a_dataset(path: Path, values: Values) -> None:
    if not len(values["id"]):
        pytest.skip("datasets 5 can't load a dataset without rows that it saved")
    a_dataset(values).save_to_disk(path)


IN_MEMORY: dict[str, Callable[[Path, Values], Any]] = {
    "array": lambda _, values: structured(values),
    "dict of tensors": lambda _, values: tensors(values),
    "HDF5 group": hdf5_group,
    "Arrow table": lambda _, values: arrow_table(values),
    "dataset": lambda _, values: a_dataset(values),
    "TensorDict": lambda _, values: a_tensordict(values),
}
FILES: dict[str, Callable[[Path, Values], Any]] = {
    "rows.npy": lambda path, values: np.save(path, structured(values)),
    "rows.safetensors": lambda path, values: save_file(tensors(values), path),
    "rows.pt": lambda path, values: torch.save(tensors(values), path),
    "rows.h5": hdf5_file,
    "rows.arrow": lambda path, values: arrow_file(path, values, pa.ipc.new_file),
    "rows.arrows": lambda path, values: arrow_file(path, values, pa.ipc.new_stream),
    "rows.parquet": lambda path, values: pq.write_table(arrow_table(values), path, row_group_size=5),
    "shards": parquet_folder,
    "saved": folder_of_a_dataset,
    "memmap": lambda path, values: a_tensordict(values).memmap(path),
}


@pytest.mark.parametrize("kind", IN_MEMORY)
class TestSources(RowSourceTests):
    @pytest.fixture(autouse=True)
    def _kind(self, kind: str) -> None:
        self.make = IN_MEMORY[kind]

    def source(self, folder: Path, values: Values) -> Any:
        return self.make(folder, values)


@pytest.mark.parametrize("name", FILES)
class TestFiles(RowFileTests):
    @pytest.fixture(autouse=True)
    def _name(self, name: str) -> None:
        self.name = name

    def source(self, folder: Path, values: Values) -> Any:
        FILES[self.name](folder / self.name, values)
        return folder / self.name
