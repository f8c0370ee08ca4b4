"""compressed-tensors: which group a layer is of, and what is beside its weight. `test_forms_parts` has the numbers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import offload
from offload.checkpoints.forms.formats import unpacked
from offload.errors import CheckpointError
from offload.storage.layout import contiguous
from offload.tensor.recipes import Joined, Piece
from offload.tensor.views import handle_of
from tests.checkpoints.pieces import bits_of, random_bytes, random_scales, stored

Pieces = dict[str, torch.Tensor]

ROWS, COLUMNS = 44, 96


def config_of(form: str | None, weights: Mapping[str, Any]) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"type": "int", "symmetric": True, **weights}, "format": None}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}


def words(bits: int = 4) -> tuple[Pieces, dict[str, Any]]:
    """Random pieces in the format pack-quantized, and their configuration."""
    pieces = {
        "weight_packed": random_bytes(ROWS, COLUMNS * bits // 32, dtype=torch.int32),
        "weight_scale": random_scales(ROWS, COLUMNS // 32, dtype=torch.bfloat16),
    }
    return pieces, config_of("pack-quantized", {"num_bits": bits, "strategy": "group", "group_size": 32})


def dense_of(folder: Path, pieces: Pieces, config: Mapping[str, Any], layer: str = "layer") -> Any:
    found = unpacked(stored(folder, {f"{layer}.{name}": piece for name, piece in pieces.items()}), config)
    return found[f"{layer}.weight"]


@pytest.mark.parametrize(
    ("layer", "targets", "bits"),
    [
        ("model.layers.0.mlp.down_proj", [["re:.*down_proj"], ["Linear"]], 8),
        ("model.layers.0.mlp.up_proj", [["re:.*down_proj"], ["Linear"]], 4),
        ("model.layers.0.mlp.up_proj", [["Linear"], ["re:.*up_proj$"]], 4),
        ("model.layers.0.mlp.up_proj", [["Linear"], ["model.layers.0.mlp.up_proj"]], 4),
        ("model.layers.0.mlp.up_proj", [["re:.*up_proj"], ["model.layers.0.mlp.up_proj"]], 4),
        ("model.layers.0.mlp.experts.1.up_proj", [["re:.*self_attn.*"], ["re:.*experts.*"]], 4),
        ("layers.0.mlp.up_proj", [["re:model.layers.*"], ["re:model.visual.*"]], 8),
    ],
)
def test_a_layer_is_of_the_group_that_names_it_most_closely(
    layer: str, targets: list[list[str]], bits: int, tmp_path: Path
) -> None:
    """A name takes precedence over an expression, and that over a class; the model's prefix may be left out."""
    pieces, config = words(bits)
    expected = dense_of(tmp_path, pieces, config).materialize()
    groups = [
        config_of(None, {"num_bits": n, "strategy": "group", "group_size": 32})["config_groups"]["group_0"]
        for n in (8, 4)
    ]
    config["config_groups"] = {
        str(number): {**group, "targets": named, "format": "pack-quantized"}
        for number, (group, named) in enumerate(zip(groups, targets, strict=True))
    }

    found = dense_of(tmp_path, pieces, {**config, "format": "mixed-precision"}, layer)

    assert torch.equal(expected, offload.materialize(found))


def test_dense_values_beside_packed_ones_are_not_changed(tmp_path: Path) -> None:
    """A norm, a bias, a weight that the configuration ignores; scales of activations or of a cache are not weights."""
    pieces, config = words()
    others = {"norm.weight": torch.ones(4), "lm_head.weight": torch.ones(4, 4), "layer.bias": torch.ones(ROWS)}
    noted = {"layer.input_scale": torch.ones(1), "layer.input_global_scale": torch.ones(1)}
    layer = {f"layer.{name}": piece for name, piece in pieces.items()}

    found = unpacked(stored(tmp_path, {**layer, **others, **noted}), config)

    assert {"layer.weight", *others} == set(found)


def test_a_scale_for_each_row_of_experts_is_multiplied_in_float32(tmp_path: Path) -> None:
    """As in transformers, which rounds a dense layer's in the dtype of the scale."""
    pieces = {
        "weight": random_bytes(ROWS, COLUMNS, dtype=torch.float8_e4m3fn),
        "weight_scale": random_scales(ROWS, 1, dtype=torch.bfloat16),
    }
    config = config_of("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"})

    found = dense_of(tmp_path, pieces, config, "model.layers.0.mlp.experts.11.up_proj")

    assert torch.float32 == found.dtype
    expected = pieces["weight"].float() * pieces["weight_scale"].float()
    assert torch.equal(bits_of(expected), bits_of(offload.materialize(found)))


def test_bytes_beside_a_global_scale_are_refused(tmp_path: Path) -> None:
    """Bytes are exponents in mxfp4-pack-quantized only."""
    pieces = {"weight_packed": random_bytes(4, 16), "weight_scale": random_bytes(4, 2)}
    pieces["weight_global_scale"] = torch.ones(1)
    weights = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}

    with pytest.raises(CheckpointError, match="weight_scale"):
        dense_of(tmp_path, pieces, config_of("nvfp4-pack-quantized", weights))


def test_columns_in_another_order_are_refused(tmp_path: Path) -> None:
    pieces, config = words()

    with pytest.raises(CheckpointError, match=r"layer\.weight_g_idx.*actorder"):
        dense_of(tmp_path, {**pieces, "weight_g_idx": torch.arange(COLUMNS)}, config)


def test_a_weight_is_rounded_to_its_own_dtype_before_another_one(tmp_path: Path) -> None:
    """A float32 model sees the rounding of a bfloat16 scale's products."""
    weight = dense_of(tmp_path, *words())

    in_float32 = Joined(contiguous(torch.float32, (ROWS, COLUMNS)), [Piece(handle_of(weight))], [(0, 0)]).value()

    assert torch.bfloat16 == weight.dtype
    assert torch.equal(weight.materialize().to(torch.float32), in_float32)
