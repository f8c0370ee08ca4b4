"""Experts on disk are one act by default; `experts_implementation="offload"` asks for it."""

import copy
import errno
import gc
import os
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

import offload
from bench.architectures import names, prepared
from offload.errors import ChangedFileError, ReadError, RowIndexError
from offload.integrations.compressed_tensors import quantize_checkpoint
from offload.kernels import native
from offload.models.experts import prefer_experts
from offload.prefetch import direct, engine, loads, plan
from offload.prefetch.direct import Load
from offload.prefetch.engine import Views
from offload.prefetch.loads import Arriving
from offload.prefetch.plan import SMALL, Value
from offload.prefetch.scratch import take_scratch
from offload.tensor import experts as acts
from offload.tensor.backends import Compiled
from offload.tensor.recipes import Joined, stored_in
from offload.tensor.views import handle_of
from offload.torch_api import storage_id, storage_uses
from tests.checkpoints.forms import FORMS, outcome
from tests.page_cache import needs_direct_reads
from tests.tiny import tiny_checkpoint

pytestmark = [
    pytest.mark.fused,
    pytest.mark.skipif(native.library() is None, reason="the kernels were not built"),
    pytest.mark.filterwarnings("ignore:You passed `quantization_config`:UserWarning"),
]

# Joined of dense parts; packed; turned, with biases and another gate; of rows that alternate; of blocks, by integers.
NAMES = ["qwen3_moe", "fp8-qwen3_moe", "mxfp4-gpt_oss", "inkling2_text", "gguf-qwen3_moe"]
TIGHT = {"max_memory": 0, "read_ahead": "32MiB"}
MIXTURES = [
    name for name in FORMS if any(word in name for word in ("moe", "mixtral", "deepseek", "gpt_oss", "inkling"))
]


def loaded(name: str, folder: Path, **options: Any) -> Any:
    FORMS[name].write(folder)
    return offload.from_pretrained(folder, **FORMS[name].options, experts_implementation="offload", **options)


@contextmanager
def only_mapped() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loads, "direct_candidates", lambda _: [])
        yield


def experts_of(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "is_transposed")]


