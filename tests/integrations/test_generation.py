"""What users do around generation, with weights on disk: the same as with the model in memory."""

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import aligned, contents
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    GenerationConfig,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    PreTrainedTokenizerFast,
    Wav2Vec2BertConfig,
    pipeline,
)

import offload
from tests.equal import assert_equal
from tests.sizes import SIZES

TIED = {**SIZES, "tie_word_embeddings": True}
CONFIGS = {
    "llama": LlamaConfig(**TIED),
    "llama untied": LlamaConfig(**{**TIED, "tie_word_embeddings": False}),
    "mixtral": MixtralConfig(**TIED, num_local_experts=4, num_experts_per_tok=2),
    "gpt2": GPT2Config(vocab_size=96, n_embd=64, n_layer=2, n_head=4),
}
CASTS = {
    "to(dtype)": lambda model: model.to(torch.float16),
    "half": lambda model: model.half(),
    "bfloat16": lambda model: model.bfloat16(),
    "to(cpu)": lambda model: model.to("cpu"),
}


@pytest.fixture(params=CONFIGS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return saved(CONFIGS[request.param], tmp_path)


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return saved(CONFIGS["llama"], tmp_path)


def saved(config: Any, tmp_path: Path, auto: Any = AutoModelForCausalLM) -> Path:
    torch.manual_seed(0)
    auto.from_config(config).save_pretrained(tmp_path / "checkpoint")
    return aligned(tmp_path / "checkpoint")


def both(folder: Path, **options: Any) -> tuple[Any, Any]:
    return AutoModelForCausalLM.from_pretrained(folder), offload.from_pretrained(folder, **options)


def in_memory(model: Any) -> set[str]:
    return {name for name, parameter in model.named_parameters() if not offload.is_offloaded(parameter)}


def is_tied(model: Any) -> bool:
    """One parameter, and so one file."""
    return model.get_output_embeddings().weight is model.get_input_embeddings().weight


def ways_to_generate(model: Any, other: Any, tokens: torch.Tensor) -> list[Any]:
    """Results of `generate` in several modes; `other` is an assistant."""
    options = {"max_new_tokens": 10, "eos_token_id": None, "pad_token_id": 0}
    ways = [
        (tokens, {"num_beams": 3}),
        (tokens, {"do_sample": True, "top_k": 5}),
        (tokens, {"num_beams": 2, "num_return_sequences": 2, "do_sample": True}),
        (tokens[:1], {"assistant_model": other}),
        (tokens, {"use_cache": False}),
        (tokens, {"attention_mask": torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1] * 7])}),
    ]
    results = []
    for prompt, way in ways:
        torch.manual_seed(0)
        results.append(model.generate(prompt, **{"do_sample": False, **options, **way}))
    return results


def test_every_way_to_generate_gives_the_tokens_of_the_model_in_memory(folder, tokens):
    """Also with buffers on disk."""
    plain, model = both(folder)
    with_buffers = offload.from_pretrained(folder, offload_buffers=True)

    expected = ways_to_generate(plain, plain, tokens)
    for one in (model, with_buffers):
        assert all(map(torch.equal, expected, ways_to_generate(one, one, tokens)))
    with torch.inference_mode():
        assert all(map(torch.equal, expected, ways_to_generate(model, model, tokens)))
    assert all(offload.is_offloaded(buffer) for buffer in with_buffers.buffers())


def test_a_text_generation_pipeline_gives_the_same_text(llama):
    plain, model = both(llama)
    words = {word: place for place, word in enumerate(["<unk>", "<pad>", *(f"w{n}" for n in range(94))])}
    splitter = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    splitter.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=splitter, unk_token="<unk>", pad_token="<pad>")
    tokenizer.padding_side = "left"
    said = []
    for who in (plain, model):
        torch.manual_seed(0)
        write = pipeline("text-generation", model=who, tokenizer=tokenizer, device="cpu")
        said.append(write(["w3 w4 w5", "w8"], batch_size=2, max_new_tokens=8, do_sample=True))

    assert said[0] == said[1]
    assert len(set(said[1][0][0]["generated_text"].split())) > 5
    assert not in_memory(model)


def test_a_generation_config_is_used(llama, tokens):
    settings = GenerationConfig(max_new_tokens=5, num_beams=2, do_sample=False, repetition_penalty=2.0)
    settings.save_pretrained(llama)
    plain, model = both(llama)

    expected = plain.generate(tokens)
    assert 7 + 5 >= expected.shape[1]
    assert torch.equal(expected, model.generate(tokens))
    other = GenerationConfig(max_new_tokens=3, do_sample=False, bad_words_ids=[[int(expected[0, 7])]])
    assert torch.equal(plain.generate(tokens, other), model.generate(tokens, other))


@pytest.mark.parametrize("size", [130, 40], ids=["grow", "shrink"])
@pytest.mark.parametrize("mean_resizing", [True, False])
def test_token_embeddings_are_resized_as_in_memory(folder, size, mean_resizing):
    """They stay on disk, the checkpoint is unchanged, and tied weights stay tied. A separate head becomes a new module,
    which transformers creates in memory."""
    plain, model = both(folder)
    tied, before = is_tied(plain), contents(folder)
    for who in (plain, model):
        torch.manual_seed(0)
        who.resize_token_embeddings(size, mean_resizing=mean_resizing)

    assert (size, size) == (model.config.vocab_size, model.get_input_embeddings().num_embeddings)
    assert_equal(plain, model)
    assert (set() if tied else {"lm_head.weight"}) == in_memory(model)
    assert tied == is_tied(model)
    assert before == contents(folder)
    ids = torch.tensor([[1, 2, 39]])
    assert torch.equal(plain(ids).logits, model(ids).logits)
    assert torch.equal(plain.generate(ids, max_new_tokens=4), model.generate(ids, max_new_tokens=4))


@pytest.mark.parametrize("cast", CASTS.values(), ids=CASTS)
def test_a_model_that_is_cast_or_moved_stays_on_disk(folder, tokens, cast):
    plain, model = both(folder)
    tied, before = is_tied(plain), contents(folder)

    assert cast(model) is model
    cast(plain)

    assert not in_memory(model)
    assert tied == is_tied(model)
    assert_equal(plain, model)
    assert before == contents(folder)
    with torch.no_grad():
        assert torch.equal(plain(tokens).logits, model(tokens).logits)


# Buffers


def test_buffers_are_those_of_the_model_in_memory(tmp_path):
    """A batch norm saves its statistics; the frequencies of rotary positions are computed and not saved."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    config = Wav2Vec2BertConfig(**sizes, feature_projection_input_dim=8, position_embeddings_type="rotary")
    folder = saved(config, tmp_path, AutoModel)
    plain = AutoModel.from_pretrained(folder)

    for on_disk in (False, True):
        model = offload.from_pretrained(folder, model_class=AutoModel, offload_buffers=on_disk)
        expected, got = dict(plain.named_buffers()), dict(model.named_buffers())
        assert expected.keys() == got.keys()
        assert all(torch.equal(expected[name], got[name]) for name in expected)
        assert plain.state_dict().keys() == model.state_dict().keys()
        assert {on_disk} == {offload.is_offloaded(buffer) for buffer in got.values()}
        features = torch.linspace(-1, 1, 48).reshape(1, 6, 8)
        assert torch.equal(plain(features).last_hidden_state, model(features).last_hidden_state)
