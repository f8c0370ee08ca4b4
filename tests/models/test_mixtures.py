"""Mixtures of experts from disk, with every implementation of experts, and every way of storing them."""

from collections import Counter
from typing import Any

import pytest
import torch

import offload
from offload.checkpoints.forms import fp8
from offload.kernels import native
from tests.checkpoints.forms import FORMS, outcome

WAYS = ("eager", "batched_mm", "grouped_mm")
FAMILIES = ("qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss")  # experts are joined, except in the last
STORED = {
    **{family: FORMS[family] for family in FAMILIES},
    **{f"fp8-{family}": FORMS[f"fp8-{family}"] for family in FAMILIES[:-1]},
    "mxfp4-gpt_oss": FORMS["mxfp4-gpt_oss"],
    "qwen3_moe as float32": FORMS["qwen3_moe-bfloat16-as-float32"],
    "qwen3_moe as bfloat16": FORMS["qwen3_moe-float32-as-bfloat16"],
}


@pytest.fixture(scope="module", params=STORED)
def stored(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    form, folder = STORED[request.param], tmp_path_factory.mktemp("mixture")
    form.write(folder)
    return form.plain(folder), offload.from_pretrained(folder, **form.options)


@pytest.mark.parametrize("way", WAYS)
def test_each_way_of_running_experts_gives_what_it_gives_in_memory(stored, way):
    for model in stored:
        model.set_experts_implementation(way)
    assert [way] * 2 == [model.config._experts_implementation for model in stored]

    expected, found = map(outcome, stored)

    assert torch.equal(expected.logits, found.logits)
    assert torch.equal(expected.tokens, found.tokens)


@pytest.mark.parametrize("way", WAYS)
def test_only_experts_with_tokens_are_decoded(way, tmp_path, monkeypatch):
    """A token uses two of four experts: gate, up and down of each are decoded."""
    FORMS["fp8-qwen3_moe"].write(tmp_path)
    decoded: Counter[int] = Counter()
    decode = fp8.decode

    def counted(weight: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
        decoded[weight.data_ptr()] += 1
        return decode(weight, *rest, **options)

    decode_rows = native.decode

    def counted_rows(matrix: native.Matrix, *rest: Any) -> None:
        decoded[matrix.rows] += 1
        decode_rows(matrix, *rest)

    monkeypatch.setattr(fp8, "decode", counted)
    monkeypatch.setattr(native, "decode", counted_rows)
    model = offload.from_pretrained(tmp_path)
    model.set_experts_implementation(way)
    experts = model.model.layers[0].mlp.experts
    decoded.clear()

    with torch.no_grad():
        experts(torch.ones(1, 128, dtype=torch.bfloat16), torch.tensor([[0, 2]]), torch.tensor([[0.5, 0.5]]))

    assert 6 == len(decoded)