def routed(dtype: torch.dtype, *picks: list[int], width: int = 128) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, their experts, and weights of these."""
    generator = torch.Generator().manual_seed(1)
    numbers = torch.tensor(picks)
    x = torch.randn(len(numbers), width, generator=generator)
    return x.to(dtype), numbers, torch.rand(numbers.shape, generator=generator).to(dtype)


def in_float64(experts: Any, x: torch.Tensor, numbers: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    experts = copy.deepcopy(experts).double()
    experts.config = copy.copy(experts.config)
    experts.config._experts_implementation = "eager"
    found: torch.Tensor = experts(x.double(), numbers, weights.double())
    return found


def assert_as_near(true: torch.Tensor, expected: torch.Tensor, found: torch.Tensor) -> None:
    """A result is no further from the true one than the expected one is."""
    error, allowed = (found.double() - true).abs(), (expected.double() - true).abs()
    unit = torch.finfo(expected.dtype).eps * true.abs().max()
    assert error.max() <= allowed.max() + unit / 2
    assert error.mean() <= allowed.mean() + unit / 100


def refuse(*_: Any) -> None:
    pytest.fail("joined or decoded")


@torch.no_grad()
@pytest.mark.parametrize(
    "name",
    [one if one in NAMES else pytest.param(one, marks=pytest.mark.campaign("mixtures", only=True)) for one in MIXTURES],
)
def test_experts_are_multiplied_where_they_lie(name, tmp_path, monkeypatch):
    """The result is no further from that in float64 than with dense weights, and exact when that is asked for."""
    model = loaded(name, tmp_path)
    experts = experts_of(model)[-1]
    unrounded = FORMS[name.removesuffix("-bfloat16")] if name.startswith("gguf") else FORMS[name]
    picks = [[0, 1], [2, 1], [1, 0], *[[3, 2]] * min(native.most_rows(model.dtype) - 2, 4)]
    given = x, numbers, weights = routed(model.dtype, *picks, width=getattr(experts, "hidden_dim", 128))
    true = in_float64(experts_of(unrounded.plain(tmp_path))[-1], *given)

    with offload.exact():
        exact = experts(x, numbers, weights)
    with monkeypatch.context() as patch:
        patch.setattr(Joined, "_computed", refuse)
        patch.setattr(Compiled, "decode", refuse)
        found = experts(x, numbers, weights)
        alone = experts(x[1:2], numbers[1:2], weights[1:2])

    assert torch.equal(found[1:2], alone)
    assert_as_near(true, exact, found)


@torch.no_grad()
@pytest.mark.parametrize("name", ["qwen3_moe", "mxfp4-gpt_oss"])
def test_experts_with_many_tokens_are_multiplied_by_torch(name, tmp_path, monkeypatch):
    model = loaded(name, tmp_path)
    experts = experts_of(model)[0]
    many = acts.most_of_an_expert(model.dtype) + 1
    x, numbers, weights = routed(model.dtype, *[[0, 1]] * many, [2, 1])
    with offload.exact():
        exact = experts(x, numbers, weights)
    monkeypatch.setattr(Joined, "_computed", refuse)
    found = experts(x, numbers, weights)

    torch.testing.assert_close(exact, found, rtol=0.02, atol=0.02 * float(exact.abs().max()))


@torch.no_grad()
def test_models_give_the_same_text(tmp_path):
    model = loaded("qwen3_moe", tmp_path)
    plain = outcome(FORMS["qwen3_moe"].plain(tmp_path))
    found = outcome(model)
    with offload.exact():
        exact = outcome(model)

    assert torch.equal(plain.logits, exact.logits)
    assert torch.equal(plain.tokens, found.tokens)
    exact = offload.from_pretrained(tmp_path, experts_implementation="offload", exact=True)
    assert torch.equal(plain.logits, outcome(exact).logits)


@torch.no_grad()
def test_a_token_may_be_routed_to_an_expert_twice_or_to_none(tmp_path):
    experts = experts_of(loaded("qwen3_moe", tmp_path))[0]
    x, numbers, weights = routed(torch.bfloat16, [1, 1], [1, 4], [4, 4])
    found = experts(x, numbers, weights)

    once = experts(x, torch.tensor([[1, 4]] * 3), weights.float().sum(1, keepdim=True).expand(3, 2).bfloat16())
    torch.testing.assert_close(once[0], found[0], rtol=0.02, atol=0.01)
    assert torch.equal(experts(x[1:2], numbers[1:2, :1], weights[1:2, :1])[0], found[1])
    assert not found[2].any()


@torch.no_grad()
@pytest.mark.parametrize("number", [-1, 5])
def test_a_number_beyond_the_experts_is_an_error(number, tmp_path):
    experts = experts_of(loaded("qwen3_moe", tmp_path))[0]

    with pytest.raises(RowIndexError, match=rf"layers\.0.* has 4 experts, .* number {number}"):
        experts(*routed(torch.bfloat16, [0, number]))


DO_NOT_FIT: dict[str, Any] = {
    "narrower tokens": lambda x, numbers, weights: (x[:, ::2].contiguous(), numbers, weights),
    "wider tokens": lambda x, numbers, weights: (torch.cat([x, x], 1), numbers, weights),
    "tokens of three dimensions": lambda x, numbers, weights: (x[None], numbers, weights),
    "more numbers than tokens": lambda x, numbers, weights: (x, numbers.repeat(9, 1), weights.repeat(9, 1)),
    "fewer numbers than tokens": lambda x, numbers, weights: (x, numbers[1:], weights[1:]),
    "more tokens than weights": lambda x, numbers, weights: (x, numbers, weights[1:]),
    "fewer columns of weights": lambda x, numbers, weights: (x, numbers, weights[:, :1]),
    "more columns of weights": lambda x, numbers, weights: (x, numbers, weights.repeat(1, 2)),
    "one number per token": lambda x, numbers, weights: (x, numbers[:, 0], weights[:, 0]),
    "no number": lambda x, numbers, weights: (x, numbers[:, :0], weights[:, :0]),
    "a single number": lambda x, numbers, weights: (x, numbers[0, 0], weights[0, 0]),
    "whole weights": lambda x, numbers, weights: (x, numbers, weights.long()),
    "numbers with fractions": lambda x, numbers, weights: (x, numbers.float(), weights),
}


@torch.no_grad()
@pytest.mark.parametrize("name", NAMES)
def test_sizes_that_do_not_fit_are_answered_as_by_plain_transformers(name, tmp_path):
    ours = experts_of(loaded(name, tmp_path))[-1]
    plain = experts_of(FORMS[name].plain(tmp_path))[-1]
    plain.config._experts_implementation = "grouped_mm"
    given = routed(ours.down_proj.dtype, [0, 1], [2, 1], [1, 0], [3, 3], width=getattr(ours, "hidden_dim", 128))

    for wrong, change in DO_NOT_FIT.items():
        assert answered(plain, change(*given)) == answered(ours, change(*given)), wrong


def answered(experts: Any, given: tuple[torch.Tensor, ...]) -> Any:
    """The shape of the result, or the kind of error."""
    try:
        return experts(*given).shape
    except Exception as error:
        return type(error)


@torch.no_grad()
def test_experts_follow_a_shared_layer_and_a_new_value(tmp_path):
    """The same weights in two modules are one stack; a value that is replaced is not taken for the one before."""
    model = loaded("qwen3_moe", tmp_path)
    first, second = experts_of(model)
    second.gate_up_proj, second.down_proj = first.gate_up_proj, first.down_proj
    given = routed(torch.bfloat16, [0, 1], [2, 3])
    before = first(*given)

    assert torch.equal(before, second(*given))
    first.down_proj.update_values(2 * first.down_proj)
    torch.testing.assert_close(2 * before, second(*given), rtol=0.01, atol=0.01)


def assert_fails_by_name(kind: type[Exception], experts: Any, given: Any, folder: Path, name: str) -> None:
    with pytest.raises(kind) as caught:
        experts(*given)
    text = f"{caught.value} {caught.value.__notes__}"
    assert str(next(folder.glob("*.safetensors"))) in text
    assert f"model.layers.1.mlp.experts.{name}" in text
    assert "expert 2 of" in text


@torch.no_grad()
def test_a_file_that_is_cut_is_an_error_that_names_the_expert(tmp_path):
    model = loaded("qwen3_moe", tmp_path)
    experts, given = experts_of(model)[1], routed(torch.bfloat16, [3, 2])
    experts(*given)
    [path] = tmp_path.glob("*.safetensors")
    os.truncate(path, path.stat().st_size - 64)

    assert_fails_by_name(ChangedFileError, experts, given, tmp_path, "2.")


@pytest.fixture
def past(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many experts each act reads past the page cache."""
    found: list[int] = []
    begin = Arriving.__init__

    def noting(self: Arriving, loads: Sequence[tuple[Load, Views]]) -> None:
        found.append(len(loads))
        begin(self, loads)

    monkeypatch.setattr(Arriving, "__init__", noting)
    monkeypatch.setattr(Value, "is_cached", lambda _: False)  # they were written just now
    for module in (engine, plan):
        monkeypatch.setattr(module, "SMALL", 0)  # as large ones are
    return found


