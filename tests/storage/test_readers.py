"""What holds for every format of files of tensors, each with the same tests."""

from __future__ import annotations

import io
import os
import random
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable
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
from tests.checkpoints.gguf_files import finish
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

    def test_values_are_what_was_written_and_reading_leaves_no_trace(self, path: Path, tmp_path: Path) -> None:
        """No file is written to, or made, and no descriptor stays open."""
        before, descriptors = contents(path.parent), len(os.listdir("/proc/self/fd"))
        file = self.open(path)

        assert set(self.values) == set(file.header.keys)
        found = {key: Handle.reference(file, key, tmp_path / "own").base() for key in self.values}
        assert all(is_equal(value, found[key], strides=False) for key, value in self.values.items())
        assert descriptors == len(os.listdir("/proc/self/fd"))
        assert before == contents(path.parent)
        assert not (tmp_path / "own").exists()

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

    @pytest.mark.parametrize("is_mapped", [False, True])
    @pytest.mark.parametrize(
        ("harm", "error", "words"),
        [
            (lambda path: os.utime(path, ns=(1, 1)), ChangedFileError, "has changed since it was opened"),
            (Path.unlink, MissingFileError, "the file is missing"),
        ],
        ids=["changed", "gone"],
    )
    def test_a_file_that_is_changed_or_gone_after_it_was_opened_is_not_read(
        self, path: Path, harm: Callable[[Path], None], error: type[Exception], words: str, is_mapped: bool
    ) -> None:
        """Even if one value was mapped before, which stays as it was."""
        file, (key, value) = self.open(path), next(iter(self.values.items()))
        first = Handle.reference(file, key).base() if is_mapped else value
        harm(path)

        for name in self.values:
            with pytest.raises(error, match=f"'{name}'.*{words}"):
                Handle.reference(file, name).base()
        assert is_equal(value, first, strides=False)

    def test_damaged_bytes_are_an_error_or_values_inside_the_file(self, path: Path) -> None:
        """400 times up to four bytes, half of them in the first 400; some of these files are still opened."""
        whole, chance, opened = path.read_bytes(), random.Random(0), 0
        for number in range(400):
            data = bytearray(whole)
            for _ in range(chance.randint(1, 4)):
                data[chance.randrange(min(len(data), 400) if number % 2 else len(data))] = chance.randrange(256)
            path.write_bytes(data)
            os.utime(path, ns=(number, number))
            try:
                file = self.open(path)
            except (FileError, CheckpointError):
                continue
            opened += 1
            assert all(0 <= one.start <= one.start + one.layout.nbytes <= len(data) for one in file.entries.values())
        assert opened


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


class TestGguf(ReaderTests):
    def write(self, path: Path) -> None:
        writer = gguf.GGUFWriter(path, "llama")
        for key, value in self.values.items():
            writer.add_tensor(key, value.numpy())
        finish(writer)


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
