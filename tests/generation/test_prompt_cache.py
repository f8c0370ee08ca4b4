"""Kept prompts: the same tokens as without, from fewer computed; never those of another model or prompt."""

import copy
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from packaging.version import Version
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DynamicCache,
    Gemma2Config,
    LlamaConfig,
    LlamaModel,
    MistralConfig,
    Qwen3NextConfig,
    __version__,
)

import offload
from offload.errors import ArgumentError, ForeignFileError
from offload.generation import PromptCache, prompt_cache
from offload.generation import blocks as blocks_of_prompts
from offload.generation.blocks import TOKENS
from offload.generation.past import past_of
from offload.transformers_api import CACHES, cache_option, fills_after_cache
from tests import faults
from tests.campaigns import amount
from tests.processes import ended, forked, in_fork

SIZES: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "head_dim": 8, "vocab_size": 99, "max_position_embeddings": 4096}
SIZES |= {"initializer_range": 0.5}
CACHE = cache_option()
CONFIGS = {
    "full": LlamaConfig(**SIZES),
    "sliding": MistralConfig(**SIZES, sliding_window=8),
    "both": Gemma2Config(**SIZES, sliding_window=70),
}
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": {"do_sample": True},
    "from the prompt": {"prompt_lookup_num_tokens": 3},
    "in pieces": {"prefill_chunk_size": 50},
}


@pytest.fixture(params=CONFIGS)
def model(request: pytest.FixtureRequest) -> Any:
    return model_of(CONFIGS[request.param])


@pytest.fixture
def llama() -> Any:
    return model_of(CONFIGS["full"])


@pytest.fixture
def prompts(tmp_path: Path) -> PromptCache:
    return PromptCache(tmp_path / "prompts")


def model_of(config: Any, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config).eval()


def ids(length: int, seed: int = 0, rows: int = 1) -> torch.Tensor:
    return torch.randint(1, 99, (rows, length), generator=torch.Generator().manual_seed(seed))


def answer(generate: Callable[..., Any], *args: Any, **options: Any) -> torch.Tensor:
    torch.manual_seed(5)
    return generate(*args, max_new_tokens=12, min_new_tokens=12, **options)


def known(prompts: PromptCache, model: Any, tokens: torch.Tensor) -> int:
    return TOKENS * len(prompts._known(model, tokens)[1])


def blocks(prompts: PromptCache) -> list[Path]:
    return sorted(prompts.folder.glob("*.safetensors"))


@torch.no_grad()
def filled(model: Any) -> Any:
    """A cache with the keys and values of 100 tokens, which are a prompt."""
    past = past_of(model.config, [], model.device, 100)
    model(ids(100), **{CACHE: past})
    return past


# The same answers


@pytest.mark.parametrize("way", WAYS)
def test_tokens_equal_those_without_a_prompt_cache(model, prompts, way):
    tokens = ids(200)
    expected = answer(model.generate, tokens, **WAYS[way])

    for length in (0, 192):
        assert length == known(prompts, model, tokens)
        assert torch.equal(expected, answer(prompts.generate, model, tokens, **WAYS[way]))


def test_a_prompt_in_chunks_is_computed_from_its_first_token_where_transformers_repeats_it(
    llama, prompts, monkeypatch, caplog
):
    """As it does before 5.21: tokens that are known would be there twice."""
    monkeypatch.setattr(prompt_cache, "fills_after_cache", lambda: False)
    expected = answer(llama.generate, ids(200), prefill_chunk_size=50)
    answer(prompts.generate, llama, ids(200))
    caplog.set_level("INFO", "offload")

    assert torch.equal(expected, answer(prompts.generate, llama, ids(200), prefill_chunk_size=50))
    assert ["0 of 200 tokens of the prompt are known"] == [one for one in caplog.messages if "are known" in one]


def test_a_longer_prompt_begins_with_what_it_has_in_common(model, prompts):
    first, other = ids(200), torch.cat([ids(150), ids(120, seed=1)], dim=1)
    answer(prompts.generate, model, first)

    assert 128 == known(prompts, model, other)
    assert torch.equal(answer(model.generate, other), answer(prompts.generate, model, other))
    assert 256 == known(prompts, model, other)
    assert 192 == known(prompts, model, first)
    assert 5 == len(blocks(prompts))  # two of them in common