def assert_read_past(model: Any, given: Any, past: list[int], least: int) -> None:
    """Past the page cache, with the bits that are read through it."""
    with only_mapped():
        expected = [experts(*one) for experts, one in zip(experts_of(model), given, strict=True)]
    past.clear()

    found = [experts(*one) for experts, one in zip(experts_of(model), given, strict=True)]

    assert all(map(torch.equal, expected, found))
    assert least <= sum(past)


@needs_direct_reads
@torch.no_grad()
@pytest.mark.parametrize("name", NAMES)
def test_experts_that_will_not_stay_are_read_past_the_page_cache(name, tmp_path, past):
    model = loaded(name, tmp_path, **TIGHT)
    picks = [[number, (number + 1) % 4] for number in (2, 0, 3, 1, 2)] + [[1, 3]] * 40
    given = [routed(model.dtype, *picks, width=getattr(one, "hidden_dim", 128)) for one in experts_of(model)]

    assert_read_past(model, given, past, 4)


@needs_direct_reads
@torch.no_grad()
@pytest.mark.parametrize("implementation", ["offload", "grouped_mm"])
def test_small_scales_stay_and_their_experts_are_read_past_the_page_cache(implementation, tmp_path, past, monkeypatch):
    """Values of up to 64 KiB stay once they are read; the matrices beside them do not, without a budget."""
    for module in (engine, plan):
        monkeypatch.setattr(module, "SMALL", SMALL)
    sizes = {"hidden_size": 256, "moe_intermediate_size": 384, "num_experts": 8}
    tiny_checkpoint(tmp_path / "dense", "qwen3_moe", **sizes, max_shard_size="1MB")
    quantize_checkpoint(tmp_path / "dense", tmp_path / "fp8", "fp8", progress=False)
    model = offload.from_pretrained(tmp_path / "fp8", experts_implementation=implementation, **TIGHT)
    given = [routed(model.dtype, [3, 0], [1, 2], width=256) for _ in experts_of(model)]

    assert_read_past(model, given, past, 4 * len(given))


