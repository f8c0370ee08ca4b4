"""Integers whose groups do not fit, and forms that are not decoded, are refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import offload
from offload.checkpoints.forms.formats import unpacked
from offload.errors import CheckpointError
from tests.checkpoints.forms import FORMS
from tests.checkpoints.pieces import stored

OUTPUTS, INPUTS = 48, 96


@pytest.mark.parametrize("size", [70, 50, 36, 64])
def test_awq_whose_groups_do_not_divide_the_inputs_is_refused(size: int, tmp_path: Path) -> None:
    """Whether the last group is the shorter one, nothing says, and no package packs such weights."""
    words = torch.zeros(INPUTS, OUTPUTS // 8, dtype=torch.int32)
    groups = -(-INPUTS // size)
    pieces = {"w.qweight": words, "w.qzeros": words[:groups].clone(), "w.scales": torch.ones(groups, OUTPUTS).half()}
    config = {"quant_method": "awq", "bits": 4, "group_size": size, "version": "gemm"}

    with pytest.raises(CheckpointError, match=rf"'w.weight' .*{INPUTS} inputs .*groups of {size}"):
        unpacked(stored(tmp_path, pieces), config)


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
