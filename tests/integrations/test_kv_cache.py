"""Keys and values on disk give bit for bit the same as transformers' own cache in memory."""

import copy
import gc
import json
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    BartConfig,
    DynamicCache,
    Gemma2Config,
    LlamaConfig,
    MistralConfig,
    Qwen3NextConfig,
)

import offload
from offload.errors import ForeignFileError, ShapeMismatchError, StaleViewError, UnsupportedOpError
from offload.transformers_api import cache_option
from tests.equal import is_equal
from tests.processes import run_script

SIZES: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "head_dim": 8, "vocab_size": 99, "max_position_embeddings": 4096}
CACHE = cache_option()
CONFIGS = {
    "full": LlamaConfig(**SIZES),
    "sliding": MistralConfig(**SIZES, sliding_window=8),
    "both": Gemma2Config(**SIZES, sliding_window=8),
}
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": {"do_sample": True},
    "beams": {"num_beams": 3},
    "sampled beams": {"num_beams": 2, "do_sample": True, "num_return_sequences": 2},
}
PADDED = torch.ones(2, 13, dtype=torch.long)
PADDED[0, :5] = 0


@pytest.fixture(params=CONFIGS)
def model(request: pytest.FixtureRequest) -> Any:
    return model_of(CONFIGS[request.param])


@pytest.fixture
def llama() -> Any:
    return model_of(CONFIGS["full"])


def model_of(config: Any, seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config).to(dtype).eval()


def both(model: Any) -> tuple[Any, Any]:
    """A cache in memory, and one on disk."""
    return DynamicCache(config=model.config), offload.integrations.kv_cache(model)


def ids(*shape: int) -> torch.Tensor:
    return torch.randint(3, 99, shape, generator=torch.Generator().manual_seed(0))


def generated(model: Any, tokens: torch.Tensor, past: Any, **options: Any) -> list[torch.Tensor]:
    """The sequences, then the scores of each step."""
    torch.manual_seed(1)
    asked = {CACHE: past, "max_new_tokens": 20, "eos_token_id": None, "pad_token_id": 0, "do_sample": False}
    out = model.generate(tokens, return_dict_in_generate=True, output_scores=True, **{**asked, **options})
    return [out.sequences, *out.scores]


def is_on_disk(past: Any) -> bool:
    return all(offload.is_offloaded(states) for layer in past.layers for states in (layer.keys, layer.values))


def assert_on_disk_as_in_memory(plain: Any, past: Any) -> None:
    assert is_on_disk(past)
    for other, mine in zip(plain.layers, past.layers, strict=True):
        assert torch.equal(other.keys, mine.keys.materialize())
        assert torch.equal(other.values, mine.values.materialize())


@pytest.mark.parametrize(
    ("dtype", "options"),
    [*((torch.float32, options) for options in WAYS.values()), (torch.bfloat16, WAYS["sampled beams"])],
    ids=[*WAYS, "sampled beams in bfloat16"],
)
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_padded_batch_generates_as_with_a_cache_in_memory(config, dtype, options):
    model = model_of(config, dtype=dtype)
    past = offload.integrations.kv_cache(model)

    expected = generated(model, ids(2, 13), DynamicCache(config=config), attention_mask=PADDED, **options)
    assert is_equal(expected, generated(model, ids(2, 13), past, attention_mask=PADDED, **options))
    assert is_on_disk(past)


@pytest.mark.parametrize("by", ["an assistant", "the prompt"])
def test_rejected_draft_tokens_leave_the_cache_as_in_memory(model, by):
    assistant = {"assistant_model": model_of(model.config, seed=3)}
    options: dict[str, Any] = assistant if by == "an assistant" else {"prompt_lookup_num_tokens": 3}
    plain, past = both(model)

    assert is_equal(generated(model, ids(1, 13), plain, **options), generated(model, ids(1, 13), past, **options))
    assert_on_disk_as_in_memory(plain, past)