@needs_direct_reads
@torch.no_grad()
@pytest.mark.parametrize("implementation", ["offload", "grouped_mm"])
def test_nothing_refers_to_the_memory_of_an_expert_that_was_multiplied(implementation, tmp_path, past, monkeypatch):
    """Otherwise it would not be free, and all experts of a layer would be in memory together."""
    model, uses = loaded("qwen3_moe", tmp_path, **TIGHT), []
    model.set_experts_implementation(implementation)
    release = Load.release

    def noting(self: Load) -> None:
        uses.append(storage_uses(storage_id(self._memory.untyped_storage())))
        release(self)

    monkeypatch.setattr(Load, "release", noting)
    for experts in experts_of(model):
        experts(*routed(torch.bfloat16, [0, 1], [2, 3]))

    unused = take_scratch(100)
    assert len(uses) >= 6
    assert {storage_uses(storage_id(unused.untyped_storage()))} == {*uses}


@needs_direct_reads
@torch.no_grad()
@pytest.mark.parametrize("name", [*NAMES, "ct-w4a16-qwen3_moe", "ct-nvfp4a16-qwen3_moe"])
@pytest.mark.parametrize("exact", [True, False], ids=["exact", "fused"])
def test_products_of_groups_take_experts_that_will_not_stay_from_past_the_page_cache(name, exact, tmp_path, past):
    """As without that, and if they are exact, as in plain transformers."""
    model = loaded(name, tmp_path, **TIGHT)
    model.set_experts_implementation("grouped_mm")
    with offload.exact() if exact else nullcontext():
        with only_mapped():
            expected = outcome(model)
        past.clear()
        found = outcome(model)

    assert torch.equal(expected.logits, found.logits)
    assert torch.equal(expected.tokens, found.tokens)
    assert sum(past) >= 4
    if exact:
        assert torch.equal(outcome(FORMS[name].plain(tmp_path)).logits, found.logits)


