"""GPTQ and AWQ: each weight is scale x (integer - zero point), for any bits, and parts match the whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import offload
from offload import OffloadedTensor
from offload.checkpoints.forms.formats import unpacked
from offload.errors import CheckpointError
from tests.checkpoints.forms import FORMS

OUTPUTS, INPUTS, SIZE = 48, 96, 32


def _words(values: torch.Tensor, dim: int, bits: int) -> torch.Tensor:
    """Integers packed from the lowest bits of a word."""
    each = 32 // bits
    parts = values.unflatten(dim, (-1, each)).to(torch.int64)
    words = sum(parts.select(dim + 1, place) << (bits * place) for place in range(each))
    return words.to(torch.int32)  # type: ignore[union-attr]


def _opened(folder: Path, pieces: dict[str, torch.Tensor], config: dict[str, Any]) -> OffloadedTensor:
    save_file({f"w.{key}": piece.contiguous() for key, piece in pieces.items()}, folder / "w.safetensors")
    dense = unpacked(offload.load_file(folder / "w.safetensors"), config)
    assert dense is not None
    assert ["w.weight"] == list(dense)
    return dense["w.weight"]


def _gptq(
    folder: Path, bits: int = 4, *, version: str = "gptq", mixed: bool = False, dtype: torch.dtype = torch.float16
) -> tuple[torch.Tensor, OffloadedTensor]:
    """A weight, and the one decoded from its packed file."""
    generator = torch.Generator().manual_seed(bits)
    groups = torch.arange(INPUTS) // SIZE
    if mixed:
        groups = groups[torch.randperm(INPUTS, generator=generator)]
    integers = torch.randint(0, 2**bits, (INPUTS, OUTPUTS), generator=generator)
    zeros = torch.randint(0, 2**bits, (INPUTS // SIZE, OUTPUTS), generator=generator)
    scales = torch.rand(INPUTS // SIZE, OUTPUTS, generator=generator).to(dtype)
    stored = zeros if version == "gptq_v2" else (zeros - 1) % 2**bits
    packed = {"qweight": _words(integers, 0, bits), "qzeros": _words(stored, 1, bits), "scales": scales}
    config = {"quant_method": "gptq", "bits": bits, "group_size": SIZE, "checkpoint_format": version}
    expected = (scales[groups] * (integers - zeros[groups]).to(dtype)).T.contiguous()
    return expected, _opened(folder, {**packed, "g_idx": groups.to(torch.int32)}, config)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("mixed", [False, True])
def test_gptq_of_any_bits_version_and_order(bits: int, version: str, mixed: bool, tmp_path: Path) -> None:
    expected, found = _gptq(tmp_path, bits, version=version, mixed=mixed)

    assert (expected.dtype, expected.stride()) == (found.dtype, found.stride())
    assert torch.equal(expected, found.materialize())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gptq_is_computed_in_the_dtype_of_its_scales(dtype: torch.dtype, tmp_path: Path) -> None:
    expected, found = _gptq(tmp_path, dtype=dtype)

    assert torch.equal(expected, found.materialize())


@pytest.mark.parametrize("size", [70, 50, 36, 64])
def test_awq_whose_groups_do_not_divide_the_inputs_is_refused(size: int, tmp_path: Path) -> None:
    """Whether the last group is the shorter one, nothing says, and no package packs such weights."""
    words = torch.zeros(INPUTS, OUTPUTS // 8, dtype=torch.int32)
    groups = -(-INPUTS // size)
    pieces = {"qweight": words, "qzeros": words[:groups].clone(), "scales": torch.ones(groups, OUTPUTS).half()}

    with pytest.raises(CheckpointError, match=rf"'w.weight' .*{INPUTS} inputs .*groups of {size}"):
        _opened(tmp_path, pieces, {"quant_method": "awq", "bits": 4, "group_size": size, "version": "gemm"})


@pytest.mark.parametrize("method", ["aqlm", "auto-round", "eetq", "hqq", "quanto", "quark", "spqr", "vptq", "modelopt"])
def test_a_form_that_is_not_decoded_is_refused_by_name(method: str, tmp_path: Path) -> None:
    """Before anything is loaded, so that forward does not fail."""
    import json

    FORMS["llama"].write(tmp_path)
    settings = tmp_path / "config.json"
    config = {**json.loads(settings.read_text()), "quantization_config": {"quant_method": method, "bits": 4}}
    settings.write_text(json.dumps(config))

    with pytest.raises(CheckpointError, match=f"packed by '{method}'") as raised:
        offload.from_pretrained(tmp_path)

    assert str(tmp_path) in str(raised.value)


def test_rows_that_share_a_scale_each(tmp_path: Path) -> None:
    """As in FBGEMM."""
    weight, scales = torch.randn(6, 8).to(torch.float8_e4m3fn), torch.rand(6, 1)
    save_file({"w.weight": weight, "w.weight_scale": scales}, tmp_path / "w.safetensors")
    dense = unpacked(offload.load_file(tmp_path / "w.safetensors"), {"quant_method": "fbgemm_fp8"})

    assert dense is not None
    assert torch.equal(weight.float() * scales, dense["w.weight"].materialize())
