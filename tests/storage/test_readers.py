"""What holds for every format of files of tensors, each with the same tests."""

from __future__ import annotations

import io
import os
import random
import struct
from abc import ABC, abstractmethod
from pathlib import Path

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file

from offload.errors import ChangedFileError, CheckpointError, CorruptFileError, FileError, MissingFileError
from offload.storage.file import TensorFile
from offload.storage.handle import Handle
from offload.storage.layout import Entry, contiguous
from offload.storage.owning import create_value, writable_base
from tests.conftest import contents
from tests.equal import is_equal


class ReaderTests(ABC):
    """Inherit, and say how such a file is written and opened."""

    values: dict[str, torch.Tensor] = {  # noqa: RUF012
        "a": torch.arange(12.0).reshape(3, 4),
        "b.weight": torch.arange(64, dtype=torch.float16),
        "c": torch.arange(-8, 8, dtype=torch.int32).reshape(2, 8),
    }

    @abstractmethod
    def write(self, path: Path) -> None:
        """Write a file with these values at `path`."""

    def open(self, path: Path) -> TensorFile:
        return TensorFile.open(path)

    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        (tmp_path / "files").mkdir()
        self.write(tmp_path / "files" / "stored")
        return tmp_path / "files" / "stored"

    def test_values_are_what_was_written(self, path: Path, tmp_path: Path) -> None:
        file = self.open(path)

        assert set(self.values) == set(file.header.keys)
        for key, value in self.values.items():
            assert is_equal(value, Handle.reference(file, key, tmp_path / "own").base(), strides=False)

    def test_reading_writes_nothing(self, path: Path, tmp_path: Path) -> None:
        before = contents(path.parent)
        file = self.open(path)
        found = [Handle.reference(file, key, tmp_path / "own").base().sum() for key in self.values]

        assert len(self.values) == len(found)
        assert before == contents(path.parent)
        assert not (tmp_path / "own").exists()

    def test_no_descriptor_stays_open(self, path: Path) -> None:
        before = len(os.listdir("/proc/self/fd"))
        file = self.open(path)
        mapped = [Handle.reference(file, key).base() for key in self.values]

        assert len(self.values) == len(mapped)
        assert before == len(os.listdir("/proc/self/fd"))

    def test_a_store_into_a_mapping_does_not_reach_the_file(self, path: Path) -> None:
        before = path.read_bytes()
        file = self.open(path)
        for key in self.values:
            Handle.reference(file, key).base().fill_(3)

        assert before == path.read_bytes()

    def test_the_first_write_goes_to_a_file_of_its_own(self, path: Path, tmp_path: Path) -> None:
        before = path.read_bytes()
        key, value = next(iter(self.values.items()))
        handle = Handle.reference(self.open(path), key, tmp_path / "own")

        writable_base(handle).add_(1)
        handle.flush()

        assert torch.equal(value + 1, load_file(handle.path)[key])
        assert tmp_path / "own" == handle.path.parent
        assert before == path.read_bytes()

    def test_an_unknown_key_is_an_error_that_names_others(self, path: Path) -> None:
        with pytest.raises(KeyError, match=f"no tensor 'no such'; it has {len(self.values)}: .*a"):
            Handle.reference(self.open(path), "no such")

    def test_a_missing_file_is_not_created(self, path: Path) -> None:
        path.unlink()

        with pytest.raises(MissingFileError, match="the file is missing"):
            self.open(path)
        assert not path.exists()

    def test_a_folder_is_refused(self, path: Path) -> None:
        path.unlink()
        path.mkdir()

        with pytest.raises(CorruptFileError, match="is a folder"):
            self.open(path)

    @pytest.mark.parametrize("part", [0.0, 0.1, 0.5, 0.9])
    def test_a_truncated_file_is_refused_and_not_extended(self, path: Path, part: float) -> None:
        length = int(part * path.stat().st_size)
        os.truncate(path, length)

        with pytest.raises((CorruptFileError, CheckpointError), match=str(path)):
            self.open(path)
        assert length == path.stat().st_size

    def test_a_file_that_changes_after_it_was_opened_is_not_read(self, path: Path) -> None:
        file = self.open(path)
        os.utime(path, ns=(1, 1))

        for key in self.values:
            with pytest.raises(ChangedFileError, match=f"'{key}'.*has changed since it was opened"):
                Handle.reference(file, key).base()

    def test_a_change_after_one_value_was_mapped_is_noticed_by_the_others(self, path: Path) -> None:
        file = self.open(path)
        first = Handle.reference(file, next(iter(self.values))).base()
        file.mapped(shared=False)
        os.utime(path, ns=(1, 1))

        for key in self.values:
            with pytest.raises(ChangedFileError, match=f"'{key}'.*has changed since it was opened"):
                Handle.reference(file, key).base()
        assert is_equal(next(iter(self.values.values())), first, strides=False)

    def test_a_file_that_is_gone_is_not_read(self, path: Path) -> None:
        file = self.open(path)
        path.unlink()

        for key in self.values:
            with pytest.raises(MissingFileError, match=f"'{key}'.*the file is missing"):
                Handle.reference(file, key).base()

    def test_damaged_bytes_are_an_error_or_values_inside_the_file(self, path: Path) -> None:
        whole, chance = path.read_bytes(), random.Random(0)
        for _ in range(60):
            data = bytearray(whole)
            data[chance.randrange(min(len(data), 400))] ^= 1 << chance.randrange(8)
            path.unlink()
            path.write_bytes(data)
            try:
                file = self.open(path)
            except (FileError, CheckpointError):
                continue
            ends = [entry.start + entry.layout.nbytes for entry in file.entries.values()]
            assert max(ends, default=0) <= len(data)


class TestSafetensors(ReaderTests):
    def write(self, path: Path) -> None:
        save_file(self.values, path)


class TestOurs(ReaderTests):
    values = {"a": torch.arange(12.0).reshape(3, 4)}  # noqa: RUF012

    def write(self, path: Path) -> None:
        os.rename(create_value(self.values["a"], "a", path.parent / "made").path, path)
        (path.parent / "made").rmdir()


class TestTorchSave(ReaderTests):
    def write(self, path: Path) -> None:
        torch.save(self.values, path)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
class TestOldTorchSave(ReaderTests):
    def write(self, path: Path) -> None:
        torch.save(self.values, path, _use_new_zipfile_serialization=False)


class TestGguf(ReaderTests):
    def write(self, path: Path) -> None:
        writer = gguf.GGUFWriter(path, "llama")
        for key, value in self.values.items():
            writer.add_tensor(key, value.numpy())
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


class TestRaw(ReaderTests):
    values = {"a": torch.arange(12.0).reshape(3, 4)}  # noqa: RUF012

    def write(self, path: Path) -> None:
        path.write_bytes(b"skip" + struct.pack("12f", *range(12)))

    def open(self, path: Path) -> TensorFile:
        return TensorFile.raw(path, Entry("a", contiguous(torch.float32, (3, 4)), 4))

    def test_it_is_never_taken_for_a_file_with_a_header(self, path: Path) -> None:
        with pytest.raises(CorruptFileError):
            TensorFile.open(path)


class TestArchives(ReaderTests):
    def write(self, path: Path) -> None:
        self.places: dict[str, tuple[int, int]] = {}
        with path.open("wb") as file:
            for key, value in self.values.items():
                data = io.BytesIO()
                torch.save(value, data)
                self.places[key] = file.tell(), len(data.getvalue())
                file.write(data.getvalue())

    def open(self, path: Path) -> TensorFile:
        return TensorFile.of_archives(path, self.places)