@needs_direct_reads
@torch.no_grad()
def test_files_that_may_be_written_to_are_read_through_the_page_cache(tmp_path, past):
    """Values in files of ours, which may not have reached the disk yet."""
    model = loaded("qwen3_moe", tmp_path, **TIGHT)
    experts, given = experts_of(model)[0], routed(torch.bfloat16, [2, 0])
    before = experts(*given)
    assert [2] == past

    experts.down_proj.mul_(2)

    torch.testing.assert_close(2 * before, experts(*given), rtol=0.01, atol=0.01)
    assert [2, 0] == past


@needs_direct_reads
@torch.no_grad()
def test_an_expert_that_is_used_again_and_again_stays(tmp_path, past):
    """And replaces what is used less, which is read past the page cache from then on. Each takes 2.25 MiB."""
    sizes = {"hidden_size": 512, "moe_intermediate_size": 768, "num_hidden_layers": 1, "num_experts": 4}
    tiny_checkpoint(tmp_path, "qwen3_moe", **sizes, dtype="bfloat16", max_shard_size="1GB")
    options = {"max_memory": "6MiB", "read_ahead": "32MiB", "dtype": torch.bfloat16}
    model = offload.from_pretrained(tmp_path, experts_implementation="offload", **options)
    [experts], given = experts_of(model), [routed(torch.bfloat16, [number], width=512) for number in range(4)]
    for number in (0, 1, 2, 3, *[2] * 4):
        experts(*given[number])
    past.clear()
    for number in (2, 0, 1, 3):
        experts(*given[number])

    assert 0 == past[0]
    assert 1 <= sum(past)


@needs_direct_reads
@torch.no_grad()
def test_a_failed_read_past_the_page_cache_names_layer_expert_and_file(tmp_path, past, monkeypatch):
    model = loaded("qwen3_moe", tmp_path, **TIGHT)
    experts, given = experts_of(model)[1], routed(torch.bfloat16, [3, 2])
    expected = experts(*given)

    def fail(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(direct, "_read_into", fail)
        assert_fails_by_name(ReadError, experts, given, tmp_path, "")

    assert torch.equal(expected, experts(*given))


@torch.no_grad()
def test_nothing_is_left_of_a_model_that_is_gone(tmp_path):
    model = loaded("qwen3_moe", tmp_path)
    for experts in experts_of(model):
        experts(*routed(torch.bfloat16, [0, 1]))
    values = [weakref.ref(handle_of(experts.down_proj)) for experts in experts_of(model)]
    del model, experts
    gc.collect()

    assert [None, None] == [value() for value in values]


def test_gradients_flow_through_frozen_experts(tmp_path):
    experts = experts_of(loaded("qwen3_moe", tmp_path))[0].requires_grad_(False)
    x, numbers, weights = routed(torch.bfloat16, [0, 1], [2, 1])
    x.requires_grad_()
    experts(x, numbers, weights).sum().backward()

    found, x.grad = x.grad, None
    experts.config._experts_implementation = "grouped_mm"
    experts(x, numbers, weights).sum().backward()
    assert torch.equal(x.grad, found)


@torch.no_grad()
def test_experts_in_memory_are_computed_first_and_others_in_file_order(tmp_path, monkeypatch):
    experts = experts_of(loaded("qwen3_moe", tmp_path))[0]
    given = routed(torch.bfloat16, [3, 0], [1, 2])
    expected = experts(*given)
    asked, computed, plain = [], [], acts.Act._multiply

    def noting(act: Any, some: Any, **how: Any) -> Any:
        computed.append([one.number for one in some])
        return plain(act, some, **how)

    monkeypatch.setattr(acts, "touch_if_resident", lambda reads: ".experts.2." in reads[0][0].name)
    monkeypatch.setattr(acts, "prefetch", lambda reads: asked.append([handle.name for handle, _ in reads]))
    monkeypatch.setattr(acts.Act, "_multiply", noting)

    assert torch.equal(expected, experts(*given))
    stored = stored_in([handle_of(experts.gate_up_proj), handle_of(experts.down_proj)])
    starts = {handle.name: handle.extent[0] for handle in stored}
    [found] = asked
    assert 9 == len(found)
    assert sorted(found, key=starts.get) == found
    assert [[2], [0], [1], [3]] == computed


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "offload"),
        ({"experts_implementation": "grouped_mm"}, "grouped_mm"),
        ({"experts_implementation": "eager"}, "eager"),
        ({"exact": True}, "grouped_mm"),
        ({"exact": True, "experts_implementation": "offload"}, "grouped_mm"),
        ({"device_map": "cpu"}, "grouped_mm"),
    ],
)
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "fp8-qwen3_moe"])
def test_experts_on_disk_are_one_act_unless_something_else_is_asked_for(name, options, expected, tmp_path):
    FORMS[name].write(tmp_path)
    model = offload.from_pretrained(tmp_path, **FORMS[name].options, **options)

    assert expected == model.config._experts_implementation
    model.save_pretrained(tmp_path / "saved")
    assert "offload" not in (tmp_path / "saved" / "config.json").read_text()