@pytest.mark.parametrize(("shape", "dtype"), [((2, 13), None), ((5, 6), None), ((2, 13), torch.bfloat16)])
def test_a_cache_that_was_reset_starts_empty_and_takes_another_batch_or_dtype(model, shape, dtype):
    past = offload.integrations.kv_cache(model)
    generated(model, ids(2, 13), past)
    file = past.layers[0]._rows_of_keys._file.offload_path
    past.reset()

    assert 0 == past.get_seq_length()
    model.to(dtype)
    expected = generated(model, ids(*shape), DynamicCache(config=model.config))
    assert is_equal(expected, generated(model, ids(*shape), past))
    assert (dtype or torch.float32) == past.layers[0].keys.dtype
    assert ((2, 13), None) != (shape, dtype) or file == past.layers[0]._rows_of_keys._file.offload_path


@torch.no_grad()
def test_tokens_that_may_be_taken_back_are_not_seen_through_the_window():
    """While the past is recorded nothing is dropped from it, even over several calls."""
    model = model_of(CONFIGS["sliding"])
    caches = both(model)
    caches[1].activate_past_recording()

    for tokens in ids(1, 40).split([12, 3, 1, 24], dim=1):
        expected, got = (model(tokens, **{CACHE: past}).logits for past in caches)
        assert torch.equal(expected, got)
    assert [7, 40] == [past.layers[0].keys.shape[2] for past in caches]


@torch.no_grad()
def test_the_capacity_grows_and_the_tokens_stay(model):
    """A capacity of 256 tokens at first, then grown by half; a window moves to the start."""
    caches, rooms = both(model), set()

    for tokens in ids(1, 800).split([200, 40, 30, 1, 1, 528], dim=1):
        expected, got = (model(tokens, **{CACHE: past}).logits for past in caches)
        assert torch.equal(expected, got)
        rooms.add(tuple(layer._rows_of_keys._file.shape[2] for layer in caches[1].layers))
    assert 1 < len(rooms)


@torch.no_grad()
def test_sliding_layers_take_no_more_than_their_window():
    past = offload.integrations.kv_cache(CONFIGS["sliding"])
    token = torch.ones(1, 2, 1, 8)
    for _ in range(600):  # more than twice the capacity
        for layer in range(2):
            past.update(token, token, layer)

    assert {256} == {layer._rows_of_keys._file.shape[2] for layer in past.layers}


@torch.no_grad()
def test_a_token_writes_its_own_rows_alone(llama):
    """The rest of the file is unchanged, and earlier views show the same tokens."""
    past = offload.integrations.kv_cache(llama)
    llama(ids(1, 20), **{CACHE: past})
    file, earlier = past.layers[0]._rows_of_keys._file, past.layers[0].keys
    before, kept = file.materialize(), earlier.materialize()
    llama(ids(1, 1), **{CACHE: past})

    changed = (file != before).any(dim=-1)[0].nonzero()
    assert [[0, 20], [1, 20]] == changed.tolist()  # the 21st token of both heads
    assert torch.equal(kept, earlier.materialize())


@torch.no_grad()
def test_a_view_from_before_the_capacity_grew_is_refused_as_stale(llama):
    past = offload.integrations.kv_cache(llama)
    llama(ids(1, 200), **{CACHE: past})
    earlier = past.layers[0].keys
    llama(ids(1, 400), **{CACHE: past})

    with pytest.raises(StaleViewError, match=r"layers\.0\.keys"):
        earlier.sum()


@torch.no_grad()
def test_tokens_cropped_repeated_and_picked_are_those_of_a_cache_in_memory(llama):
    caches = both(llama)

    for act in (
        lambda past: llama(ids(2, 20), **{CACHE: past}),
        lambda past: past.crop(-4),
        lambda past: past.batch_repeat_interleave(3),
        lambda past: past.batch_select_indices(torch.tensor([5, 0, 2])),
        lambda past: past.reorder_cache(torch.tensor([1, 1, 0])),
        lambda past: llama(ids(3, 4), **{CACHE: past}),
    ):
        plain, mine = (act(past) for past in caches)
        assert_on_disk_as_in_memory(*caches)
    assert torch.equal(plain.logits, mine.logits)


