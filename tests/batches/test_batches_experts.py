"""Experts that are joined from several values: what stays in memory for all batches is computed once a block."""

import gc
import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import Qwen3MoeForCausalLM

import offload
from offload.batches.mapping import map_batches
from offload.prefetch import engine
from offload.prefetch.engine import counts
from offload.storage.handle import Handle
from offload.storage.layout import contiguous
from offload.tensor.recipes import Joined, Piece, stored_in
from offload.tensor.views import handle_of
from offload.tensor.wrapper import wrap_handle
from tests.batches.lockstep import assert_as_one_by_one, mixture
from tests.page_cache import needs_page_cache

MIB = 1 << 20
LAYERS, EXPERTS = 3, 8  # 1 MiB for the first matrix of an expert, which is joined of two, and half for the other

pytestmark = pytest.mark.skipif(not hasattr(F, "grouped_mm"), reason="this torch has no grouped_mm")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "moe_intermediate_size": 512, "num_hidden_layers": LAYERS, "num_experts_per_tok": 2}
    folder: Path = tmp_path_factory.mktemp("mixture")
    Qwen3MoeForCausalLM(mixture(**sizes)).save_pretrained(folder)
    return folder


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Counter[Any]:
    """How often each expert's matrix was computed."""
    found: Counter[Any] = Counter()
    plain = Joined._computed

    def noting(self: Joined, box: Any, device: torch.device) -> torch.Tensor:
        if len(box.size) == 3 and box.size[0] == 1:
            found[tuple(box.size), id(self), box.first] += 1
        return plain(self, box, device)

    monkeypatch.setattr(Joined, "_computed", noting)
    return found


def loaded(folder: Path, **options: Any) -> Any:
    model = offload.from_pretrained(folder, dtype=torch.float32, **options)
    model.set_experts_implementation("grouped_mm")
    model.requires_grad_(False)
    return model


def batches_of(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(64, (1, 12), generator=generator) for _ in range(count)]


@torch.no_grad()
def test_resident_experts_are_computed_once_per_sweep(folder, asked):
    model, batches = loaded(folder), batches_of(8)
    for batch in batches:
        model(batch)
    assert 8 == max(asked.values())

    assert_as_one_by_one(lambda batch: model(batch).logits, batches, model, asked, in_flight=4)
    assert {2} == {*asked.values()}
    assert LAYERS * EXPERTS == len(asked)


def test_experts_are_computed_once_for_all_forward_and_once_for_all_backward(folder, asked):
    model = loaded(folder)
    embed = model.get_input_embeddings()

    def fn(batch: torch.Tensor) -> torch.Tensor:
        inputs = embed(batch).detach().requires_grad_()
        model(inputs_embeds=inputs).logits.pow(2).sum().backward()
        return inputs.grad

    assert_as_one_by_one(fn, batches_of(4), model, asked, in_flight=4)
    assert {2} == {*asked.values()}


@needs_page_cache
@torch.no_grad()
@pytest.mark.parametrize(
    ("dtype", "budget", "kept"), [(torch.float32, 2, 1), (torch.float32, 8, 4), (torch.bfloat16, 20, 12)]
)
def test_results_take_at_most_half_of_the_budget(folder, tmp_path, asked, monkeypatch, dtype, budget, kept):
    """In the last case all that is stored stays, and of the 12 MiB that are cast for a layer 10."""
    if dtype == torch.bfloat16:
        Qwen3MoeForCausalLM.from_pretrained(folder, dtype=dtype).save_pretrained(tmp_path)
        folder = tmp_path
    made: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []
    plain = Joined._computed

    def noting(self: Joined, box: Any, device: torch.device) -> torch.Tensor:
        alive.append(sum(one() is not None for one in made))
        result = plain(self, box, device)
        made.append(weakref.ref(result))
        return result

    monkeypatch.setattr(Joined, "_computed", noting)
    model = loaded(folder, max_memory=budget * MIB, read_ahead="1MiB")

    assert_as_one_by_one(lambda batch: model(batch).logits, batches_of(4), model, asked, alive, in_flight=4)
    for shape in {key[0] for key in asked}:
        assert 1 < max(times for key, times in asked.items() if key[0] == shape)
    assert max(alive) <= kept + 1  # and the last one


@torch.no_grad()
def test_a_stack_and_its_transpose_are_separate_results(tmp_path):
    torch.manual_seed(0)
    whole = torch.randn(2, 512, 512)
    halves = [
        Piece(handle_of(offload.OffloadedTensor.from_original_tensor(half.contiguous(), f"half {number}", tmp_path)))
        for number, half in enumerate(whole.split(256, dim=1))
    ]
    recipe = Joined(contiguous(torch.float32, (2, 512, 512)), halves, [(0, 0, 0), (0, 256, 0)])
    stack = wrap_handle(Handle.compose(recipe, "stack"), torch.device("cpu"))
    ends = torch.tensor([1, 2], dtype=torch.int32)

    class Twice(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stack = torch.nn.Parameter(stack, False)

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return F.grouped_mm(F.grouped_mm(rows, self.stack, offs=ends), self.stack.mT, offs=ends)

    model = torch.nn.Sequential(Twice(), Twice())
    batches = [torch.randn(2, 512) for _ in range(3)]

    found = list(map_batches(model, batches, model, in_flight=3))

    for batch, one in zip(batches, found, strict=True):
        for _ in model:
            batch = F.grouped_mm(F.grouped_mm(batch, whole, offs=ends), whole.mT, offs=ends)
        assert torch.equal(batch, one)


@torch.no_grad()
def test_the_next_batch_sees_a_stack_that_a_batch_replaced(folder):
    model, batches = loaded(folder), batches_of(2)
    experts = model.model.layers[1].mlp.experts
    new = torch.randn_like(experts.down_proj.materialize())
    forward, calls = type(experts).forward, []

    class Replacing(type(experts)):  # type: ignore[misc]
        def forward(self, *args: Any) -> torch.Tensor:
            found = forward(self, *args)
            calls.append(None)
            if len(calls) == 1:
                self.down_proj.update_values(new)
            return found

    experts.__class__ = Replacing
    first, second = (out.logits for out in map_batches(model, batches, model, in_flight=2))

    assert torch.equal(model(batches[1]).logits, second)
    assert not torch.equal(model(batches[0]).logits, first)


@needs_page_cache
@torch.no_grad()
def test_a_sweep_reads_the_bytes_over_the_budget_once(folder):
    size = LAYERS * EXPERTS * 1.5 * MIB
    budget = 24 * MIB
    model, batches = loaded(folder, max_memory=budget, read_ahead="4MiB"), batches_of(24)
    list(map_batches(model, batches[:16], model, in_flight=8))
    before = counts().bytes_read
    list(map_batches(model, batches, model, in_flight=8))

    a_block = EXPERTS * 1.5 * MIB
    assert (counts().bytes_read - before) / 3 <= 1.1 * (size - budget + a_block + 4 * MIB)


@torch.no_grad()
def test_batches_that_have_ended_have_no_part_of_the_window(folder):
    """Nor do they keep the files of a model that is gone."""
    model, batches = loaded(folder), batches_of(4)
    values = [weakref.ref(handle) for handle in stored_in(map(handle_of, model.parameters()))]
    for _ in range(3):
        list(map_batches(model, batches, model, in_flight=2))

    assert [] == [stream for stream in engine._ENGINE.streams.live if stream.lease is not None]
    del model
    gc.collect()
    assert 1 >= sum(value() is not None for value in values)  # the reader notes the last one that it read