def test_a_configuration_may_ask_for_another_implementation(tmp_path):
    FORMS["qwen3_moe"].write(tmp_path)
    config = Qwen3MoeConfig.from_pretrained(tmp_path, experts_implementation="grouped_mm")
    model = offload.from_pretrained(tmp_path, config=config)

    assert "grouped_mm" == model.config._experts_implementation
    one_act = offload.from_pretrained(tmp_path).config
    exact = offload.from_pretrained(tmp_path, config=one_act, exact=True)
    assert ["offload", "grouped_mm"] == [one_act._experts_implementation, exact.config._experts_implementation]


def dispatched(folder: Path, dtype: torch.dtype) -> Any:
    with offload.init_empty_weights():
        empty = AutoModelForCausalLM.from_config(Qwen3MoeConfig.from_pretrained(folder), dtype=dtype)
    return offload.load_checkpoint_and_dispatch(empty, folder).eval()


LOADERS: dict[str, Any] = {
    "from_pretrained": lambda folder, dtype: offload.from_pretrained(folder, dtype=dtype),
    "load_checkpoint_and_dispatch": dispatched,
    "disk_offload": lambda folder, dtype: offload.disk_offload(
        Qwen3MoeForCausalLM.from_pretrained(folder, dtype=dtype)
    ),
}


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("load", LOADERS)
def test_dense_experts_are_as_near_to_the_true_result_as_plain_ones(load, dtype, tmp_path):
    """Of hidden states of the model; they are those of the act by name, and exact ones are plain transformers'."""
    FORMS["qwen3_moe"].write(tmp_path)
    plain = Qwen3MoeForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    given: list[tuple[torch.Tensor, ...]] = []
    inner = experts_of(plain)[-1]
    hook = inner.register_forward_pre_hook(lambda _, args: given.append(args))
    logits = plain(torch.arange(3, 24)[None]).logits
    hook.remove()
    [(x, numbers, weights)] = given
    expected = inner(x, numbers, weights)
    true = in_float64(inner, x, numbers, weights)

    model = LOADERS[load](tmp_path, dtype)
    experts = experts_of(model)[-1]
    assert "offload" == model.config._experts_implementation
    found, alone = experts(x, numbers, weights), experts(x[5:6], numbers[5:6], weights[5:6])

    assert torch.equal(found[5:6], alone)
    assert_as_near(true, expected, found)
    named = offload.from_pretrained(tmp_path, dtype=dtype, experts_implementation="offload")
    assert torch.equal(experts_of(named)[-1](x, numbers, weights), found)
    with offload.exact():
        assert torch.equal(logits, model(torch.arange(3, 24)[None]).logits)
        assert torch.equal(expected, experts(x, numbers, weights))


