"""What users do around generation, with weights on disk: the same as with the model in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import aligned, contents
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    BertConfig,
    GenerationConfig,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    PreTrainedTokenizerFast,
    Wav2Vec2BertConfig,
    pipeline,
)

import offload
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
    """The model in memory, and on disk."""
    return AutoModelForCausalLM.from_pretrained(folder), offload.from_pretrained(folder, **options)


def in_memory(model: Any) -> set[str]:
    return {name for name, parameter in model.named_parameters() if not offload.is_offloaded(parameter)}


def is_on_disk(model: Any) -> bool:
    return not in_memory(model)


def is_tied(model: Any) -> bool:
    """One parameter, and so one file."""
    return model.get_output_embeddings().weight is model.get_input_embeddings().weight


def same_values(plain: Any, model: Any) -> bool:
    expected, got = plain.state_dict(), model.state_dict()
    return expected.keys() == got.keys() and all(torch.equal(expected[key], got[key]) for key in got)


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


def test_every_way_to_generate_gives_the_tokens_of_the_model_in_memory(folder: Path, tokens: torch.Tensor) -> None:
    plain, model = both(folder)

    expected = ways_to_generate(plain, plain, tokens)
    assert all(map(torch.equal, expected, ways_to_generate(model, model, tokens)))
    with torch.inference_mode():
        assert all(map(torch.equal, expected, ways_to_generate(model, model, tokens)))


def test_an_assistant_in_memory_helps_a_model_on_disk(folder: Path, tokens: torch.Tensor) -> None:
    plain, model = both(folder)
    torch.manual_seed(5)
    assistant = AutoModelForCausalLM.from_config(plain.config).eval()

    expected, got = (
        who.generate(tokens[:1], assistant_model=assistant, max_new_tokens=12, do_sample=False)
        for who in (plain, model)
    )

    assert torch.equal(expected, got)


def test_a_text_generation_pipeline_gives_the_same_text(llama: Path) -> None:
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
    assert is_on_disk(model)


def test_a_generation_config_is_used(llama: Path, tokens: torch.Tensor) -> None:
    settings = GenerationConfig(max_new_tokens=5, num_beams=2, do_sample=False, repetition_penalty=2.0)
    settings.save_pretrained(llama)
    plain, model = both(llama)

    expected = plain.generate(tokens)
    assert 7 + 5 >= expected.shape[1]
    assert torch.equal(expected, model.generate(tokens))
    other = GenerationConfig(max_new_tokens=3, do_sample=False, bad_words_ids=[[int(expected[0, 7])]])
    assert torch.equal(plain.generate(tokens, other), model.generate(tokens, other))


# Other sizes and dtypes


@pytest.mark.parametrize("size", [130, 40], ids=["grow", "shrink"])
@pytest.mark.parametrize("mean_resizing", [True, False])
def test_token_embeddings_are_resized_as_in_memory(folder: Path, size: int, mean_resizing: bool) -> None:
    """They stay on disk, the checkpoint is unchanged, and tied weights stay tied. A separate head becomes a new module,
    which transformers creates in memory."""
    plain, model = both(folder)
    tied, before = is_tied(plain), contents(folder)

    for who in (plain, model):
        torch.manual_seed(0)
        who.resize_token_embeddings(size, mean_resizing=mean_resizing)

    assert (size, size) == (model.config.vocab_size, model.get_input_embeddings().num_embeddings)
    assert same_values(plain, model)
    assert (set() if tied else {"lm_head.weight"}) == in_memory(model)
    assert tied == is_tied(model)
    assert before == contents(folder)
    ids = torch.tensor([[1, 2, 39]])
    assert torch.equal(plain(ids).logits, model(ids).logits)
    assert torch.equal(plain.generate(ids, max_new_tokens=4), model.generate(ids, max_new_tokens=4))


def test_a_new_head_goes_to_disk_on_request(tmp_path: Path) -> None:
    plain, model = both(saved(CONFIGS["llama untied"], tmp_path))
    for who in (plain, model):
        torch.manual_seed(0)
        who.resize_token_embeddings(130)

    offload.disk_offload(model)

    assert is_on_disk(model)
    assert same_values(plain, model)


@pytest.mark.parametrize("cast", CASTS.values(), ids=CASTS)
def test_a_model_that_is_cast_or_moved_stays_on_disk(folder: Path, tokens: torch.Tensor, cast: Any) -> None:
    plain, model = both(folder)
    tied, before = is_tied(plain), contents(folder)

    assert cast(model) is model
    cast(plain)

    assert is_on_disk(model)
    assert tied == is_tied(model)
    assert same_values(plain, model)
    assert before == contents(folder)
    with torch.no_grad():
        assert torch.equal(plain(tokens).logits, model(tokens).logits)


def test_a_named_folder_has_one_file_for_what_is_tied(llama: Path, tmp_path: Path) -> None:
    model = offload.from_pretrained(llama, offload_dir=tmp_path / "values")

    model.half()

    assert len(list(model.parameters())) == len(list((tmp_path / "values").iterdir()))
    assert {tmp_path / "values"} == {parameter.offload_dir for parameter in model.parameters()}


# Training


def test_a_step_with_gradient_checkpointing_is_that_in_memory(folder: Path, tokens: torch.Tensor) -> None:
    plain, model = both(folder)

    for who in (plain, model):
        who.train()
        who.gradient_checkpointing_enable()
        torch.manual_seed(0)
        who(tokens, labels=tokens, use_cache=False).loss.backward()
    expected = {name: parameter.grad for name, parameter in plain.named_parameters()}
    assert expected.keys() == {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    for name, parameter in model.named_parameters():
        assert torch.equal(expected[name], parameter.grad), name
    for who in (plain, model):
        torch.optim.AdamW(who.parameters(), lr=0.01).step()

    assert same_values(plain, model)
    assert is_on_disk(model)


def test_a_training_step_leaves_the_checkpoint_as_it_is(llama: Path, tokens: torch.Tensor) -> None:
    model, before = offload.from_pretrained(llama), contents(llama)

    model(tokens, labels=tokens).loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()

    assert is_tied(model)
    assert before == contents(llama)


# Buffers


def test_buffers_are_those_of_the_model_in_memory(tmp_path: Path) -> None:
    """A batch norm saves its statistics; the frequencies of rotary positions are computed and not saved."""
    config = Wav2Vec2BertConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        feature_projection_input_dim=8,
        position_embeddings_type="rotary",
    )
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


def test_buffers_on_disk_serve_generation(folder: Path, tokens: torch.Tensor) -> None:
    plain, model = both(folder, offload_buffers=True)

    assert all(offload.is_offloaded(buffer) for buffer in model.buffers())
    assert torch.equal(plain.generate(tokens, max_new_tokens=4), model.generate(tokens, max_new_tokens=4))


# Encoders


def mean_of_tokens(model: Any, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """A sentence vector as in sentence-transformers: the mean of its tokens' vectors, with length 1."""
    states = model(input_ids=ids, attention_mask=mask).last_hidden_state
    weights = mask[..., None].to(states.dtype)
    return torch.nn.functional.normalize((states * weights).sum(1) / weights.sum(1).clamp(min=1e-9), dim=1)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_sentence_vectors_equal_those_in_memory(tmp_path: Path, mode: Any) -> None:
    config = BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, vocab_size=96)
    folder = saved(config, tmp_path, AutoModel)
    plain, model = AutoModel.from_pretrained(folder), offload.from_pretrained(folder, model_class=AutoModel)
    ids, mask = torch.arange(20).reshape(2, 10), torch.ones(2, 10, dtype=torch.long)
    mask[1, 6:] = 0

    with mode():
        assert torch.equal(mean_of_tokens(plain, ids, mask), mean_of_tokens(model, ids, mask))
    assert is_on_disk(model)
