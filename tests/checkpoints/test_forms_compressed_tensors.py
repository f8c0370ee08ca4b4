"""compressed-tensors: weights are bit-identical to its own compressors'; inconsistent pieces are refused."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import offload
from offload.checkpoints.forms.formats import unpacked
from offload.errors import CheckpointError
from tests.checkpoints.pieces import bits_of, random_bytes, random_scales, stored

Pieces = dict[str, torch.Tensor]

ROWS, COLUMNS = 44, 96  # the rows don't fill whole words of zero points


def config_of(form: str | None, weights: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"type": "int", "symmetric": True, **weights}, "format": None}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}, **more}


def by_package(pieces: Pieces, config: Mapping[str, Any]) -> torch.Tensor:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    scheme = QuantizationScheme.model_validate(config["config_groups"]["group_0"])
    return BaseCompressor.get_value_from_registry(config["format"]).decompress(dict(pieces), scheme)["weight"]


def dense_of(folder: Path, pieces: Pieces, config: Mapping[str, Any], layer: str = "layer") -> Any:
    found = unpacked(stored(folder, {f"{layer}.{name}": piece for name, piece in pieces.items()}), config)
    return found[f"{layer}.weight"]


def scale_shape(strategy: str, size: int | None, rows: int, columns: int) -> tuple[int, ...]:
    return {"tensor": (1,), "channel": (rows, 1)}.get(strategy) or (rows, columns // (size or 1))


def words(bits: int, strategy: str, dtype: torch.dtype, *, symmetric: bool, columns: int = COLUMNS) -> tuple[Any, Any]:
    """Random pieces in the format pack-quantized, and their configuration."""
    size = 32 if strategy == "group" else None
    scales = scale_shape(strategy, size, ROWS, columns)
    pieces = {
        "weight_packed": random_bytes(ROWS, -(-columns * bits // 32), dtype=torch.int32),
        "weight_scale": random_scales(*scales, dtype=dtype),
        "weight_shape": torch.tensor([ROWS, columns]),
    }
    if not symmetric:
        pieces["weight_zero_point"] = random_bytes(-(-ROWS * bits // 32), scales[-1], dtype=torch.int32, seed=2)
    weights = {"num_bits": bits, "strategy": strategy, "group_size": size, "symmetric": symmetric}
    return pieces, config_of("pack-quantized", weights)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("strategy", ["channel", "group"])
@pytest.mark.parametrize("bits", range(1, 9))
def test_packed_integers_are_what_the_package_makes_of_them(
    bits: int, strategy: str, symmetric: bool, dtype: torch.dtype, tmp_path: Path
) -> None:
    """All widths, including those where numbers cross word boundaries."""
    pieces, config = words(bits, strategy, dtype, symmetric=symmetric)
    expected = by_package(pieces, config)

    found = dense_of(tmp_path, pieces, config)

    assert (expected.dtype, expected.shape) == (found.dtype, found.shape)
    assert torch.equal(bits_of(expected), bits_of(offload.materialize(found)))
    for cut in (slice(3, 7), slice(31, 33), slice(40, 44)):
        assert torch.equal(bits_of(expected[cut]), bits_of(offload.materialize(found[cut])))


@pytest.mark.parametrize("bits", [3, 4, 8])
def test_columns_need_not_fill_the_last_word(bits: int, tmp_path: Path) -> None:
    """With a scale per row; a piece gives the shape."""
    pieces, config = words(bits, "channel", torch.bfloat16, symmetric=True, columns=50)

    found = dense_of(tmp_path, pieces, config)

    assert (ROWS, 50) == found.shape
    assert torch.equal(bits_of(by_package(pieces, config)), bits_of(offload.materialize(found)))


def of_bytes(form: str, dtype: torch.dtype, strategy: str, scale_dtype: torch.dtype, **more: Any) -> tuple[Any, Any]:
    """Pieces of a one-byte format, and their configuration."""
    size, block = more.pop("group_size", None), more.pop("block_structure", None)
    shape = scale_shape(strategy, size, ROWS, COLUMNS)
    if block is not None:
        shape = (-(-ROWS // block[0]), -(-COLUMNS // block[1]))
    scales = random_bytes(*shape) % 40 + 100 if scale_dtype == torch.uint8 else random_scales(*shape, dtype=scale_dtype)
    pieces = {"weight": random_bytes(ROWS, COLUMNS, dtype=dtype), "weight_scale": scales}
    kind = "float" if dtype.is_floating_point else "int"
    weights = {"num_bits": 8, "type": kind, "strategy": strategy, "group_size": size, "block_structure": block}
    return pieces, config_of(form, {**weights, **more})


E4M3 = torch.float8_e4m3fn
OF_BYTES: dict[str, Callable[[], tuple[Pieces, dict[str, Any]]]] = {
    "int-channel": lambda: of_bytes("int-quantized", torch.int8, "channel", torch.bfloat16),
    "int-tensor-half": lambda: of_bytes("int-quantized", torch.int8, "tensor", torch.float16),
    "int-group": lambda: of_bytes("naive-quantized", torch.int8, "group", torch.bfloat16, group_size=32),
    "float-channel": lambda: of_bytes("float-quantized", E4M3, "channel", torch.bfloat16),
    "float-channel-single": lambda: of_bytes("float-quantized", E4M3, "channel", torch.float32),
    "float-tensor": lambda: of_bytes("float-quantized", E4M3, "tensor", torch.bfloat16),
    "float-block": lambda: of_bytes("float-quantized", E4M3, "block", torch.bfloat16, block_structure=[4, 32]),
    "float-part-block": lambda: of_bytes("float-quantized", E4M3, "block", torch.float32, block_structure=[32, 64]),
    "mxfp8": lambda: of_bytes("mxfp8-quantized", E4M3, "group", torch.uint8, group_size=32),
}


@pytest.mark.parametrize("name", OF_BYTES)
def test_numbers_of_a_byte_are_what_the_package_makes_of_them(name: str, tmp_path: Path) -> None:
    """All bytes, including NaNs."""
    pieces, config = OF_BYTES[name]()
    expected = by_package(pieces, config)

    found = dense_of(tmp_path, pieces, config)

    assert (expected.dtype, expected.shape) == (found.dtype, found.shape)
    assert torch.equal(bits_of(expected), bits_of(offload.materialize(found)))
    assert torch.equal(bits_of(expected[30:41]), bits_of(offload.materialize(found[30:41])))


@pytest.mark.parametrize("dtype", [torch.int8, E4M3])
def test_zero_points_of_bytes_are_taken_away_first(dtype: torch.dtype, tmp_path: Path) -> None:
    """In the dtype of the scale: differences of 8-bit floats are rounded to it."""
    form = "float-quantized" if dtype == E4M3 else "int-quantized"
    pieces, config = of_bytes(form, dtype, "channel", torch.bfloat16, symmetric=False)
    pieces["weight_zero_point"] = (random_bytes(ROWS, 1) % 100).view(dtype)

    found = dense_of(tmp_path, pieces, config)

    assert torch.equal(bits_of(by_package(pieces, config)), bits_of(offload.materialize(found)))


@pytest.mark.parametrize("form", ["nvfp4-pack-quantized", "mxfp4-pack-quantized"])
@pytest.mark.parametrize("whole", [(1,), ()])
def test_halves_of_bytes_are_what_the_package_makes_of_them(form: str, whole: tuple[int, ...], tmp_path: Path) -> None:
    """A 0-d global scale leaves the scales in bfloat16, by torch's type promotion."""
    pieces = {"weight_packed": random_bytes(ROWS, COLUMNS // 2)}
    if form == "nvfp4-pack-quantized":
        size, strategy = 16, "tensor_group"
        pieces["weight_scale"] = (random_bytes(ROWS, COLUMNS // 16, seed=3) % 0x7F).view(E4M3)
        pieces["weight_global_scale"] = torch.full(whole, 777.7)
    else:
        size, strategy = 32, "group"
        pieces["weight_scale"] = random_bytes(ROWS, COLUMNS // 32, seed=3) % 40 + 100
    config = config_of(form, {"num_bits": 4, "type": "float", "strategy": strategy, "group_size": size})
    expected = by_package(pieces, config)

    found = dense_of(tmp_path, pieces, config)

    assert torch.bfloat16 == found.dtype == expected.dtype
    assert torch.equal(bits_of(expected), bits_of(offload.materialize(found)))
    assert torch.equal(bits_of(expected[5:9]), bits_of(offload.materialize(found[5:9])))


def test_a_decoded_weight_goes_through_pickle(tmp_path: Path) -> None:
    """By reference to its pieces."""
    pieces, config = words(4, "group", torch.bfloat16, symmetric=False)
    found = dense_of(tmp_path, pieces, config)

    again = pickle.loads(pickle.dumps(found))

    assert torch.equal(offload.materialize(found), offload.materialize(again))


@pytest.mark.parametrize(
    ("layer", "targets", "bits"),
    [
        ("model.layers.0.mlp.down_proj", [["re:.*down_proj"], ["Linear"]], 8),
        ("model.layers.0.mlp.up_proj", [["re:.*down_proj"], ["Linear"]], 4),
        ("model.layers.0.mlp.up_proj", [["Linear"], ["re:.*up_proj$"]], 4),
        ("model.layers.0.mlp.up_proj", [["Linear"], ["model.layers.0.mlp.up_proj"]], 4),
        ("model.layers.0.mlp.experts.1.up_proj", [["re:.*self_attn.*"], ["re:.*experts.*"]], 4),
        ("layers.0.mlp.up_proj", [["re:model.layers.*"], ["re:model.visual.*"]], 8),
    ],
)
def test_a_layer_is_of_the_group_that_names_it_most_closely(
    layer: str, targets: list[list[str]], bits: int, tmp_path: Path
) -> None:
    """A name takes precedence over an expression, and that over a class; the model's prefix may be left out."""
    pieces, config = words(bits, "group", torch.bfloat16, symmetric=True)
    expected = by_package(pieces, config)
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
    pieces, config = words(4, "group", torch.bfloat16, symmetric=True)
    others = {"norm.weight": torch.ones(4), "lm_head.weight": torch.ones(4, 4), "layer.bias": torch.ones(ROWS)}
    noted = {"layer.input_scale": torch.ones(1), "layer.input_global_scale": torch.ones(1)}
    layer = {f"layer.{name}": piece for name, piece in pieces.items()}

    found = unpacked(stored(tmp_path, {**layer, **others, **noted}), config)

    assert {"layer.weight", *others} == set(found)


def test_a_scale_for_each_row_of_experts_is_multiplied_in_float32(tmp_path: Path) -> None:
    """As in transformers, which rounds a dense layer's in the dtype of the scale."""
    pieces, config = of_bytes("float-quantized", E4M3, "channel", torch.bfloat16)

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
    pieces, config = words(4, "group", torch.bfloat16, symmetric=False)

    with pytest.raises(CheckpointError, match=r"layer\.weight_g_idx.*actorder"):
        dense_of(tmp_path, {**pieces, "weight_g_idx": torch.arange(COLUMNS)}, config)