@torch.no_grad()
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("way", ["a write to one expert", "a new value"])
def test_a_new_value_of_one_expert_is_seen_and_the_others_are_as_before(name, way, tmp_path):
    FORMS[name].write(tmp_path)
    experts = experts_of(offload.from_pretrained(tmp_path))[0]
    given = routed(experts.down_proj.dtype, [1, 1], [2, 3])
    before = experts(*given)
    new = experts.down_proj.materialize()
    new[1] = 0
    if way == "a new value":
        experts.down_proj.update_values(new)
    else:
        experts.down_proj[1] = 0
    found = experts(*given)

    assert torch.equal(before[1], found[1])
    assert not torch.equal(before[0], found[0])
    if name == "qwen3_moe":  # without a bias
        assert not found[0].any()


@torch.no_grad()
def test_a_model_that_is_copied_is_one_act_and_one_that_is_pickled_is_plain(tmp_path):
    """A reader without `offload` knows transformers' implementations alone."""
    FORMS["qwen3_moe"].write(tmp_path)
    model = offload.from_pretrained(tmp_path)
    torch.save(model, tmp_path / "model.pt")

    assert "offload" == copy.deepcopy(model).config._experts_implementation
    loaded_again = torch.load(tmp_path / "model.pt", weights_only=False)
    assert "grouped_mm" == loaded_again.config._experts_implementation
    assert torch.equal(outcome(FORMS["qwen3_moe"].plain(tmp_path)).logits, outcome(loaded_again).logits)


@torch.no_grad()
def test_experts_that_do_not_tell_of_a_norm_or_of_ranks_are_preferred_and_run(tmp_path, monkeypatch):
    """Those of transformers before 5.20 do not tell of a norm, and those before 5.18 of ranks either."""
    model = loaded("fp8-qwen3_moe", tmp_path)
    given = routed(model.dtype, [0, 1], [2, 4])
    expected = [experts(*given) for experts in experts_of(model)]
    for experts in experts_of(model):
        monkeypatch.delattr(experts, "has_post_expert_norm", raising=False)
        monkeypatch.delattr(experts, "_is_expert_parallel", raising=False)
    model.set_experts_implementation("grouped_mm")
    monkeypatch.setattr(Compiled, "decode", refuse)
    prefer_experts(model)

    assert "offload" == model.config._experts_implementation
    assert all(map(torch.equal, expected, (experts(*given) for experts in experts_of(model))))


# All of transformers' mixtures

ARCHITECTURES = ["mixtral", "qwen2_moe", "qwen3_moe", "qwen3_next", "deepseek_v2", "deepseek_v3", "gpt_oss", "glm4_moe"]
ARCHITECTURES += ["granitemoe", "granitemoeshared", "granitemoehybrid", "olmoe", "jamba", "llama4_text", "minimax"]
ARCHITECTURES += ["minimax_m2", "hunyuan_v1_moe", "ernie4_5_moe", "dots1", "phimoe", "lfm2_moe", "nemotron_h"]
ARCHITECTURES += ["flex_olmo", "afmoe"]


@torch.no_grad()
@pytest.mark.campaign("mixtures", only=True)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_each_mixture_is_exact_when_asked_and_close_otherwise(name, tmp_path):
    subject = prepared(name, names("causal")[name], tmp_path / "source")
    plain = subject.model_class.from_pretrained(subject.folder).eval()
    implementation = "offload" if plain._can_set_experts_implementation() else None
    model = offload.from_pretrained(subject.folder, subject.model_class, experts_implementation=implementation)
    prompt = torch.tensor([[3, 17, 42, 8, 64, 5, 91]])
    told = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    expected = plain(prompt).logits

    with offload.exact():
        assert torch.equal(expected, model(prompt).logits)
    torch.testing.assert_close(expected, model(prompt).logits, rtol=1e-3, atol=1e-4 * float(expected.abs().max()))
    assert torch.equal(plain.generate(prompt, **told), model.generate(prompt, **told))
