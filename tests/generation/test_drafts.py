"""Drafts for models on disk: the text is the one without them, and `generate` is transformers' own, by position too."""

from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, StoppingCriteria
from transformers.generation.candidate_generator import AssistedCandidateGenerator
from transformers.generation.streamers import BaseStreamer

import offload
from offload.generation import candidates
from offload.generation.candidates import Draft, Drafts, PassCosts, Source
from offload.generation.features import _context
from offload.prefetch.value import page_state_of
from offload.tensor.products import are_multiplied_packed, runs_of
from offload.tensor.recipes import Piece
from offload.tensor.views import handle_of, view_spec_of
from tests.checkpoints.forms import FORMS
from tests.checkpoints.gguf_files import write_gguf
from tests.sizes import SIZES

# Models without experts, whose router is dense.
ALIKE = (
    *("fp8-llama", "fp8-small", "fp8-tensor", "fp8-scale", "fp8-part", "fp8-ue8m0-bytes", "ct-fp8-block"),
    *("ct-w4a16-asym", "bnb-", "gptq", "awq", "gguf-q4_k_m", "gguf-iq2_xs", "gguf-qwen2"),
)
PROMPT = torch.tensor([[5, 6, 7, 8, 9, 5, 6]])
GREEDY = {"do_sample": False, "max_new_tokens": 24, "output_logits": True, "return_dict_in_generate": True}


def llama(seed: int = 0, **sizes: Any) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**{**SIZES, **sizes})).eval()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    llama().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def model(folder: Path) -> Any:
    """It is on disk."""
    return offload.from_pretrained(folder)


@pytest.fixture
def packed(tmp_path: Path) -> Any:
    """A model whose every product is with packed weights."""
    return offload.from_pretrained(write_gguf(llama(), tmp_path / "model.gguf", "Q8_0"))


