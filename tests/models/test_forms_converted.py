"""`convert --dequantize`: plain transformers loads the result as it loads the quantized checkpoint dequantized."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import offload
from offload import cli
from offload.errors import CheckpointError
from offload.models.conversion import convert_checkpoint
from tests.conftest import contents
from tests.models.forms import FORMS, loaded, outcome, written

NAMES = [
    "fp8-llama",
    "fp8-qwen3_moe",
    "mxfp4-gpt_oss",
    "ct-w4a16",
    "ct-fp8-channel-qwen3_moe",
    "bnb-nf4",
    "bnb-int8",
    "gptq",
    "awq",
    "gguf-q4_k_m",
    "gguf-q4_k_m-bfloat16",
    "gguf-qwen3_moe",
    "gguf-lfm2-q4_k",
    "gguf-qwen3_5",
]
pytestmark = pytest.mark.filterwarnings("ignore:You passed `quantization_config`:UserWarning")


@pytest.mark.parametrize("name", NAMES)
def test_plain_transformers_loads_what_was_dequantized(name: str, tmp_path: Path, private_place: Path) -> None:
    """Logits and tokens are bit-identical to the dequantized model's; the source is unchanged."""
    form, source, target = FORMS[name], tmp_path / "source", tmp_path / "target"
    source.mkdir()
    form.write(source)
    before, gguf_file = contents(source), form.options.get("gguf_file", "")

    convert_checkpoint(source / gguf_file, target, dtype=form.options.get("dtype"), dequantize=True)

    expected, found = outcome(form.plain(source)), outcome(loaded()(target))
    assert torch.equal(expected.logits, found.logits)
    assert torch.equal(expected.tokens, found.tokens)
    assert "quantization_config" not in json.loads((target / "config.json").read_text())
    assert before == contents(source)
    assert {} == contents(private_place)


def test_what_is_decoded_is_in_the_dtype_that_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    FORMS["fp8-llama"].write(tmp_path / "source")

    words = ["convert", str(tmp_path / "source"), str(tmp_path / "target"), "--dequantize", "--dtype", "fp16"]
    assert 0 == cli.main(words)

    values = load_file(tmp_path / "target" / "model.safetensors")
    assert {torch.float16} == {value.dtype for value in values.values()}
    assert "float16" == json.loads((tmp_path / "target" / "config.json").read_text())["dtype"]


def test_one_file_a_value_holds_the_dense_value(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    FORMS["bnb-nf4"].write(tmp_path / "source")
    plain = FORMS["bnb-nf4"].plain(tmp_path / "source").state_dict()

    convert_checkpoint(tmp_path / "source", tmp_path / "target", to_offload_folder=True, dequantize=True)

    found = offload.load_file(tmp_path / "target")
    assert plain.keys() == found.keys()
    assert all(torch.equal(value, offload.materialize(found[key])) for key, value in plain.items())


@pytest.mark.parametrize(
    ("name", "words"), [(None, "is not quantized"), ("torchao-int8", "for kernels of their own .*torchao")]
)
def test_what_is_not_decoded_is_refused(name: str | None, words: str, tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    (written("llama") if name is None else FORMS[name].write)(source)

    with pytest.raises(CheckpointError, match=words):
        convert_checkpoint(source, target, dequantize=True)

    assert not target.exists()