@pytest.mark.skipif(not fills_after_cache(), reason="before 5.21, transformers begins with the whole prompt")
def test_logits_equal_those_of_a_pass_in_the_same_pieces_bit_for_bit(model, prompts):
    how = {"prefill_chunk_size": 128, "output_logits": True, "return_dict_in_generate": True}
    first, later = (answer(prompts.generate, model, ids(150), **how).logits for _ in range(2))

    assert 128 == known(prompts, model, ids(150))
    assert torch.equal(torch.stack(first), torch.stack(later))


def test_a_prompt_shorter_than_what_is_kept_computes_its_last_token(model, prompts):
    answer(prompts.generate, model, ids(200))

    for length, found in ((192, 128), (193, 192), (64, 0), (65, 64), (3, 0)):
        assert found == known(prompts, model, ids(200)[:, :length])
    short = ids(200)[:, :128]
    assert torch.equal(answer(model.generate, short), answer(prompts.generate, model, short))


@pytest.mark.parametrize("way", [{}, {"prompt_lookup_num_tokens": 3}, {"assistant_model": True}], ids=str)
def test_a_model_from_disk_takes_a_folder(llama, tmp_path, way, monkeypatch):
    """And drafts begin after what is known, where transformers (5.23) begins with the whole prompt."""
    llama.save_pretrained(tmp_path / "llama")
    model = offload.from_pretrained(tmp_path / "llama")
    way = {**way, "assistant_model": model_of(CONFIGS["full"], seed=1)} if "assistant_model" in way else way
    tokens, folder = ids(200), tmp_path / "prompts"
    expected = answer(model.generate, tokens, **way)
    rows: list[int] = []
    forward = LlamaModel.forward

    @wraps(forward)
    def counting(self: Any, input_ids: torch.Tensor, **given: Any) -> Any:
        if self is model.model:
            rows.append(input_ids.shape[1])
        return forward(self, input_ids, **given)

    monkeypatch.setattr(LlamaModel, "forward", counting)
    for most in (203, 11):
        rows.clear()
        assert torch.equal(expected, answer(model.generate, tokens, prompt_cache=folder, **way))
        assert rows[0] <= most + (20 if "assistant_model" in way else 0)
    blocks = PromptCache(folder)._known(model, tokens)[1]
    with pytest.raises(ArgumentError, match="the whole prompt"), torch.no_grad():
        model(tokens, **{CACHE: past_of(model.config, blocks, model.device, 200)})


def test_batches_in_lockstep_use_what_is_kept(llama, tmp_path, prompts):
    llama.save_pretrained(tmp_path / "llama")
    model = offload.from_pretrained(tmp_path / "llama")
    batches = [torch.cat([ids(100), ids(length, seed=length)], dim=1) for length in (1, 30, 50)]

    def act(tokens: torch.Tensor) -> torch.Tensor:
        return model.generate(tokens, prompt_cache=prompts, max_new_tokens=4)

    for _ in range(2):
        found = list(offload.map_batches(act, batches, model, progress=False))
        for tokens, made in zip(batches, found, strict=True):
            assert torch.equal(llama.generate(tokens, max_new_tokens=4), made)
    assert [64, 128, 128] == [known(prompts, model, tokens) for tokens in batches]


# Other models, and prompts that are left out


def changed(model: Any, how: str) -> Any:
    if how == "weights":
        with torch.no_grad():
            model.model.layers[1].mlp.up_proj.weight[0, 0] += 1
    elif how == "data":
        model.model.layers[1].mlp.up_proj.weight.data.mul_(1.5)
    elif how == "one number through data":
        model.model.layers[1].mlp.up_proj.weight.data[5, 7] += 1
    elif how == "one number through numpy":
        model.model.layers[1].mlp.up_proj.weight.detach().numpy()[5, 7] += 1
    elif how == "two rows through numpy":
        rows = model.model.layers[1].mlp.up_proj.weight.detach().numpy()
        rows[[3, 4]] = rows[[4, 3]]
    elif how == "dtype":
        model = model.to(torch.bfloat16)
    elif how == "rope":
        model = model_of(LlamaConfig(**{**SIZES, "rope_parameters": {"rope_type": "default", "rope_theta": 99.0}}))
    elif how == "attention":
        model.set_attn_implementation("eager")
    elif how == "a setting":
        model.model.layers[2].self_attn.scaling *= 2
    elif how == "revision":
        model = model_of(CONFIGS["full"], seed=1)
    return model


