"""A model's own budget: it has all of the model's values, and what replaces them."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3MoeConfig

import offload
from offload.prefetch.engine import POOL
from offload.prefetch.plan import SMALL, Pool
from offload.prefetch.value import page_state_of
from offload.tensor.recipes import stored_in
from offload.tensor.views import handle_of
from offload.tensor.wrapper import is_offloaded

SHAPE = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
CONFIGS = {
    "dense": LlamaConfig(**SHAPE, **HEADS),
    "tied": LlamaConfig(**SHAPE, **HEADS, tie_word_embeddings=True),
    "experts": Qwen3MoeConfig(**SHAPE, **HEADS, moe_intermediate_size=256, num_experts=4, num_experts_per_tok=2),
}

pytestmark = pytest.mark.usefixtures("nothing_new_elsewhere")


@pytest.fixture
def nothing_new_elsewhere() -> Iterator[None]:
    """The process's budget has no value that it did not have before."""
    before = {id(value) for value in POOL.values()}
    yield
    assert not [value for value in POOL.values() if id(value) not in before]


@pytest.fixture(params=[(kind, dtype) for kind in CONFIGS for dtype in (torch.float32, torch.bfloat16)], ids=str)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """Stored in float32; what is read in another dtype is cast."""
    kind, dtype = request.param
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(CONFIGS[kind], dtype=torch.float32).save_pretrained(tmp_path)
    return offload.from_pretrained(tmp_path, dtype=dtype, max_memory="1GiB")


def budgets_of(model: Any) -> set[Pool | None]:
    """Of the values of more than 64 KiB."""
    stored = stored_in(handle_of(member) for member in model.state_dict().values() if is_offloaded(member))
    return {page_state_of(handle).pool for handle in stored if handle.extent[1] > SMALL}


def replaced(model: Any) -> None:
    for member in model.parameters():
        member.update_values(member.materialize() * 2)


CHANGES: dict[str, Callable[[Any], object]] = {
    "as loaded": lambda model: None,
    "replaced": replaced,
    "mapped to another dtype": lambda model: offload.map_values(lambda _, one: one.half(), model, strict_dtype=False),
    "cast": lambda model: model.half(),
}


@torch.no_grad()
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_the_budget_has_all_values_embeddings_and_experts_too(model, change):
    change(model)
    model(torch.arange(64)[None])
    model.get_input_embeddings().weight.sum()

    assert [1 << 30] == [pool.max_memory for pool in budgets_of(model)]


def test_values_pinned_under_another_budget_stay_there(tmp_path):
    """An embedding that two models share; the second one's checkpoint lacks it."""

    def load(model: torch.nn.Module, name: str, budget: str) -> None:
        save_file({name: torch.ones(512, 512)}, tmp_path / f"{budget}.safetensors")
        offload.load_checkpoint_and_dispatch(
            model, tmp_path / f"{budget}.safetensors", device_map="disk", max_memory=budget
        )

    with offload.init_empty_weights():
        first = torch.nn.Sequential(torch.nn.Embedding(512, 512))
        second = torch.nn.Sequential(first[0], torch.nn.Linear(512, 512, bias=False))
    load(first, "0.weight", "1GiB")
    offload.budget.keep_resident(first)
    load(second, "1.weight", "2GiB")

    page_state = page_state_of(handle_of(first[0].weight))
    assert 1 << 30 == page_state.pool.max_memory
    assert [True] == [value.pinned for value in page_state.ranges.values()]
    assert 2 << 30 == page_state_of(handle_of(second[1].weight)).pool.max_memory