@torch.no_grad()
def test_a_deep_copy_is_independent(model, tmp_path):
    """For prompts that many conversations share; one of an empty cache does not claim its names."""
    past = offload.integrations.kv_cache(model, tmp_path)
    plain, empty = DynamicCache(config=model.config), copy.deepcopy(past)
    first = [model(ids(1, 12), **{CACHE: cache}).logits for cache in (plain, past, empty)]
    other = copy.deepcopy(past)
    model(ids(1, 300), **{CACHE: other})

    assert torch.equal(first[0], first[1])
    assert torch.equal(first[0], first[2])
    assert torch.equal(model(ids(1, 3), **{CACHE: plain}).logits, model(ids(1, 3), **{CACHE: past}).logits)
    assert past.layers[0].keys.offload_dir == tmp_path
    assert other.layers[0].keys.offload_dir != tmp_path


def test_a_cache_works_inside_and_outside_inference_mode(llama):
    caches = both(llama)

    for mode, count in ((torch.inference_mode, 9), (torch.no_grad, 300)):
        with mode():
            expected, got = (llama(ids(1, count), **{CACHE: past}).logits for past in caches)
        assert torch.equal(expected, got)


def test_an_encoder_decoder_model_generates_as_in_memory():
    torch.manual_seed(0)
    sides = {"layers": 2, "attention_heads": 2, "ffn_dim": 32}
    config = BartConfig(
        vocab_size=99, d_model=16, **{f"{side}_{key}": n for side in ("encoder", "decoder") for key, n in sides.items()}
    )
    model = AutoModelForSeq2SeqLM.from_config(config).eval()
    past = offload.integrations.kv_cache(model)
    options = {"forced_eos_token_id": None, "num_beams": 2}

    expected = generated(model, ids(2, 9), None, **options)
    assert is_equal(expected, generated(model, ids(2, 9), past, **options))
    assert is_on_disk(past.self_attention_cache)
    assert is_on_disk(past.cross_attention_cache)


def test_states_of_linear_attention_stay_in_memory():
    linear = {"linear_num_value_heads": 2, "linear_num_key_heads": 2, "linear_key_head_dim": 8}
    linear |= {"linear_value_head_dim": 8, "layer_types": ["linear_attention", "full_attention"]}
    config = Qwen3NextConfig(**SIZES, **linear, num_experts=0, pad_token_id=0)
    model = model_of(config)
    past = offload.integrations.kv_cache(model)

    expected = generated(model, ids(1, 9), DynamicCache(config=config))
    assert is_equal(expected, generated(model, ids(1, 9), past))
    assert offload.is_offloaded(past.layers[1].keys)
    assert not offload.is_offloaded(past.layers[0].conv_states[0])


def test_a_layer_type_keeps_the_class_that_transformers_has_for_it(llama):
    from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING

    before = dict(DYNAMIC_LAYER_TYPE_MAPPING)
    offload.integrations.kv_cache(llama)

    assert before == DYNAMIC_LAYER_TYPE_MAPPING


@torch.no_grad()
def test_private_files_go_with_the_cache(llama):
    past = offload.integrations.kv_cache(llama)
    llama(ids(1, 400), **{CACHE: past})
    paths = [states.offload_path for layer in past.layers for states in (layer.keys, layer.values)]
    assert all(path.exists() for path in paths)

    del past
    gc.collect()

    assert not any(path.exists() for path in paths)