@pytest.mark.parametrize(
    "how",
    [
        *("weights", "data", "one number through data", "one number through numpy", "two rows through numpy"),
        *("dtype", "rope", "attention", "a setting", "revision"),
    ],
)
def test_a_changed_model_is_another_one(llama, prompts, how):
    tokens = ids(100)
    answer(prompts.generate, llama, tokens)
    assert 64 == known(prompts, llama, tokens)

    assert 0 == known(prompts, changed(copy.deepcopy(llama), how), tokens)
    assert 0 == known(prompts, changed(llama, how), tokens)


@contextmanager
def steered(model: Any, how: str) -> Iterator[None]:
    """In this context, the model computes something else, which its weights and settings do not tell."""
    layer, kind = model.model.layers[1], type(model.model.layers[1].mlp)
    forward, handles = layer.mlp.forward, []
    with pytest.MonkeyPatch.context() as patch:
        if how == "a hook":
            handles.append(layer.mlp.register_forward_hook(lambda _, __, found: -9 * found))
        elif how == "a hook before":
            handles.append(layer.mlp.register_forward_pre_hook(lambda _, args: args[0].flip(-1)))
        elif how == "a hook of all modules":
            change = lambda module, _, found: -9 * found if module is layer.mlp else found  # noqa: E731
            handles.append(torch.nn.modules.module.register_module_forward_hook(change))
        elif how == "another forward":
            layer.mlp.forward = lambda x: -9 * forward(x)
            handles.append(SimpleNamespace(remove=lambda: delattr(layer.mlp, "forward")))
        elif how == "another forward of the class":
            own = kind.forward
            patch.setattr(kind, "forward", lambda self, x: -9 * own(self, x))
        elif how == "an activation":
            patch.setitem(layer.mlp._modules, "act_fn", None)
            patch.setitem(vars(layer.mlp), "act_fn", lambda x: -9 * x)
        elif how == "a layer":
            patch.setitem(layer._modules, "mlp", Steered(layer.mlp))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


class Steered(torch.nn.Module):
    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner, self.vector = inner, torch.linspace(-9, 9, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + self.vector


STEERED = [
    *("a hook", "a hook before", "a hook of all modules", "another forward", "another forward of the class"),
    *("an activation", "a layer"),
]


@pytest.mark.parametrize("on_disk", [False, True])
@pytest.mark.parametrize("how", STEERED)
def test_a_model_that_can_not_be_compared_uses_no_kept_prompts(llama, tmp_path, prompts, how, on_disk, caplog):
    """In both directions; what was kept before is known again afterwards."""
    if on_disk:
        llama.save_pretrained(tmp_path / "llama")
        llama = offload.from_pretrained(tmp_path / "llama")
    tokens, other = ids(100), ids(100, seed=1)
    plain = answer(prompts.generate, llama, tokens)
    with steered(llama, how):
        expected = answer(llama.generate, tokens)

        assert not torch.equal(plain, expected)
        assert 0 == known(prompts, llama, tokens)
        assert torch.equal(expected, answer(prompts.generate, llama, tokens))
        answer(prompts.generate, llama, other)
        assert 1 == len(blocks(prompts))
    assert "none is kept" in caplog.text
    assert 0 == known(prompts, llama, other)
    assert 64 == known(prompts, llama, tokens)


@pytest.mark.parametrize("name", ["gemma3_text", "gpt2", "phi3", "qwen3_moe", "olmo2"])
def test_models_of_transformers_can_be_compared(prompts, name):
    ends = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1}
    model = model_of(AutoConfig.for_model(name, **({"vocab_size": 99} if name == "gpt2" else SIZES), **ends))
    answer(prompts.generate, model, ids(100))

    assert 64 == known(prompts, model, ids(100))


