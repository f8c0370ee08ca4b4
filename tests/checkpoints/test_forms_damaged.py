"""A checkpoint in FP8 or GGUF that does not fit itself is refused when it is loaded: tensor and file are named."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import offload
from offload.checkpoints.conversion import convert_checkpoint
from offload.errors import CheckpointError, CorruptFileError
from tests.checkpoints.forms import FORMS

Change = Callable[[dict[str, torch.Tensor], dict[str, Any]], object]


def written_with(folder: Path, size: Any, change: Change = lambda values, _: None, form: str = "fp8-llama") -> Path:
    """The file of a checkpoint whose configuration says this block size, after a change."""
    FORMS[form].write(folder)
    file, settings = folder / "model.safetensors", folder / "config.json"
    values, config = load_file(file), json.loads(settings.read_text())
    change(values, config["quantization_config"])
    save_file(values, file, {"format": "pt"})
    config["quantization_config"]["weight_block_size"] = size
    settings.write_text(json.dumps(config))
    return file


def one_scale(*shape: int) -> Change:
    """Each weight has a single scale of this shape."""
    return lambda values, _: values.update(
        {name: value.flatten()[0].reshape(shape).clone() for name, value in values.items() if "_scale_inv" in name}
    )


@pytest.mark.parametrize("size", [[64, 64], [64, 128], [128, 64], [1, 32], [128], [0, 128], [128, 128.5], "128"])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_a_single_scale_for_more_than_a_block_is_refused(size: Any, shape: tuple[int, ...], tmp_path: Path) -> None:
    """Each weight has 128 columns at least, and 128 rows, or 64 for keys and values."""
    file = written_with(tmp_path, size, one_scale(*shape))

    with pytest.raises(CheckpointError, match=r"_proj\.weight' can't be made .*do not cover it") as raised:
        offload.from_pretrained(tmp_path)

    assert str(file) in str(raised.value)


@pytest.mark.parametrize("size", [None, [256, 256], [1024, 512]])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_a_single_scale_that_the_configuration_allows_is_used(
    size: Any, shape: tuple[int, ...], tmp_path: Path
) -> None:
    """For the whole weight: there are no blocks, or it is not larger than one."""
    file = written_with(tmp_path, size, one_scale(*shape))
    stored = load_file(file)

    found = offload.from_pretrained(tmp_path).state_dict()

    packed = [name for name in stored if f"{name}_scale_inv" in stored]
    assert packed
    for name in packed:
        expected = (stored[name].float() * stored[f"{name}_scale_inv"]).to(found[name].dtype)
        assert torch.equal(expected, found[name].materialize())


def test_blocks_of_no_stated_size_that_are_not_equal_are_refused(tmp_path: Path) -> None:
    """320 rows with three scales: blocks of 128, 120 or 107 would all do."""
    file = written_with(tmp_path, None, form="fp8-part-block")

    with pytest.raises(CheckpointError, match="no weight_block_size, and they do not divide it evenly") as raised:
        offload.from_pretrained(tmp_path)

    assert str(file) in str(raised.value)


def _with_kind(stored: bytes, name: bytes, kind: int) -> bytes:
    """A GGUF file that says another kind of a tensor: after its name, the number of its sides, and these."""
    at = stored.index(name) + len(name)
    (sides,) = struct.unpack_from("<I", stored, at)
    at += 4 + 8 * sides
    return stored[:at] + struct.pack("<I", kind) + stored[at + 4 :]


@pytest.mark.parametrize("kind", [4, 99], ids=["one that was taken back", "one that never was"])
def test_a_kind_of_blocks_that_is_not_known_is_refused(kind: int, tmp_path: Path) -> None:
    FORMS["gguf-q8_0"].write(tmp_path)
    file = tmp_path / "model.gguf"
    file.write_bytes(_with_kind(file.read_bytes(), b"blk.0.attn_q.weight", kind))

    with pytest.raises((CheckpointError, CorruptFileError)) as raised:
        offload.from_pretrained(file)

    assert str(file) in str(raised.value)


@pytest.mark.parametrize("kind", ["Q8_1", "Q8_K", "Q1_0"])
def test_blocks_without_a_decoder_are_refused_by_name_when_they_are_opened(kind: str, tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    number = gguf.GGMLQuantizationType[kind]
    elements, nbytes = gguf.GGML_QUANT_SIZES[number]
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_tensor("w", np.zeros((2, 512 // elements * nbytes), np.uint8), raw_dtype=number)
    for act in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        act()

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
    """As its first configurations were written; what is changed and what is converted then depend on it, too."""
    FORMS[form].write(tmp_path / "named")
    shutil.copytree(tmp_path / "named", tmp_path / "unnamed")
    settings = tmp_path / "unnamed" / "config.json"
    config = json.loads(settings.read_text())
    assert "bitsandbytes" == config["quantization_config"].pop("quant_method")
    settings.write_text(json.dumps(config))

    found = offload.from_pretrained(tmp_path / "unnamed")
    expected = offload.from_pretrained(tmp_path / "named").state_dict()

    assert all(torch.equal(expected[name].materialize(), one.materialize()) for name, one in found.state_dict().items())
    weight = found.get_parameter("model.layers.1.mlp.down_proj.weight")
    weight.update_values(weight.materialize() * 2)
    found.save_pretrained(tmp_path / "changed")
    saved = json.loads((tmp_path / "changed" / "config.json").read_text())["quantization_config"]
    assert {"model.layers.1.mlp.down_proj", "lm_head"} <= set(saved["llm_int8_skip_modules"])
    with pytest.raises(CheckpointError, match=r"quantized \(bitsandbytes\)"):
        convert_checkpoint(tmp_path / "unnamed", tmp_path / "cast", dtype=torch.float32)


@pytest.mark.parametrize("name", ["gguf-q8_0", "gguf-q4_k_m"])
@pytest.mark.parametrize("left", [-1, -100, -5000])
def test_blocks_that_are_cut_off_are_refused(name: str, left: int, tmp_path: Path) -> None:
    FORMS[name].write(tmp_path)
    file = tmp_path / "model.gguf"
    file.write_bytes(file.read_bytes()[:left])

    with pytest.raises(CorruptFileError, match=str(file)):
        offload.from_pretrained(file)
