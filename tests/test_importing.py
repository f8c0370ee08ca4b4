"""Other libraries, while another thread imports them."""

import ast
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

import offload
from offload import OffloadedTensor
from offload.integrations import cache_from
from tests.test_house import MODULES, dotted

ACTS: dict[str, Callable[[Path], object]] = {
    "a model is loaded": lambda folder: offload.load_checkpoint_and_dispatch(nn.Linear(2, 2), _saved(folder)),
    "a model is saved": lambda folder: _saved(folder),
    "a model is quantized": lambda folder: offload.quantize_(offload.disk_offload(nn.Linear(32, 32)), _int8()),
    "rows are read": lambda folder: cache_from({"x": torch.ones(3)})[:]["x"],
    "a tensor is written": lambda folder: OffloadedTensor.from_original_tensor(torch.ones(2), "w", folder),
    "a tensor is cut": lambda folder: torch.chunk(OffloadedTensor.from_original_tensor(torch.ones(2), "w"), 2),
    "a tensor is recognized": lambda folder: offload.is_offloaded(torch.ones(2)),
    "batches are computed": lambda folder: list(offload.map_batches(_sum, [1.0, 2.0], nn.Linear(2, 2))),
}


def _saved(folder: Path) -> Path:
    offload.save_checkpoint(nn.Linear(2, 2), folder)
    return folder


def _int8() -> object:
    return pytest.importorskip("torchao.quantization").Int8WeightOnlyConfig()


def _sum(batch: float) -> float:
    return batch + 1


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize(
    "library",
    ["transformers", "transformers.modeling_utils", "tensordict", "torch.distributed.tensor", "torch._dynamo"],
)
def test_a_library_that_is_being_imported_defines_nothing_yet(act, library, tmp_path, monkeypatch):
    """From the first moment of an import there is a module, which is empty."""
    if act == "a model is quantized":
        _int8()  # imports torchao, and what that imports, as a whole
    monkeypatch.setitem(sys.modules, library, ModuleType(library))

    ACTS[act](tmp_path)


def test_a_rank_is_known_while_torch_distributed_is_being_imported(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.distributed", ModuleType("torch.distributed"))
    monkeypatch.setenv("WORLD_SIZE", "2")
    OffloadedTensor.from_original_tensor(torch.ones(2), "w", tmp_path)

    assert [".offload-ranks"] == [path.name for path in tmp_path.glob(".*")]


def test_one_module_looks_into_what_has_been_imported():
    looking = {
        dotted(path)
        for path in MODULES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "sys.modules"
    }

    assert {"offload.importing"} == looking