def test_an_adapter_can_be_compared(llama, prompts):
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(llama, peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)).eval()
    answer(prompts.generate, llama, ids(100))
    assert 64 == known(prompts, llama, ids(100))

    model.base_model.disable_adapter_layers()

    assert 0 == known(prompts, llama, ids(100))


def test_hooks_of_accelerate_that_move_tensors_can_be_compared(llama, prompts):
    hooks = pytest.importorskip("accelerate.hooks")
    for layer in llama.model.layers:
        hooks.add_hook_to_module(layer, hooks.AlignDevicesHook(execution_device="cpu", io_same_device=True))
    answer(prompts.generate, llama, ids(100))
    assert 64 == known(prompts, llama, ids(100))

    hooks.add_hook_to_module(llama.model.layers[0], type("Own", (hooks.ModelHook,), {})(), append=True)

    assert 0 == known(prompts, llama, ids(100))


def test_a_set_among_a_module_s_settings_has_no_order(llama, prompts):
    """That of strings differs between processes; that of these numbers, with how the set was made."""
    tokens, layer = ids(100), llama.model.layers[0]
    assert [[0, 8], [8, 0]] == [[*{0, 8}], [*{8, 0}]]
    layer.lanes = [{0, 8}]
    answer(prompts.generate, llama, tokens)

    layer.lanes = [{8, 0}]
    assert 64 == known(prompts, llama, tokens)
    layer.lanes = [{8, 1}]
    assert 0 == known(prompts, llama, tokens)


def test_a_checkpoint_with_the_size_and_time_of_another_in_its_place_is_another_one(tmp_path, prompts):
    tokens, found = ids(100), []
    for seed in (0, 1):
        model_of(CONFIGS["full"], seed).save_pretrained(tmp_path / "model")
        os.utime(tmp_path / "model" / "model.safetensors", (0, 0))
        found.append(known(prompts, offload.from_pretrained(tmp_path / "model"), tokens))
        answer(prompts.generate, offload.from_pretrained(tmp_path / "model"), tokens)
        assert 64 == known(prompts, offload.from_pretrained(tmp_path / "model"), tokens)
        os.rename(tmp_path / "model", tmp_path / f"{seed}")

    assert [0, 0] == found


def test_weights_on_disk_give_the_same_and_those_that_are_written_to_are_others(llama, tmp_path, prompts):
    llama.save_pretrained(tmp_path / "llama")
    model, tokens = offload.from_pretrained(tmp_path / "llama", max_memory="1MiB"), ids(200)
    weight = model.model.layers[0].mlp.up_proj.weight
    for _ in range(2):
        assert torch.equal(answer(llama.generate, tokens), answer(prompts.generate, model, tokens))
    assert 192 == known(prompts, offload.from_pretrained(tmp_path / "llama"), tokens)
    assert 0 == known(prompts, llama, tokens)  # its numbers are the same, but not known to be

    for _ in range(2):
        for number in (1, 2):
            with torch.no_grad():
                weight[0] = number
            assert 0 == known(prompts, model, tokens)
            answer(prompts.generate, model, tokens)


ROPE = {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}
LINEAR = {"num_experts": 4, "linear_num_value_heads": 4, "linear_num_key_heads": 4}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (Qwen3NextConfig(**SIZES, **LINEAR), "layer 0 .* LinearAttention"),
        (LlamaConfig(**SIZES, **ROPE), "rope is dynamic"),
    ],
    ids=["linear attention", "dynamic rope"],
)
def test_a_model_with_other_states_is_refused(config, words, prompts):
    with pytest.raises(ArgumentError, match=words):
        prompts.generate(model_of(config), ids(100), max_new_tokens=2)


