"""Every piece of every packed form, in every wrong shape and dtype; every setting, with every wrong value.

Each is refused when the checkpoint is opened, by an error that names the file, and the layer if it is of a piece; or
what is opened is one weight, however it is read, and no op on it fails.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from offload.checkpoints.forms.formats import unpacked
from offload.errors import CheckpointError, OffloadError
from tests.checkpoints.forms import FORMS
from tests.checkpoints.pieces import stored
from tests.fuzz.models import same_in_every_way

PACKED = (
    *("gptq", "gptq-act-order", "awq", "bnb-nf4", "bnb-nf4-double", "bnb-int8"),
    *("fp8-llama", "fp8-small-blocks", "fp8-ue8m0-bytes", "fp8-tensor-static", "mxfp4-gpt_oss"),
    *("ct-w4a16", "ct-w4a16-asym", "ct-w4a16-channel", "ct-w8a16", "ct-w8a8", "ct-fp8-block", "ct-nvfp4a16"),
    *("fp8-fp4-experts", "ct-fp8-channel"),
)
LAYER = "model.layers.1.mlp."
NEEDED = (
    *("qweight", "qzeros", "scales", "_scale_inv", "_scale", "_blocks", "_packed", "_zero_point", "_global_scale"),
    *("absmax", "nested_quant_map", "__nf4", "SCB"),
)  # ends of the names of pieces without which nothing is decoded
DTYPES = (
    *(torch.uint8, torch.int8, torch.int32, torch.int64, torch.bool),
    *(torch.float16, torch.float32, torch.float8_e4m3fn),
)
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 3, 16, 33, 10**30, 0.5, float("inf"), float("nan")),
    *("", "32", "channel", [], [0], [32], [0, 0], [1e308, 2], {}, {"a": 1}),
)

pytestmark = pytest.mark.fused


@pytest.fixture(scope="module", params=PACKED)
def packed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict, dict]:
    """The pieces of a packed weight, and the settings."""
    folder = tmp_path_factory.mktemp(request.param)
    FORMS[request.param].write(folder)
    layer = LAYER + {"mxfp4-gpt_oss": "experts.down_proj", "fp8-fp4-experts": "experts.2.up_proj."}.get(
        request.param, "down_proj."
    )
    pieces = {name: one for name, one in load_file(folder / "model.safetensors").items() if name.startswith(layer)}
    return pieces, json.loads((folder / "config.json").read_text())["quantization_config"]


def changes_of(piece: torch.Tensor) -> Iterator[torch.Tensor]:
    """Other shapes and dtypes, and numbers that may be out of range."""
    flat = piece.flatten().view(torch.uint8) if piece.dim() else piece.reshape(1).view(torch.uint8)
    yield from (piece.view(torch.uint8).to(dtype) for dtype in DTYPES if piece.itemsize == 1 and dtype != piece.dtype)
    if piece.itemsize > 1:
        yield from (piece.to(dtype) for dtype in DTYPES if dtype != piece.dtype)
    yield from (flat.view(dtype) for dtype in DTYPES if len(flat) % dtype.itemsize == 0)
    yield from (piece[None], piece[..., None], piece.reshape(-1), piece.reshape(-1)[:0], piece.reshape(-1)[0].clone())
    for dim, size in enumerate(piece.shape):
        yield from (piece.narrow(dim, 0, size - 1), piece.narrow(dim, 0, size // 2), piece.narrow(dim, 0, 1))
        yield torch.cat([piece, piece.narrow(dim, 0, 1)], dim)
    if piece.dim() > 1:
        yield piece.transpose(0, 1).contiguous()
    yield from (torch.full_like(flat, byte).view(piece.dtype).view(piece.shape) for byte in (0, 1, 127, 128, 255))


SHAPES: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
    lambda piece: piece.reshape(-1)[0].clone(),
    lambda piece: piece.reshape(-1),
    lambda piece: piece.reshape(-1)[:0],
    lambda piece: piece.expand(2, *piece.shape).clone(),
)


def settings_of(given: Any) -> Iterator[tuple[Any, Any]]:
    """Each place in nested settings."""
    for key in given if isinstance(given, dict) else range(len(given)):
        yield given, key
        if isinstance(given[key], dict | list):
            yield from settings_of(given[key])


def is_refused_or_one_weight(
    folder: Path, pieces: Mapping[str, torch.Tensor], settings: Mapping[str, Any], named: str = ""
) -> str:
    """What is wrong with what is opened; nothing, in words, if nothing is.

    Args:
        named: what an error has to name, beside the file.
    """
    try:
        found = unpacked(stored(folder, pieces), settings)
    except OffloadError as error:
        return "" if str(folder) in str(error) and named in str(error) else f"no file or piece is named: {error}"
    except Exception as error:
        return f"at opening: {error!r}"
    try:
        for name, value in (found or {}).items():
            same_in_every_way(name, value)
    except Exception as error:
        return f"after opening: {error!r}"
    return ""


def test_a_piece_of_another_shape_or_dtype_is_refused_or_computed_with(
    packed: tuple[dict, dict], tmp_path: Path
) -> None:
    pieces, settings = packed
    assert "" == is_refused_or_one_weight(tmp_path, pieces, settings)
    wrong = {}
    for name, piece in pieces.items():
        for number, changed in enumerate(changes_of(piece)):
            said = is_refused_or_one_weight(tmp_path, {**pieces, name: changed}, settings, LAYER)
            if said:
                wrong[f"{name} {number}: {piece.dtype} {[*piece.shape]} -> {changed.dtype} {[*changed.shape]}"] = said
    for change in SHAPES:
        said = is_refused_or_one_weight(tmp_path, {name: change(one) for name, one in pieces.items()}, settings, LAYER)
        if said:
            wrong[f"all {change(torch.ones(2, 2)).shape}"] = said

    assert {} == wrong


def test_a_piece_that_is_missing_is_named(packed: tuple[dict, dict], tmp_path: Path) -> None:
    pieces, settings = packed
    needed = [name for name in pieces if name.endswith(NEEDED) and "activation" not in name]

    assert needed
    for name in needed:
        left = stored(tmp_path, {key: one for key, one in pieces.items() if key != name})
        with pytest.raises(CheckpointError, match=rf"'{re.escape(name)}' is missing") as raised:
            unpacked(left, settings)
        assert str(tmp_path) in str(raised.value)


def test_a_setting_of_another_type_or_value_is_refused_or_followed(packed: tuple[dict, dict], tmp_path: Path) -> None:
    pieces, settings = packed
    wrong = {}
    for holder, key in settings_of(settings):
        right = holder[key]
        for value in VALUES:
            holder[key] = value
            said = is_refused_or_one_weight(tmp_path, pieces, settings)
            if said:
                wrong[f"{key}: {right!r} -> {value!r}"] = said
        holder[key] = right

    assert {} == wrong


@pytest.mark.parametrize("field", ["shape", "dtype", "blocksize", "nested_blocksize", "nested_offset", "nested_dtype"])
def test_a_field_of_bitsandbytes_own_text_of_another_value_is_refused_or_followed(field: str, tmp_path: Path) -> None:
    FORMS["bnb-nf4-double"].write(tmp_path)
    layer = "model.layers.1.mlp.down_proj."
    pieces = {name: one for name, one in load_file(tmp_path / "model.safetensors").items() if name.startswith(layer)}
    [name] = [name for name in pieces if "quant_state" in name]
    fields, wrong = json.loads(bytes(pieces[name].tolist())), {}
    for value in (*VALUES, [128, 256, 1], [256, 128], "bfloat16", 64.0):
        text = json.dumps({**fields, field: value}).encode()
        changed = {**pieces, name: torch.tensor(list(text), dtype=torch.uint8)}
        said = is_refused_or_one_weight(tmp_path, changed, {"quant_method": "bitsandbytes", "load_in_4bit": True})
        if said:
            wrong[repr(value)] = said

    assert {} == wrong
