"""transformers models that see an image beside their text, on disk: bit-identical to those in memory.

`tests/integrations/test_architectures.py` has models for images alone, and for sound.
"""

from typing import Any

import torch
import transformers as hf
from conftest import contents

import offload
from bench.equality import tensors_in
from tests.equal import assert_equal

TINY = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
PIXELS = torch.linspace(-1, 1, 3 * 32 * 32).reshape(1, 3, 32, 32)


WAYS: tuple[dict[str, Any], ...] = ({}, {"num_beams": 2}, {"do_sample": True})


def test_a_model_that_sees_an_image_has_the_outputs_gradients_and_tokens_of_memory(tmp_path):
    """Including hidden states of every layer; the folder is not written to."""
    inputs = {"input_ids": torch.tensor([[5, 60, 60, 60, 60, 7]]), "pixel_values": PIXELS}
    config = hf.LlavaConfig(
        vision_config=hf.CLIPVisionConfig(**TINY, image_size=32, patch_size=16, projection_dim=32),
        text_config=hf.LlamaConfig(**TINY, num_key_value_heads=2, vocab_size=64, pad_token_id=0),
        image_token_index=60,
        image_seq_length=4,
    )
    torch.manual_seed(0)
    hf.AutoModelForImageTextToText.from_config(config).save_pretrained(tmp_path)
    plain = hf.AutoModelForImageTextToText.from_pretrained(tmp_path)
    before, model = contents(tmp_path), offload.from_pretrained(tmp_path)
    outputs, tokens = [], []
    for one in (plain, model):
        outputs.append(dict(tensors_in(one(**inputs, output_hidden_states=True, return_dict=True))))
        sum(value.square().mean() for value in outputs[-1].values() if value.requires_grad).backward()
        torch.manual_seed(0)
        tokens.append([one.generate(**inputs, max_new_tokens=6, **{"do_sample": False, **way}) for way in WAYS])

    assert type(plain) is model.__class__
    assert_equal(*outputs)
    assert_equal(*({name: value.grad for name, value in one.named_parameters()} for one in (plain, model)))
    assert_equal(*tokens)
    assert before == contents(tmp_path)