def test_padding_several_prompts_or_answers_and_inputs_beside_tokens_are_refused(llama, prompts):
    mask = torch.ones(1, 80, dtype=torch.int64)
    mask[0, :9] = 0

    with pytest.raises(ArgumentError, match="padding"):
        prompts.generate(llama, ids(80), attention_mask=mask)
    with pytest.raises(ArgumentError, match="inputs_embeds"):
        prompts.generate(llama, ids(80), inputs_embeds=torch.ones(1, 80, 32))
    with pytest.raises(ArgumentError, match="one by one"):
        prompts.generate(llama, ids(80, rows=2))
    for many in ({"num_beams": 2}, {"num_return_sequences": 2, "do_sample": True}):
        with pytest.raises(ArgumentError, match="one answer"):
            prompts.generate(llama, ids(80), **many)
    llama.generation_config.pad_token_id = 0
    with pytest.raises(ArgumentError, match="padding"):
        prompts.generate(llama, ids(80) * mask)


@pytest.mark.parametrize("name", CACHES)
def test_a_cache_of_the_user_is_refused_by_either_name(name, llama, prompts):
    with pytest.raises(ArgumentError, match=f"not with {name}"):
        prompts.generate(llama, ids(100), **{name: DynamicCache()})


OTHERS = pytest.mark.skipif(Version(__version__) < Version("5.18"), reason="before 5.18, transformers empties no cache")


@torch.no_grad()
@pytest.mark.parametrize("others", [False, pytest.param(True, marks=OTHERS)])
def test_a_cache_that_was_reset_has_no_prompt_even_with_other_tokens_since(model, others):
    past = filled(model)
    assert all(layer.has_all for layer in past.layers)

    past.reset()
    if others:
        model(ids(100, seed=1), **{CACHE: past})

    assert not any(layer.has_all for layer in past.layers)


@torch.no_grad()
@pytest.mark.parametrize("others", [0, 80])
def test_a_cache_that_was_cropped_into_its_prompt_does_not_have_it(llama, others):
    past = filled(llama)
    past.crop(-50)
    if others:
        llama(ids(others, seed=1), **{CACHE: past})

    assert not any(layer.has_all for layer in past.layers)


# The folder


@pytest.mark.parametrize("left", [0, 1, 3000, -1])
def test_a_truncated_block_is_computed_again(llama, prompts, left, caplog):
    tokens = ids(200)
    answer(prompts.generate, llama, tokens)
    path = blocks(prompts)[1]
    os.truncate(path, left % path.stat().st_size)

    assert 64 == known(prompts, llama, tokens)
    assert "computed again" in caplog.text
    assert torch.equal(answer(llama.generate, tokens), answer(prompts.generate, llama, tokens))
    assert 192 == known(prompts, llama, tokens)


def test_a_damaged_block_is_computed_again(model, prompts, caplog):
    tokens = ids(200)
    expected = answer(model.generate, tokens)
    answer(prompts.generate, model, tokens)
    path = blocks(prompts)[1]
    whole = path.read_bytes()
    for damaged in (whole[:-3] + bytes([whole[-3] ^ 64]) + whole[-2:], whole.replace(b'"1.keys"', b'"7.keys"', 1)):
        path.write_bytes(damaged)
        assert damaged != whole

        assert torch.equal(expected, answer(prompts.generate, model, tokens))
        assert "computed again" in caplog.text
        caplog.clear()
        assert 192 == known(prompts, model, tokens)
        assert not caplog.text


def test_a_block_that_the_disk_does_not_return_is_computed_again(llama, prompts, monkeypatch):
    expected = answer(prompts.generate, llama, ids(200))

    def fails(*_: int) -> None:
        raise OSError(5, "the disk did not return the data")

    monkeypatch.setattr(blocks_of_prompts, "bring_in", fails)

    assert 0 == known(prompts, llama, ids(200))
    assert 2 == len(blocks(prompts))  # the one that can't be read is gone
    assert torch.equal(expected, answer(prompts.generate, llama, ids(200)))


def test_a_block_of_other_tokens_under_its_name_is_not_used(llama, prompts):
    answer(prompts.generate, llama, ids(100))
    (one,) = blocks(prompts)
    answer(prompts.generate, llama, ids(100, seed=1))
    (other,) = set(blocks(prompts)) - {one}
    os.replace(one, other)

    assert 0 == known(prompts, llama, ids(100, seed=1))


