"""The tiny checkpoints of every format: plain transformers loads them, always with the same results."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.checkpoints.forms import FORMS, PROMPT, loaded, model_of, outcome
from tests.checkpoints.gguf_files import write_gguf

pytestmark = pytest.mark.filterwarnings("ignore:You passed `quantization_config`:UserWarning")

GGUF = {"gguf_file": "model.gguf"}


@pytest.mark.parametrize("name", FORMS)
def test_plain_transformers_says_the_same_at_each_loading(name: str, tmp_path: Path) -> None:
    """Logits are finite, of normal size, and bit-identical after loading again; so are four tokens."""
    FORMS[name].write(tmp_path)
    once, again = (outcome(FORMS[name].plain(tmp_path)) for _ in range(2))

    assert once.logits.isfinite().all()
    assert 0.1 < once.logits.float().std() < 10
    assert torch.equal(once.logits, again.logits)
    assert torch.equal(once.tokens, again.tokens)
    assert once.tokens.shape == (1, PROMPT.shape[1] + 4)


@pytest.mark.parametrize("name", [name for name, form in FORMS.items() if form.run])
def test_the_default_is_close_to_the_dequantized_model(name: str, tmp_path: Path) -> None:
    """With other kernels, or quantized activations, and therefore different bits."""
    FORMS[name].write(tmp_path)
    run = FORMS[name].run
    assert run is not None

    difference = outcome(run(tmp_path)).logits.float() - outcome(FORMS[name].plain(tmp_path)).logits.float()

    assert difference.abs().mean() < 0.1


@pytest.mark.parametrize(
    "name", ["fp8-deepseek_v3", "fp8-part-block", "gptq-act-order", "awq", "ct-nvfp4a16-qwen3_moe"]
)
def test_a_checkpoint_that_we_decode_or_that_publishers_share_holds_the_model(name: str, tmp_path: Path) -> None:
    """Each weight is as close to the original as its bits allow."""
    FORMS[name].write(tmp_path)
    found = FORMS[name].plain(tmp_path)
    sizes = {"intermediate_size": 320} if name == "fp8-part-block" else {}
    written = model_of(found.config.model_type, found.dtype, **sizes).state_dict()

    for key, value in found.state_dict().items():
        expected = written[key].float()
        assert (value.float() - expected).square().sum() <= 0.015 * expected.square().sum(), key


@pytest.mark.parametrize(
    ("model_type", "sizes"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True}),
        ("qwen2", {}),
        ("qwen3", {"head_dim": 128}),
        ("qwen3_moe", {"moe_intermediate_size": 768}),
        ("lfm2", {}),
        ("qwen3_5_text", {}),
    ],
)
def test_a_gguf_file_of_floats_holds_the_model(model_type: str, sizes: dict[str, object], tmp_path: Path) -> None:
    """transformers undoes what the writer did: names, row order, norms plus one."""
    written = model_of(model_type, torch.float32, **sizes)
    write_gguf(written, tmp_path / "model.gguf", "F32")

    found = loaded(**GGUF)(tmp_path).state_dict()

    assert set(written.state_dict()) == set(found)
    for key, value in written.state_dict().items():
        torch.testing.assert_close(found[key], value, atol=2e-7, rtol=0, msg=key)


def test_a_gguf_file_has_a_tokenizer(tmp_path: Path) -> None:
    """Its last tokens are merges of two."""
    from transformers import AutoTokenizer

    write_gguf(model_of("llama"), tmp_path / "model.gguf", "F32")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path, **GGUF)

    assert tokenizer("a!#")["input_ids"] == [64, 95]
