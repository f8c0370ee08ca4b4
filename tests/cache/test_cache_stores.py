"""Each kind of cache does what all of them do."""

from __future__ import annotations

from pathlib import Path

import torch

from offload import OffloadedTensor, TensorCache
from tests.cache.stores import StoreTests
from tests.page_cache import made_hot


class TestInMemory(StoreTests):
    @staticmethod
    def make(folder: Path, tensors: dict[str, torch.Tensor]) -> TensorCache:
        return TensorCache(tensors=tensors)


class TestOverOffloadedTensors(StoreTests):
    @staticmethod
    def make(folder: Path, tensors: dict[str, torch.Tensor]) -> TensorCache:
        named = tensors.items()
        return TensorCache({name: OffloadedTensor.from_original_tensor(t, name, folder) for name, t in named})


class TestFileOfToDisk(StoreTests):
    @staticmethod
    def make(folder: Path, tensors: dict[str, torch.Tensor]) -> TensorCache:
        TensorCache(tensors=tensors).to_disk(folder / "rows.pt")
        return TensorCache.from_disk(folder / "rows.pt")


class TestSafetensorsFile(StoreTests):
    @staticmethod
    def make(folder: Path, tensors: dict[str, torch.Tensor]) -> TensorCache:
        TensorCache(tensors=tensors).to_disk(folder / "rows.safetensors")
        return TensorCache.from_disk(folder / "rows.safetensors")


class TestFileOfTorchSave(StoreTests):
    @staticmethod
    def make(folder: Path, tensors: dict[str, torch.Tensor]) -> TensorCache:
        torch.save(tensors, folder / "rows.pt")
        return TensorCache.from_disk(folder / "rows.pt")


class TestLegacyFileOfTorchSave(StoreTests):
    @staticmethod
    def make(folder: Path, tensors: dict[str, torch.Tensor]) -> TensorCache:
        torch.save(tensors, folder / "rows.pt", _use_new_zipfile_serialization=False)
        return TensorCache.from_disk(folder / "rows.pt")


class TestFolderToWrite(StoreTests):
    @staticmethod
    def make(folder: Path, tensors: dict[str, torch.Tensor]) -> TensorCache:
        schema = {name: (tensor.dtype, tuple(tensor.shape[1:])) for name, tensor in tensors.items()}
        cache = TensorCache.create(folder / "cache", schema)
        cache.append(tensors)
        cache.flush()
        return cache


class TestFolderToRead(StoreTests):
    @staticmethod
    def make(folder: Path, tensors: dict[str, torch.Tensor]) -> TensorCache:
        TestFolderToWrite.make(folder, tensors).close()
        return TensorCache.from_disk(folder / "cache")


class TestFolderInMemory(StoreTests):
    """All rows come out of mappings."""

    @staticmethod
    def make(folder: Path, tensors: dict[str, torch.Tensor]) -> TensorCache:
        made_hot(cache := TestFolderToRead.make(folder, tensors))
        return cache
