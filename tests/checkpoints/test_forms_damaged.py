"""A packed checkpoint that does not fit itself is refused when it is loaded: tensor and file are named."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import offload
from offload.checkpoints.conversion import convert_checkpoint
from offload.checkpoints.forms.formats import unpacked
from offload.errors import CheckpointError, CorruptFileError
from tests.checkpoints.forms import FORMS
from tests.checkpoints.gguf_files import finish
from tests.checkpoints.pieces import stored


def fp8(folder: Path, size: Any, rows: int, columns: int, scales: torch.Tensor) -> Any:
    """A weight of a checkpoint whose configuration says this block size."""
    weight = torch.ones(rows, columns).to(torch.float8_e4m3fn)
    pieces = stored(folder, {"w.weight": weight, "w.weight_scale_inv": scales})
    return unpacked(pieces, {"quant_method": "fp8", "weight_block_size": size})["w.weight"]  # type: ignore[index]


@pytest.mark.parametrize("size", [[64, 64], [64, 128], [128, 64], [1, 32], [128], [0, 128], [128, 128.5], "128"])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_a_single_scale_for_more_than_a_block_is_refused(size: Any, shape: tuple[int, ...], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=rf"'w\.weight' can't be made .*{tmp_path}.*do not cover it"):
        fp8(tmp_path, size, 128, 128, torch.full(shape, 3.0))


@pytest.mark.parametrize("size", [None, [128, 128], [256, 256], [1024, 512]])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_a_single_scale_that_the_configuration_allows_is_used(
    size: Any, shape: tuple[int, ...], tmp_path: Path
) -> None:
    """For the whole weight: there are no blocks, or it is not larger than one."""
    assert torch.equal(torch.full((128, 128), 3.0), fp8(tmp_path, size, 128, 128, torch.full(shape, 3.0)).materialize())


@pytest.mark.parametrize("shape", [(), (1,), (1, 1, 1)])
def test_a_single_scale_for_several_experts_is_refused(shape: tuple[int, ...], tmp_path: Path) -> None:
    """Each has its own."""
    experts = {"w.weight": torch.ones(2, 64, 64).to(torch.float8_e4m3fn), "w.weight_scale_inv": torch.ones(shape)}

    with pytest.raises(CheckpointError, match=r"in blocks of \[128, 128\], they do not cover it"):
        unpacked(stored(tmp_path, experts), {"quant_method": "fp8", "weight_block_size": [128, 128]})


def test_blocks_of_no_stated_size_that_are_not_equal_are_refused(tmp_path: Path) -> None:
    """320 rows with three scales: blocks of 128, 120 or 107 would all do."""
    with pytest.raises(CheckpointError, match="no weight_block_size, and they do not divide it evenly"):
        fp8(tmp_path, None, 320, 128, torch.ones(3, 1))


@pytest.mark.parametrize("size", [70, 50, 36, 64])
def test_awq_whose_groups_do_not_divide_the_inputs_is_refused(size: int, tmp_path: Path) -> None:
    """Whether the last group is the shorter one, nothing says, and no package packs such weights."""
    words = torch.zeros(96, 48 // 8, dtype=torch.int32)
    groups = -(-96 // size)
    pieces = {"w.qweight": words, "w.qzeros": words[:groups].clone(), "w.scales": torch.ones(groups, 48).half()}

    with pytest.raises(CheckpointError, match=rf"'w.weight' .*96 inputs .*groups of {size}"):
        unpacked(stored(tmp_path, pieces), {"quant_method": "awq", "bits": 4, "group_size": size, "version": "gemm"})


@pytest.mark.parametrize("kind", ["Q8_1", "Q8_K", "Q1_0"])
def test_blocks_without_a_decoder_are_refused_by_name_when_they_are_opened(kind: str, tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    number = gguf.GGMLQuantizationType[kind]
    elements, nbytes = gguf.GGML_QUANT_SIZES[number]
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_tensor("w", np.zeros((2, 512 // elements * nbytes), np.uint8), raw_dtype=number)
    finish(writer)

    with pytest.raises(CheckpointError, match=f"'w' in {tmp_path / 'model.gguf'} is in blocks of the kind {kind}"):
        offload.load_file(tmp_path / "model.gguf")


def test_blocks_of_no_numbers_are_refused(tmp_path: Path) -> None:
    FORMS["gguf-q8_0"].write(tmp_path)
    file = tmp_path / "model.gguf"
    stored = bytearray(file.read_bytes())
    struct.pack_into("<Q", stored, stored.index(b"blk.0.attn_q.weight") + len(b"blk.0.attn_q.weight") + 4, 0)
    file.write_bytes(stored)

    with pytest.raises(CorruptFileError, match=r"'blk.0.attn_q.weight' the shape \[256, 0\], of no blocks of Q8_0"):
        offload.load_file(file)


@pytest.mark.parametrize("form", ["bnb-nf4", "bnb-int8"])
def test_bitsandbytes_is_recognised_without_the_methods_name(form: str, tmp_path: Path) -> None:
    """As its first configurations were written; what is converted then depends on it, too."""
    FORMS[form].write(tmp_path / "named")
    shutil.copytree(tmp_path / "named", tmp_path / "unnamed")
    settings = tmp_path / "unnamed" / "config.json"
    config = json.loads(settings.read_text())
    assert "bitsandbytes" == config["quantization_config"].pop("quant_method")
    settings.write_text(json.dumps(config))

    found = offload.from_pretrained(tmp_path / "unnamed")
    expected = offload.from_pretrained(tmp_path / "named").state_dict()

    assert all(torch.equal(expected[name].materialize(), one.materialize()) for name, one in found.state_dict().items())
    with pytest.raises(CheckpointError, match=r"quantized \(bitsandbytes\)"):
        convert_checkpoint(tmp_path / "unnamed", tmp_path / "cast", dtype=torch.float32)
