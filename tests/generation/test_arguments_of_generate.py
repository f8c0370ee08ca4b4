"""`model.generate` takes what transformers' does, by position, too."""

from __future__ import annotations

import pytest
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

import offload
from offload.generation.features import _context

SIZES = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4}


@pytest.fixture
def models(tmp_path):
    torch.manual_seed(0)
    plain = LlamaForCausalLM(LlamaConfig(**SIZES, eos_token_id=None)).eval()
    plain.save_pretrained(tmp_path)
    return plain, offload.from_pretrained(tmp_path)


def test_settings_may_be_given_by_position(models):
    settings = GenerationConfig(max_new_tokens=4, do_sample=False, pad_token_id=0)

    answers = [model.generate(torch.tensor([[1, 2, 3]]), settings) for model in models]

    assert (1, 7) == answers[0].shape
    assert torch.equal(*answers)


@pytest.mark.parametrize(
    ("given", "options", "tokens"),
    [
        ((), {}, None),
        ((GenerationConfig(max_new_tokens=4),), {}, 2 * 7),
        ((None, None), {"max_new_tokens": 5}, 2 * 8),
        ((), {"max_new_tokens": 5, "num_beams": 3}, 2 * 3 * 8),
        ((GenerationConfig(max_new_tokens=4, num_return_sequences=2, do_sample=True),), {"num_beams": 4}, 2 * 4 * 7),
    ],
)
def test_keys_and_values_are_counted_as_generate_makes_them(models, given, options, tokens):
    assert tokens == _context(models[1], torch.ones(2, 3, dtype=torch.long), *given, **options)
