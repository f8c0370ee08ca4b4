"""A checkpoint in FP8 or GGUF that does not fit itself is refused when it is loaded: tensor and file are named."""

from __future__ import annotations

import itertools
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
from offload.checkpoints.forms.decoding import unpacked
from offload.errors import CheckpointError, CorruptFileError
from tests.checkpoints.forms import FORMS

Change = Callable[[dict[str, torch.Tensor], dict[str, Any]], object]
LAYER = "model.layers.1.self_attn.q_proj.weight"
EXPERT = "model.layers.1.mlp.experts.2.up_proj.weight"
PACKED = (
    *("fp8-llama", "fp8-fp4-experts", "fp8-tensor-static", "mxfp4-gpt_oss", "bnb-nf4", "bnb-int8", "gptq", "awq"),
    *("ct-w4a16", "ct-w8a8", "ct-fp8-channel", "ct-fp8-block", "ct-nvfp4a16"),
)


def cut(change: Callable[[torch.Tensor], torch.Tensor], name: str = "_scale_inv") -> Callable[[str], Change]:
    return lambda layer: lambda values, _: values.update({f"{layer}{name}": change(values[f"{layer}{name}"])})


BAD: dict[str, tuple[Callable[[str], Change], str]] = {
    "no scales": (lambda layer: lambda values, _: values.pop(f"{layer}_scale_inv"), "is missing"),
    "more rows of scales": (cut(lambda scale: torch.cat([scale, scale])), "do not cover it"),
    "more columns of scales": (cut(lambda scale: torch.cat([scale, scale], 1)), "do not cover it"),
    "a stack of scales": (cut(lambda scale: scale.expand(2, -1, -1).clone()), "do not cover it"),
}


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize(("form", "layer"), [("fp8-llama", LAYER), ("fp8-qwen3_moe", EXPERT)])
def test_fp8_that_does_not_fit_is_refused(bad: str, form: str, layer: str, tmp_path: Path) -> None:
    FORMS[form].write(tmp_path)
    file, settings = tmp_path / "model.safetensors", tmp_path / "config.json"
    values, config = load_file(file), json.loads(settings.read_text())
    spoil, words = BAD[bad]
    spoil(layer)(values, config["quantization_config"])
    save_file(values, file, {"format": "pt"})
    settings.write_text(json.dumps(config))

    with pytest.raises(CheckpointError, match=words) as raised:
        offload.from_pretrained(tmp_path)

    assert str(file) in str(raised.value)
    assert layer in str(raised.value)


def test_a_configuration_that_says_other_blocks_is_refused(tmp_path: Path) -> None:
    FORMS["fp8-llama"].write(tmp_path)
    settings = tmp_path / "config.json"
    config = json.loads(settings.read_text())
    config["quantization_config"]["weight_block_size"] = [64, 64]
    settings.write_text(json.dumps(config))

    with pytest.raises(CheckpointError, match=r"_proj.weight' in .*model\.safetensors .* do not cover it"):
        offload.from_pretrained(tmp_path)


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

    with pytest.raises(CheckpointError, match=r"_proj\.weight' in .*do not cover it") as raised:
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


def test_a_packed_number_is_refused(tmp_path: Path) -> None:
    def change(values: dict[str, torch.Tensor], _: dict[str, Any]) -> None:
        values[LAYER], values[f"{LAYER}_scale_inv"] = values[LAYER][0, 0].clone(), torch.tensor(1.0)

    file = written_with(tmp_path, None, change)

    with pytest.raises(CheckpointError, match="do not cover it") as raised:
        offload.from_pretrained(tmp_path)

    assert str(file) in str(raised.value)


SHAPES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "a scalar": lambda piece: piece.flatten()[0],
    "a vector": lambda piece: piece.flatten(),
    "no numbers": lambda piece: piece.flatten()[:0],
    "no rows": lambda piece: piece[:0] if piece.dim() else piece,
    "a stack": lambda piece: piece.expand(2, *piece.shape),
    "a column": lambda piece: piece[..., :1] if piece.dim() else piece,
}


@pytest.mark.parametrize("form", PACKED)
def test_pieces_of_any_shape_and_dtype_give_a_weight_or_an_error_that_names_it(form: str, tmp_path: Path) -> None:
    """Each piece of a layer alone, and all of them together."""
    FORMS[form].write(tmp_path)
    file = tmp_path / "model.safetensors"
    values, config = load_file(file), json.loads((tmp_path / "config.json").read_text())
    layer = {"fp8-fp4-experts": EXPERT, "mxfp4-gpt_oss": "model.layers.1.mlp.experts.down_proj_"}.get(form, LAYER)
    layer = layer.removesuffix("weight")
    pieces = {name: value for name, value in values.items() if name.startswith(layer)}
    refused: list[str] = []
    for change, dtype in itertools.product(SHAPES.values(), (None, torch.int8, torch.uint8, torch.int32, torch.float)):
        for names in [*([name] for name in pieces), list(pieces)]:
            new = {name: change(pieces[name]).clone() for name in names}
            new = {
                name: value if dtype is None else torch.zeros_like(value, dtype=dtype) for name, value in new.items()
            }
            save_file({**pieces, **new}, file, {"format": "pt"})
            try:
                unpacked(offload.load_file(file), config["quantization_config"])
            except CheckpointError as error:
                refused.append(str(error))

    assert len(refused) > len(pieces)
    assert [] == [error for error in refused if layer not in error]


def test_experts_of_4_bits_with_other_blocks_are_refused(tmp_path: Path) -> None:
    """A scale per row."""
    name = f"{EXPERT}_scale_inv"

    def change(values: dict[str, torch.Tensor], _: dict[str, Any]) -> None:
        values[name] = values[name].view(torch.uint8)[:, :1].clone().view(values[name].dtype)

    file = written_with(tmp_path, [128, 128], change, "fp8-fp4-experts")

    with pytest.raises(CheckpointError, match=r"in blocks of \[1, 32\], they do not cover it") as raised:
        offload.from_pretrained(tmp_path)

    assert str(file) in str(raised.value)
    assert EXPERT in str(raised.value)


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