@torch.no_grad()
def test_in_a_named_folder_there_is_a_file_for_each_and_it_stays(llama, tmp_path):
    """Even after the capacity has grown, which replaces a file."""
    past = offload.integrations.kv_cache(llama, tmp_path / "past")
    for tokens in ids(1, 400).split(200, dim=1):
        llama(tokens, **{CACHE: past})
    kept = past.layers[1].keys.materialize()
    del past
    gc.collect()

    names = {f"layers.{layer}.{part}" for layer in (0, 1) for part in ("keys", "values")}
    assert {f"{name}.safetensors" for name in names} == {path.name for path in (tmp_path / "past").iterdir()}
    stored = offload.load_file(tmp_path / "past" / "layers.1.keys.safetensors")["layers.1.keys"]
    assert torch.equal(kept, stored[:, :, :400].materialize())


def test_a_folder_that_is_not_empty_is_refused(llama, tmp_path):
    (tmp_path / "letter.txt").write_text("not yours")

    with pytest.raises(ForeignFileError, match="exists, and is not an empty folder") as caught:
        offload.integrations.kv_cache(llama, tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert "not yours" == (tmp_path / "letter.txt").read_text()


def test_gradients_are_refused(llama):
    with pytest.raises(UnsupportedOpError, match=r"layers\.0\.keys.*no_grad"):
        llama(ids(1, 5), **{CACHE: offload.integrations.kv_cache(llama)})


@torch.no_grad()
def test_a_batch_of_another_size_is_refused_and_not_broadcast(llama):
    past = offload.integrations.kv_cache(llama)
    llama(ids(2, 5), **{CACHE: past})
    layer = past.layers[0]

    with pytest.raises(ShapeMismatchError, match=r"layers\.0\.keys.*\(2, 2, 5, 8\).*\(1, 2, 3, 8\)"):
        layer.update(torch.ones(1, 2, 3, 8), torch.ones(1, 2, 3, 8))
    with pytest.raises(ShapeMismatchError, match=r"layers\.0\.keys.*float32.*float16"):
        layer.update(torch.ones(2, 2, 3, 8).half(), torch.ones(2, 2, 3, 8).half())
    assert 5 == past.get_seq_length()


# Memory

LONG = """
    import json, torch, offload
    from transformers import LlamaConfig
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from offload.memory import anonymous_bytes

    class Attention(torch.nn.Module):
        is_causal, num_key_value_groups = True, 1

    torch.set_num_threads(1)
    layers, heads, size, block, blocks = 4, 8, 64, 1024, 10
    config = LlamaConfig(num_hidden_layers=layers, num_attention_heads=heads, head_dim=size)
    past = offload.integrations.kv_cache(config)
    attention, new = Attention(), torch.randn(3, 1, heads, block, size)
    most, totals = 0, []

    def step(query, keys, values):
        global most
        for layer in range(layers):
            keys_so_far, values_so_far = past.update(keys + layer, values + layer, layer)
            seen = attention, query[:, :, -8:], keys_so_far, values_so_far
            out = sdpa_attention_forward(*seen, None, is_causal=False)[0]
            most = max(most, anonymous_bytes())
        return out

    with torch.no_grad():
        step(*new[:, :, :, :1])
        past.reset()
        most, before = 0, anonymous_bytes()
        for _ in range(blocks):
            step(*new)
        for _ in range(3):
            totals.append(step(*new[:, :, :, :1]).abs().sum().item())
    kept = sum(states.nbytes for layer in past.layers for states in (layer.keys, layer.values))
    print(json.dumps(dict(grown=most - before, kept=kept, totals=totals)))
"""


@pytest.mark.slow(8)
def test_keys_and_values_of_160_mb_take_the_anonymous_memory_of_a_layer():
    """At most half of a layer's 42 MB. What attention allocates and frees is returned at once, so as not to count: by
    default the C library keeps about 100 MB of it."""
    found = json.loads(run_script(LONG, env={"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}))

    assert found["kept"] > 160e6
    assert found["grown"] < 21e6
    assert all(total > 0 for total in found["totals"])
