"""llama.cpp's files: contents are known from the header, and damaged files are reported."""

from __future__ import annotations

import random
import struct
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

import offload
from offload.errors import CheckpointError, CorruptFileError, OffloadError
from offload.storage.file import TensorFile
from tests.checkpoints.gguf_files import finish

_VALUES = np.random.default_rng(0).standard_normal((6, 64), dtype=np.float32)


def written(path: Path, kinds: tuple[str, ...] = ("F32", "F16", "Q8_0", "Q4_0"), tokens: int = 5) -> Path:
    """A file with a tensor of (6, 64) per kind, named after it."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("small")
    writer.add_token_list([f"token {number}" for number in range(tokens)])
    writer.add_token_scores([0.5] * tokens)
    for kind in kinds:
        number = gguf.GGMLQuantizationType[kind]
        writer.add_tensor(kind, gguf.quants.quantize(_VALUES, number), raw_dtype=number)
    finish(writer)
    return path


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    return written(tmp_path / "small.gguf")


def changed(path: Path, find: bytes, put: bytes, after: int = 0) -> Path:
    """The file with some bytes after the first `find` changed."""
    data = bytearray(path.read_bytes())
    at = data.index(find) + len(find) + after
    data[at : at + len(put)] = put
    path.write_bytes(data)
    return path


def test_numbers_are_entries_and_blocks_are_rows_of_bytes(whole: Path) -> None:
    file = TensorFile.open(whole)

    assert {
        "F32": (torch.float32, (6, 64)),
        "F16": (torch.float16, (6, 64)),
        "Q8_0": (torch.uint8, (6, 68)),
        "Q4_0": (torch.uint8, (6, 36)),
    } == {key: (entry.layout.dtype, entry.layout.shape) for key, entry in file.entries.items()}
    assert {"Q8_0": "Q8_0", "Q4_0": "Q4_0"} == file.header.kinds
    assert {"general.architecture": "llama", "general.name": "small"} == file.header.metadata


def test_every_number_of_torch_has_a_kind(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "numbers.gguf", "llama")
    kinds = {"F64": np.float64, "I8": np.int8, "I16": np.int16, "I32": np.int32, "I64": np.int64}
    for kind, dtype in kinds.items():
        writer.add_tensor(kind, np.arange(5, dtype=dtype))
    finish(writer)

    for kind, tensor in offload.load_file(tmp_path / "numbers.gguf").items():
        assert torch.equal(torch.from_numpy(np.arange(5, dtype=kinds[kind])), tensor.materialize())


def test_a_vocabulary_costs_little(tmp_path: Path) -> None:
    """The package's own reader makes objects of each token, which take 20 us, twice, and 100 MB in all."""
    path = written(tmp_path / "large.gguf", tokens=100_000)
    tracemalloc.start()

    TensorFile.open(path)

    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 << 20


@pytest.mark.parametrize(
    ("put", "after", "said"),
    [
        (struct.pack("<Q", 1 << 60), 4, "shape"),  # the first dimension of a tensor
        (struct.pack("<QQ", 1 << 32, 1 << 32), 4, "damaged|shape"),  # their product is 0 in 64 bits
        (struct.pack("<I", 77), 0, "damaged"),  # number of dimensions
        (struct.pack("<I", 999), 20, "damaged"),  # an unknown kind
        (struct.pack("<I", 12), 20, "Q4_K block size"),
        (struct.pack("<Q", 1 << 50), 24, "damaged|cut off"),  # its offset
        (struct.pack("<Q", 0), 24, "places 'F32' over 'Q8_0'"),
    ],
)
def test_an_impossible_tensor_is_reported(whole: Path, put: bytes, after: int, said: str) -> None:
    with pytest.raises(CorruptFileError, match=said) as told:
        TensorFile.open(changed(whole, b"\x04\0\0\0\0\0\0\0Q8_0", put, after))
    assert "small.gguf" in str(told.value)


@pytest.mark.parametrize("at", [8, 16])
@pytest.mark.parametrize("count", [1 << 40, (1 << 64) - 1])
def test_an_absurd_count_is_refused_at_once(whole: Path, at: int, count: int) -> None:
    data = bytearray(whole.read_bytes())
    data[at : at + 8] = struct.pack("<Q", count)
    whole.write_bytes(data)

    with pytest.raises(CorruptFileError, match="damaged"):
        TensorFile.open(whole)


def test_bytes_of_another_machine_are_refused(whole: Path) -> None:
    with pytest.raises(CorruptFileError):
        TensorFile.open(changed(whole, b"GGUF", struct.pack(">I", 3)))


def test_without_the_package_the_error_says_what_to_install(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "gguf", None)

    with pytest.raises(CheckpointError, match=r"small\.gguf is a GGUF file, .* pip install gguf"):
        TensorFile.open(whole)


def test_any_bytes_give_values_or_an_offload_error(tmp_path: Path) -> None:
    """400 files with flipped bytes, or cut short."""
    data = written(tmp_path / "small.gguf").read_bytes()
    head = data.index(b"\x04\0\0\0\0\0\0\0Q4_0") + 60
    generator = random.Random(0)
    opened = 0
    for number in range(400):
        damaged = bytearray(data)
        for _ in range(generator.choice((1, 1, 2, 8))):
            damaged[generator.randrange(head)] = generator.choice((0, 1, 255, generator.randrange(256)))
        if number % 4 == 0:
            del damaged[generator.randrange(len(damaged)) :]
        path = tmp_path / f"{number}.gguf"
        path.write_bytes(damaged)
        told = _error_of(path)
        opened += told is None

        assert told is None or path.name in told
    assert 0 < opened < 400


def _error_of(path: Path) -> str | None:
    """The error for a file that can't be used."""
    try:
        for tensor in offload.load_file(path).values():
            tensor.materialize()
    except OffloadError as error:
        return str(error)
    return None
