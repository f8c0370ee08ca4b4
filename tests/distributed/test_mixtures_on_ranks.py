"""Mixtures of experts on two ranks: each rank has a part of each expert, or some experts completely."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import AutoConfig

import offload
from bench.architectures import names, prepared
from offload.tensor.locals import local_of
from tests.checkpoints.forms import FORMS
from tests.distributed.ranks import run_ranks
from tests.distributed.test_ranks import decoded, full_model, of_experts
from tests.models.test_experts_implementation import ARCHITECTURES, MIXTURES

pytestmark = [pytest.mark.fused, pytest.mark.parametrize("way", ["by_plan", "by_experts"])]
IN_THE_CAMPAIGN = pytest.mark.campaign("mixtures", only=True)
VIEWS = ["inkling2_text", "gguf-qwen3_moe"]  # whose experts are values of another shape
PLAIN_REFUSES = ("has no `ep_plan`", "Cannot evenly shard")
PROMPT = torch.tensor([[3, 17, 42, 8, 64, 5, 91]])


def settings(way: str) -> dict[str, Any]:
    return {"tp_plan": "auto"} if way == "by_plan" else {"distributed_config": of_experts()}


@IN_THE_CAMPAIGN
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_each_mixture_gives_on_ranks_what_the_plain_one_gives(tmp_path, name, way):
    subject = prepared(name, names("causal")[name], tmp_path)
    given = {"model_class": subject.model_class}

    assert_as_plain(
        lambda: subject.model_class.from_pretrained(tmp_path, **settings(way)).eval(),
        lambda **options: offload.from_pretrained(tmp_path, **given, **settings(way), **options),
    )


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in VIEWS else IN_THE_CAMPAIGN) for name in MIXTURES]
)
def test_each_form_of_a_mixture_gives_on_ranks_what_a_dense_one_gives(tmp_path, name, way):
    form = FORMS[name]
    form.write(tmp_path)
    is_packed = "gguf_file" in form.options or hasattr(AutoConfig.from_pretrained(tmp_path), "quantization_config")
    dense = decoded(form, tmp_path) if is_packed else tmp_path

    assert_as_plain(
        lambda: full_model(dense, **{"dtype": "auto", **form.options, "gguf_file": None}, **settings(way)),
        lambda **options: offload.from_pretrained(tmp_path, **form.options, **settings(way), **options),
    )


def assert_as_plain(in_memory: Callable[[], Any], on_disk: Callable[..., Any]) -> None:
    """Two ranks have the same shapes, in exact mode the same bits, else about the same; in float32 the same tokens."""

    def of_disk(_: int) -> tuple[Any, ...]:
        model = on_disk()
        assert all(offload.is_offloaded(local_of(one)) for one in model.parameters())
        shapes = shapes_of(model)
        with offload.exact():
            exact = answers(model)
        if model._can_set_experts_implementation():
            model = on_disk(experts_implementation="offload")
        return shapes, exact, answers(model)

    def of_memory(_: int) -> tuple[Any, ...]:
        model = in_memory()
        return shapes_of(model), answers(model), model.dtype

    try:
        plain = run_ranks(2, of_memory)
    except AssertionError as error:
        if not any(reason in str(error) for reason in PLAIN_REFUSES):
            raise
        pytest.skip(f"plain transformers: {str(error).strip().splitlines()[-1]}")
    for (shapes, (logits, tokens), dtype), (found, exact, close) in zip(plain, run_ranks(2, of_disk), strict=True):
        assert shapes == found
        assert torch.equal(logits, exact[0])
        assert torch.equal(tokens, exact[1])
        most = float(logits.abs().max()) * (1e-4 if dtype == torch.float32 else 3e-2)
        torch.testing.assert_close(logits, close[0], rtol=0, atol=most)
        assert torch.equal(tokens, close[1]) or dtype != torch.float32


@torch.no_grad()
def answers(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits, and tokens."""
    told = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    return model(PROMPT).logits, model.generate(PROMPT, **told)


def shapes_of(model: Any) -> dict[str, tuple[int, ...]]:
    """Of what this rank has of each value."""
    return {name: tuple(local_of(value).shape) for name, value in model.named_parameters()}
