"""Experts of several batches are one act, and each batch gets the bits that it gets alone."""

import os
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Qwen3MoeForCausalLM

import offload
from bench.page_cache import files_in, make_cold
from offload.batches import gathering
from offload.batches.mapping import map_batches
from offload.errors import ChangedFileError
from offload.kernels import native
from offload.prefetch.engine import counts
from offload.tensor import experts as acts
from tests.batches.lockstep import assert_as_one_by_one, mixture
from tests.checkpoints.forms import FORMS
from tests.page_cache import needs_direct_reads, needs_page_cache

pytestmark = [
    pytest.mark.fused,
    pytest.mark.skipif(native.library() is None, reason="the kernels were not built"),
    pytest.mark.filterwarnings("ignore:You passed `quantization_config`:UserWarning"),
]

NAMES = ["qwen3_moe", "fp8-qwen3_moe", "mxfp4-gpt_oss", "ct-w4a16-qwen3_moe", "inkling2_text", "gguf-qwen3_moe"]


def loaded(folder: Path, name: str = "qwen3_moe", **options: Any) -> Any:
    FORMS[name].write(folder)
    options = {"experts_implementation": "offload", **FORMS[name].options, **options}
    model = offload.from_pretrained(folder, **options)
    model.requires_grad_(False)
    return model


def batches_of(*lengths: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(64, (1, length), generator=generator) for length in lengths]


