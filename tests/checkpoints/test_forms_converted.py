"""`convert --dequantize`: plain transformers loads the result as it loads the quantized checkpoint dequantized."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from offload import cli
from offload.checkpoints.conversion import convert_checkpoint
from offload.errors import CheckpointError
from tests.checkpoints.forms import FORMS, written
from tests.checkpoints.gguf_files import write_gguf

pytestmark = pytest.mark.filterwarnings("ignore:You passed `quantization_config`:UserWarning")


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_dequantized_gguf_file_is_all_of_a_model(dtype: torch.dtype | None, tmp_path: Path) -> None:
    """Its class, the dtype of its weights, its settings for generation, and its tokenizer with the chat template."""
    from transformers import AutoTokenizer, LlamaForCausalLM

    file = chat_gguf(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path, gguf_file=file.name)
    chat = [{"role": "user", "content": "!! #"}]

    convert_checkpoint(file, tmp_path / "target", dtype=dtype, dequantize=True)

    config = json.loads((tmp_path / "target" / "config.json").read_text())
    assert (["LlamaForCausalLM"], str(dtype or torch.float32)) == (config["architectures"], f"torch.{config['dtype']}")
    assert {dtype or torch.float32} == {
        value.dtype for value in LlamaForCausalLM.from_pretrained(tmp_path / "target").parameters()
    }
    assert (tmp_path / "target" / "generation_config.json").is_file()
    again = AutoTokenizer.from_pretrained(tmp_path / "target")
    assert CHAT == again.chat_template
    assert tokenizer.apply_chat_template(chat) == again.apply_chat_template(chat)


CHAT = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }} {% endfor %}"


def chat_gguf(folder: Path) -> Path:
    """The GGUF file of a tiny Llama with a tokenizer and a chat template."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=96))
    return write_gguf(model, folder / "model.gguf", "Q8_0", chat_template=CHAT)


def test_decoded_values_have_the_requested_dtype(tmp_path: Path) -> None:
    FORMS["fp8-llama"].write(tmp_path / "source")

    words = ["convert", str(tmp_path / "source"), str(tmp_path / "target"), "--dequantize", "--dtype", "fp16"]
    assert 0 == cli.main(words)

    values = load_file(tmp_path / "target" / "model.safetensors")
    assert {torch.float16} == {value.dtype for value in values.values()}
    assert "float16" == json.loads((tmp_path / "target" / "config.json").read_text())["dtype"]


@pytest.mark.parametrize(
    ("name", "words"), [(None, "is not quantized"), ("torchao-int8", "packed for special kernels .*torchao")]
)
def test_checkpoints_that_are_dense_or_cannot_be_decoded_are_refused(
    name: str | None, words: str, tmp_path: Path
) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    (written("llama") if name is None else FORMS[name].write)(source)

    with pytest.raises(CheckpointError, match=words):
        convert_checkpoint(source, target, dequantize=True)

    assert not target.exists()
