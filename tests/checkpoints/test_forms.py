"""Every checkpoint format runs from disk as plain transformers runs it in memory, without writing anything."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from transformers.quantizers import HfQuantizer

import offload
from tests.checkpoints.forms import FORMS, PROMPT, outcome
from tests.checkpoints.pieces import losses_of_an_adapter
from tests.conftest import contents

pytestmark = pytest.mark.filterwarnings("ignore:You passed `quantization_config`:UserWarning")

_SMALL = 1024  # bytes up to which a value may be in memory


@pytest.mark.parametrize("name", FORMS)
def test_a_form_runs_from_disk_as_in_memory_and_writes_nothing(name: str, tmp_path: Path, private_place: Path) -> None:
    """Logits and four tokens are bit-identical; weights are on disk before and after; no folder has a file."""
    form, source, own = FORMS[name], tmp_path / "source", tmp_path / "own"
    source.mkdir()
    own.mkdir()
    form.write(source)
    before, expected = contents(source), outcome(form.plain(source))

    in_own = offload.from_pretrained(source, offload_dir=own, **form.options)
    model = offload.from_pretrained(source, **form.options)
    at_first = [*_in_memory(model), *_in_memory(in_own)]
    found = outcome(model)

    assert torch.equal(expected.logits, found.logits)
    assert torch.equal(expected.tokens, found.tokens)
    assert [] == at_first
    assert [] == _in_memory(model)
    assert {} == contents(private_place)
    assert {} == contents(own)
    assert before == contents(source)


@pytest.mark.parametrize(
    "name",
    [
        "fp8-llama",
        "fp8-qwen3_moe",
        "fp8-deepseek_v3",
        "bnb-nf4",
        "bnb-int8",
        "ct-w4a16",
        "mxfp4-gpt_oss",
        "torchao-int8",
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_dense_values_beside_packed_ones_are_those_of_transformers(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """In a bfloat16 model: some formats keep the stored dtype, others cast it, by transformers' version, too.

    A requested dtype applies to all.
    """
    form, file = FORMS[name], tmp_path / "model.safetensors"
    form.write(tmp_path)
    with safe_open(file, "pt") as opened:
        metadata = opened.metadata()
    values = load_file(file)
    for key, value in values.items():
        if value.dtype == torch.bfloat16 and (
            "norm" in key or "lm_head" in key or key.endswith(("bias", ".gate.weight"))
        ):
            values[key] = (value.float() * 1.0009).to(dtype)
    save_file(values, file, metadata)

    expected, found = form.plain(tmp_path).state_dict(), offload.from_pretrained(tmp_path).state_dict()
    asked = offload.from_pretrained(tmp_path, dtype=torch.bfloat16)

    assert {key: value.dtype for key, value in expected.items()} == {key: value.dtype for key, value in found.items()}
    plain = [key for key, value in expected.items() if type(value) is torch.Tensor and value.is_floating_point()]
    assert "model.norm.weight" in plain
    assert [] == [key for key in plain if not torch.equal(expected[key], offload.materialize(found[key]))]
    assert torch.bfloat16 == asked.model.norm.weight.dtype == asked.lm_head.weight.dtype


def test_dense_values_beside_packed_ones_are_cast_where_transformers_casts_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it does before 5.21."""
    FORMS["bnb-nf4"].write(tmp_path)
    file = tmp_path / "model.safetensors"
    values = load_file(file)
    save_file({**values, "lm_head.weight": values["lm_head.weight"].float()}, file, {"format": "pt"})
    monkeypatch.delattr(HfQuantizer, "get_new_dtype", raising=False)

    assert torch.bfloat16 == offload.from_pretrained(tmp_path).lm_head.weight.dtype


@pytest.mark.parametrize("name", ["fp8-llama", "fp8-qwen3_moe", "bnb-nf4", "gguf-q4_k_m"])
def test_an_adapter_trains_over_a_form_as_over_the_dequantized_model(
    name: str, tmp_path: Path, private_place: Path
) -> None:
    """The losses of three steps are bit-identical; the weights stay on disk, unchanged."""
    form = FORMS[name]
    form.write(tmp_path)
    before = contents(tmp_path)
    model = offload.from_pretrained(tmp_path, **form.options)

    expected, found = (losses_of_an_adapter(one, PROMPT) for one in (form.plain(tmp_path), model))

    assert expected == found
    assert 3 == len(set(found))
    frozen = {key: value for key, value in model.named_parameters() if not value.requires_grad}
    assert [] == [key for key, value in frozen.items() if not offload.is_offloaded(value) and value.nbytes > _SMALL]
    assert {} == contents(private_place)
    assert before == contents(tmp_path)


def _in_memory(model: nn.Module) -> list[str]:
    """Parameters and buffers in memory, except small ones."""
    named = (*model.named_parameters(), *model.named_buffers())
    return [name for name, value in named if not offload.is_offloaded(value) and value.nbytes > _SMALL]