def experts_of(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "is_transposed")]


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many batches there were in each act."""
    found: list[int] = []
    plain = acts.Act.result

    def noting(self: acts.Act) -> torch.Tensor | None:
        found.append(len(self._tokens_of))
        return plain(self)

    monkeypatch.setattr(acts.Act, "result", noting)
    return found


@torch.no_grad()
@pytest.mark.parametrize("name", NAMES)
def test_batches_of_any_length_get_the_bits_that_they_get_alone(name, tmp_path, computed):
    """Of some an expert has few tokens, of others many, which torch multiplies."""
    model = loaded(tmp_path, name)
    many = 3 * acts.most_of_an_expert(model.dtype)
    batches = batches_of(1, 5, many, 2, many, many, 1, 12)

    assert_as_one_by_one(lambda batch: model(batch).logits, batches, model, computed, in_flight=8)
    assert [8] * len(experts_of(model)) == computed


@torch.no_grad()
def test_an_expert_is_multiplied_once_for_all_batches(tmp_path, monkeypatch):
    model, batches = loaded(tmp_path), batches_of(*[1] * 12)
    calls: Counter[int] = Counter()
    plain = native.multiply_experts

    def noting(experts: Sequence[native.ExpertRows], *given: Any, **options: Any) -> None:
        calls["calls"] += 1
        calls["experts"] += len(experts)
        plain(experts, *given, **options)

    monkeypatch.setattr(native, "multiply_experts", noting)
    list(map_batches(model, batches, model, in_flight=12))

    layers = len(experts_of(model))
    assert {"calls": layers} == {"calls": calls["calls"]}
    assert calls["experts"] <= layers * model.config.num_experts


@torch.no_grad()
def test_batches_leave_a_block_in_their_order(tmp_path, computed):
    model, order = loaded(tmp_path), []

    def fn(number: int) -> None:
        x = model.model.embed_tokens(batches_of(2)[0])
        position_embeddings = model.model.rotary_emb(x, torch.arange(2)[None])
        for layer in model.model.layers:
            x = layer(x, position_embeddings=position_embeddings)
            order.append((layer.self_attn.layer_idx, number))

    list(map_batches(fn, range(4), model, in_flight=4))

    assert [(layer, number) for layer in range(len(model.model.layers)) for number in range(4)] == order
    assert {4} == {*computed}


@torch.no_grad()
def test_hooks_inside_of_a_block_see_one_batch_after_the_other(tmp_path, computed):
    model, order = loaded(tmp_path), []
    number = iter(range(100))
    before = model.model.layers[0].self_attn.register_forward_pre_hook(lambda *_: order.append(("in", next(number))))
    after = model.model.layers[0].mlp.register_forward_hook(lambda *_: order.append(("out", next(number))))
    list(map_batches(model, batches_of(1, 1, 1), model, in_flight=3))
    before.remove()
    after.remove()

    assert ["in", "out"] * 3 == [one for one, _ in order]
    assert computed.count(1) == 3
    assert computed.count(3) == len(model.model.layers) - 1


@torch.no_grad()
def test_no_more_are_together_than_memory_is_for(tmp_path, computed, monkeypatch):
    model, batches = loaded(tmp_path), batches_of(*[4] * 8)
    width = model.config.hidden_size
    monkeypatch.setattr(gathering, "_BYTES", 3 * 4 * model.config.num_experts_per_tok * width * 4)

    assert_as_one_by_one(lambda batch: model(batch).logits, batches, model, computed, in_flight=8)
    assert [3, 3, 2] * len(model.model.layers) == computed


@torch.no_grad()
@pytest.mark.parametrize("own", [torch.inference_mode, lambda: torch.autocast("cpu", torch.float16), torch.no_grad])
def test_batches_that_compute_in_another_way_are_apart(own, tmp_path, computed):
    model, batches = loaded(tmp_path, dtype=torch.float32), batches_of(2, 3, 2, 3)

    def fn(numbered: tuple[int, torch.Tensor]) -> torch.Tensor:
        number, batch = numbered
        with own() if number % 2 else nullcontext():
            found: torch.Tensor = model(batch).logits
            return found

    expected = [fn(one) for one in enumerate(batches)]
    computed.clear()
    found = list(map_batches(fn, enumerate(batches), model, in_flight=4))

    assert all(map(torch.equal, expected, found))
    assert [one.is_inference() for one in expected] == [one.is_inference() for one in found]
    assert {4} == {*computed} if own is torch.no_grad else 4 not in computed


@torch.no_grad()
def test_an_error_of_one_batch_is_only_its_own(tmp_path, monkeypatch):
    """One fails before its experts, and one is routed to an expert that is none."""
    model, batches = loaded(tmp_path), batches_of(2, 3, 4, 5)
    layer = model.model.layers[1]
    expected = [model(batch).logits for batch in batches]
    plain = type(layer.mlp.gate).forward

    def routed(self: Any, hidden: torch.Tensor) -> Any:
        if len(hidden) == 3 and self is layer.mlp.gate:
            raise ArithmeticError("no router")
        logits, weights, numbers = plain(self, hidden)
        return logits, weights, numbers + 1000 if len(hidden) == 4 and self is layer.mlp.gate else numbers

    monkeypatch.setattr(type(layer.mlp.gate), "forward", routed)

    def fn(batch: torch.Tensor) -> Any:
        try:
            return model(batch).logits
        except Exception as error:
            return error

    first, second, third, fourth = map_batches(fn, batches, model, in_flight=4)

    assert torch.equal(expected[0], first)
    assert torch.equal(expected[3], fourth)
    assert "no router" in str(second)
    assert "was routed to number 10" in str(third)


@torch.no_grad()
def test_a_file_that_is_cut_is_an_error_that_names_the_expert(tmp_path):
    model, batches = loaded(tmp_path), batches_of(30, 30)
    [path] = tmp_path.glob("*.safetensors")
    list(map_batches(model, batches, model, in_flight=2))
    os.truncate(path, path.stat().st_size // 2)

    with pytest.raises(ChangedFileError) as caught:
        list(map_batches(model, batches, model, in_flight=2))

    text = f"{caught.value} {caught.value.__notes__}"
    assert str(path) in text
    assert "in batch 0" in text


def model_of_large_experts(folder: Path, **options: Any) -> Any:
    """The experts of each of two layers take 18 MiB, the budget is 4 MiB."""
    sizes = {"hidden_size": 512, "moe_intermediate_size": 768, "num_hidden_layers": 2, "num_experts_per_tok": 4}
    Qwen3MoeForCausalLM(mixture(**sizes)).to(torch.bfloat16).save_pretrained(folder)
    options |= {"max_memory": "4MiB", "experts_implementation": "offload", "dtype": torch.bfloat16}
    return offload.from_pretrained(folder, **options).requires_grad_(False)


@needs_page_cache
@torch.no_grad()
def test_experts_that_do_not_fit_in_memory_are_read_once_for_all_batches(tmp_path, monkeypatch):
    model = model_of_large_experts(tmp_path, read_ahead="1MiB")
    batches = batches_of(*[2] * 16)

    def read(most: int) -> int:
        monkeypatch.setattr(gathering, "_MOST", most)
        before = counts().bytes_read
        list(map_batches(model, batches, model, in_flight=16))
        return counts().bytes_read - before

    read(16)
    assert 2 * read(16) < read(1)


@needs_page_cache
@needs_direct_reads
@torch.no_grad()
@pytest.mark.parametrize("most", [1, 8, 16])
def test_experts_that_several_acts_need_are_read_once_where_they_fit(tmp_path, monkeypatch, most):
    """The last act reads what it needs past the page cache; what another one will need is kept for that."""
    model = model_of_large_experts(tmp_path, read_ahead="32MiB")
    monkeypatch.setattr(gathering, "_MOST", most)
    for _ in range(2):  # what is known is what was used
        offload.budget.evict(model)
        make_cold(files_in(tmp_path))
        before = counts().bytes_read
        list(map_batches(model, batches_of(*[2] * 16), model, in_flight=16))

    once = 2 * 18 * 2**20
    assert once / 2 < counts().bytes_read - before < 1.2 * once