@pytest.fixture
def _all_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts of these lengths, whatever they cost, from each source in turn."""
    script = cycle([0, 3, 1, 12, 2, 0, 0, 5])

    def best(_: PassCosts, sources: list[Any]) -> Draft:
        number = next(script)
        source, most = sources[number % len(sources)] if sources and number else (None, 0)
        return Draft(min(number, most), source)

    monkeypatch.setattr(PassCosts, "best", best)


@pytest.fixture
def drafted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """How many tokens of each draft were accepted, and drafted."""
    found: list[tuple[int, int]] = []
    learn = Source.learn

    def noting(self: Source, accepted: int, count: int) -> None:
        found.append((accepted, count))
        learn(self, accepted, count)

    monkeypatch.setattr(Source, "learn", noting)
    return found


def logits_of(found: Any) -> torch.Tensor:
    return torch.cat(found.logits)


@pytest.mark.usefixtures("_all_lengths")
@pytest.mark.parametrize("seed", [0, 1])  # the model itself, and another one
def test_greedy_text_of_a_dense_model_is_the_same_with_drafts(model, seed, drafted):
    expected = model.generate(PROMPT, **GREEDY)
    found = model.generate(PROMPT, assistant_model=llama(seed), **GREEDY)
    from_text = model.generate(PROMPT, prompt_lookup_num_tokens=10, **GREEDY)

    assert expected.sequences.tolist() == found.sequences.tolist() == from_text.sequences.tolist()
    torch.testing.assert_close(logits_of(expected), logits_of(found))
    assert sum(accepted for accepted, _ in drafted) > 0


@pytest.mark.fused
@pytest.mark.usefixtures("_all_lengths")
@pytest.mark.parametrize(("seed", "padding"), [(0, 0), (1, 2)])
def test_logits_of_a_packed_model_are_the_same_bits_with_drafts(packed, seed, padding, drafted):
    prompt = torch.cat([torch.zeros(1, padding, dtype=torch.int64), PROMPT], dim=1)
    mask = (torch.arange(prompt.shape[1]) >= padding).long()[None]
    expected = packed.generate(prompt, attention_mask=mask, **GREEDY)
    found = packed.generate(prompt, attention_mask=mask, assistant_model=llama(seed), **GREEDY)

    assert torch.equal(expected.sequences, found.sequences)
    assert torch.equal(logits_of(expected), logits_of(found))
    assert sum(count for _, count in drafted) > 12


@pytest.mark.fused
@pytest.mark.filterwarnings("ignore:You passed `quantization_config`:UserWarning")
@pytest.mark.parametrize("name", FORMS)
def test_passes_are_alike_wherever_a_product_is_computed_from_packed_bytes(name, tmp_path):
    """Whether the packed value is the weight itself, or the weight is cast or joined of such."""
    FORMS[name].write(tmp_path)
    model = offload.from_pretrained(tmp_path, **FORMS[name].options)
    weights = [one for one in model.parameters() if type(one) is offload.OffloadedTensor and one.dim() > 1]
    matrices = [one for all in weights for one in ([all] if all.dim() == 2 else [all[0], all[0].t()])]
    parts = [runs_of(Piece(handle_of(one), view_spec_of(one))) for one in matrices if not is_stored(one)]
    are_packed = [any(not is_stored_in(rows) for rows in some) for some in parts]

    assert any(are_packed) == are_multiplied_packed(model)
    with offload.exact():
        assert not are_multiplied_packed(model)


def is_stored(weight: Any) -> bool:
    return handle_of(weight).composed is None


def is_stored_in(rows: Any) -> bool:
    return getattr(rows.packed, "kind", "") in ("float32", "float16", "bfloat16")


@pytest.mark.fused
@pytest.mark.usefixtures("_all_lengths")
@pytest.mark.filterwarnings("ignore:You passed `quantization_config`:UserWarning")
@pytest.mark.parametrize("name", [name for name in FORMS if name.startswith(ALIKE)])
def test_logits_of_every_packed_form_are_the_same_bits_with_drafts(name, tmp_path, drafted):
    """But for products with dense weights, here the head, which torch computes row by row in this test."""
    FORMS[name].write(tmp_path)
    model = offload.from_pretrained(tmp_path, **FORMS[name].options)
    head, linear = model.get_output_embeddings(), torch.nn.functional.linear
    head.forward = lambda x: torch.cat([linear(row, head.weight) for row in x.split(1, dim=1)], dim=1)
    expected = model.generate(PROMPT, min_new_tokens=24, **GREEDY)
    found = model.generate(PROMPT, min_new_tokens=24, prompt_lookup_num_tokens=10, **GREEDY)

    assert torch.equal(expected.sequences, found.sequences)
    assert torch.equal(logits_of(expected), logits_of(found))
    assert sum(count for _, count in drafted) > 0


@pytest.mark.fused
def test_a_packed_model_attends_as_before_after_drafts(packed):
    with pytest.raises(ZeroDivisionError):
        packed.generate(PROMPT, assistant_model=llama(), stopping_criteria=[lambda *_: 1 / 0], **GREEDY)

    assert "sdpa" == packed.config._attn_implementation


def test_a_sampled_draft_of_the_model_itself_is_always_accepted(model, monkeypatch, drafted):
    monkeypatch.setattr(candidates, "looked_up", lambda *_: ([], 0))
    for seed in range(3):
        torch.manual_seed(seed)
        model.generate(PROMPT, assistant_model=llama(), do_sample=True, max_new_tokens=12, top_k=0)

    assert sum(count for _, count in drafted) == sum(accepted for accepted, _ in drafted) > 0


@pytest.mark.usefixtures("_all_lengths")
def test_drafted_tokens_are_streamed_in_order(model):
    class Listed(BaseStreamer):
        def __init__(self) -> None:
            self.tokens: list[int] = []

        def put(self, value: torch.Tensor) -> None:
            self.tokens += value.reshape(-1).tolist()

        def end(self) -> None:
            self.tokens.append(-1)

    streamer = Listed()
    found = model.generate(PROMPT, assistant_model=llama(), streamer=streamer, **GREEDY)

    assert [*found.sequences[0].tolist(), -1] == streamer.tokens


@pytest.mark.usefixtures("_all_lengths")
def test_a_draft_ends_where_the_text_ends(model):
    text = model.generate(PROMPT, **GREEDY).sequences[0].tolist()
    end = text[PROMPT.shape[1] + 9]
    found = model.generate(PROMPT, assistant_model=llama(), eos_token_id=end, pad_token_id=0, **GREEDY)

    assert text[: text.index(end, PROMPT.shape[1]) + 1] == found.sequences[0].tolist()


@pytest.mark.usefixtures("_all_lengths")
def test_stopping_criteria_see_the_text_with_its_drafts(model):
    class Longer(StoppingCriteria):
        def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            return torch.tensor([input_ids.shape[1] >= PROMPT.shape[1] + 6])

    found = model.generate(PROMPT, assistant_model=llama(), stopping_criteria=[Longer()], **GREEDY).sequences
    text = model.generate(PROMPT, **GREEDY).sequences

    assert 6 <= found.shape[1] - PROMPT.shape[1] < 24
    assert torch.equal(text[:, : found.shape[1]], found)


@pytest.mark.usefixtures("_all_lengths")
@pytest.mark.parametrize("samples", [False, True])
def test_an_assistant_may_have_another_vocabulary(model, samples, drafted):
    def words(count: int, step: int) -> PreTrainedTokenizerFast:
        known = Tokenizer(models.WordLevel({f"w{n * step % count}": n for n in range(count)}, unk_token="w0"))
        known.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        return PreTrainedTokenizerFast(tokenizer_object=known, unk_token="w0", pad_token="w0")

    assistant = llama(1, vocab_size=97)
    tokenizers = {"tokenizer": words(96, 5), "assistant_tokenizer": words(97, 3)}
    options = {"min_new_tokens": 12, "max_new_tokens": 12, "do_sample": samples}
    found = model.generate(PROMPT, assistant_model=assistant, **tokenizers, **options)

    assert PROMPT.shape[1] + 12 == found.shape[1]
    assert samples or torch.equal(model.generate(PROMPT, **options), found)
    assert sum(count for _, count in drafted) > 0


@pytest.mark.usefixtures("_all_lengths")
def test_batches_in_flight_may_draft(model):
    assistant = llama(1)
    batches = [PROMPT + number for number in range(4)]
    options = {"do_sample": False, "max_new_tokens": 12}
    expected = [model.generate(batch, **options) for batch in batches]
    found = list(
        offload.map_batches(lambda batch: model.generate(batch, assistant_model=assistant, **options), batches, model)
    )

    assert [one.tolist() for one in expected] == [one.tolist() for one in found]


def generator_of(model: Any, assistant: Any = None, **options: Any) -> Any:
    config, _ = model._prepare_generation_config(None, max_length=20, **options)
    model._prepare_special_tokens(config, device=torch.device("cpu"))
    return model._get_candidate_generator(config, PROMPT, PROMPT, [], {}, assistant)


def test_an_assistant_that_says_how_many_tokens_it_drafts_is_left_to_transformers(model):
    free, said = llama(), llama()
    said.generation_config.num_assistant_tokens = 3

    assert type(generator_of(model, free)) is Drafts
    assert type(generator_of(model, said)) is AssistedCandidateGenerator
    assert type(generator_of(model, prompt_lookup_num_tokens=4)) is Drafts


def test_models_in_memory_draft_as_in_transformers(folder):
    assert type(generator_of(LlamaForCausalLM.from_pretrained(folder), llama())) is AssistedCandidateGenerator


def test_an_assistant_on_disk_stays_in_memory(folder, tmp_path):
    llama(1, hidden_size=128, intermediate_size=512).save_pretrained(tmp_path / "small")
    model, assistant = offload.from_pretrained(folder), offload.from_pretrained(tmp_path / "small")
    model.generate(PROMPT, assistant_model=assistant, max_new_tokens=2)
    layers = [handle_of(layer.mlp.up_proj.weight) for layer in assistant.model.layers]

    assert all(value.pinned for handle in layers for value in page_state_of(handle).ranges.values())
    assert not any(value.pinned for value in page_state_of(handle_of(model.lm_head.weight)).ranges.values())


def test_settings_may_be_given_by_position(model):
    settings = GenerationConfig(max_new_tokens=4, do_sample=False, pad_token_id=0)
    answers = [one.generate(torch.tensor([[1, 2, 3]]), settings) for one in (llama(), model)]

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
def test_keys_and_values_are_counted_as_generate_makes_them(model, given, options, tokens):
    assert tokens == _context(model, torch.ones(2, 3, dtype=torch.long), *given, **options)