def test_the_least_recently_used_blocks_go(llama, tmp_path):
    prompts = PromptCache(tmp_path / "prompts")
    answer(prompts.generate, llama, ids(200))
    size = sum(path.stat().st_size for path in blocks(prompts))
    bounded = PromptCache(prompts.folder, max_disk=2 * size + size // 2)
    assert 192 == known(bounded, llama, ids(200))  # later reads alone leave the time of access as it is (relatime)
    answer(bounded.generate, llama, ids(200, seed=1))
    assert 192 == known(bounded, llama, ids(200))

    answer(bounded.generate, llama, ids(200, seed=2))

    assert 192 == known(bounded, llama, ids(200, seed=2))
    assert 192 == known(bounded, llama, ids(200))
    assert 64 >= known(bounded, llama, ids(200, seed=1))
    assert bounded.max_disk >= sum(path.stat().st_size for path in prompts.folder.iterdir())


def test_a_prompt_larger_than_the_budget_is_kept_in_part(llama, tmp_path):
    prompts = PromptCache(tmp_path / "prompts", max_disk="100KB")
    for _ in range(2):
        assert torch.equal(answer(llama.generate, ids(500)), answer(prompts.generate, llama, ids(500)))

    assert 0 < known(prompts, llama, ids(500)) < 448
    assert 100_000 >= sum(path.stat().st_size for path in prompts.folder.iterdir())


def test_a_folder_of_others_is_refused(tmp_path):
    (tmp_path / "letter.txt").write_text("not yours")

    with pytest.raises(ForeignFileError, match="not empty"):
        PromptCache(tmp_path)
    assert ["letter.txt"] == os.listdir(tmp_path)


def test_an_answer_is_there_although_its_prompt_can_not_be_kept(llama, prompts, caplog, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)

    assert torch.equal(answer(llama.generate, ids(100)), answer(prompts.generate, llama, ids(100)))
    assert "is not kept" in caplog.text
    assert [] == [path for path in prompts.folder.iterdir() if path.name.startswith(".offload")]


# Processes


def test_two_processes_share_a_folder(llama, prompts):
    """They write the same prompts at once, and others."""

    def writes(seed: int) -> Callable[[], None]:
        def act() -> None:
            for length in (100, 300):
                answer(prompts.generate, llama, ids(length, seed=seed))
                answer(prompts.generate, llama, ids(length))

        return act

    children = [forked(writes(seed)) for seed in (1, 2)]

    assert [0, 0] == [ended(pid) for pid in children]
    for seed in range(3):
        tokens = ids(300, seed=seed)
        assert 256 == known(prompts, llama, tokens)
        assert torch.equal(answer(llama.generate, tokens), answer(prompts.generate, llama, tokens))


@pytest.mark.campaign("kills")
@pytest.mark.timeout(3600)
def test_a_kill_while_blocks_are_written_loses_nothing_else(llama, tmp_path):
    """The kill comes at the nth call to the system that changes the folder."""
    tokens = ids(300)
    expected = llama.generate(tokens, max_new_tokens=2)
    prompts = PromptCache(tmp_path / "prompts", max_disk="200KB")

    def dies(at: int) -> Callable[[], None]:
        def act() -> None:
            with faults.killed(at):
                for seed in range(3 * at + 1, 3 * at + 4):
                    prompts.generate(llama, ids(300, seed=seed), max_new_tokens=1)

        return act

    killed = 0
    for at in range(0, amount("kills", 24, 150), amount("kills", 6, 1)):
        killed += ended(forked(dies(at))) == -signal.SIGKILL
        assert in_fork(lambda: prompts._blocks.put("", [], 0, lambda _: []))  # the lock is free
        assert torch.equal(expected, prompts.generate(llama, tokens, max_new_tokens=2))
        assert 256 == known(prompts, llama, tokens)
        assert {"prompts.lock"} == {path.name for path in prompts.folder.iterdir() if path.suffix != ".safetensors"}

    assert killed >= amount("kills", 3, 100)
