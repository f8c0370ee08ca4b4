"""Models of transformers, diffusers and sentence-transformers give the same results in lockstep as one by one."""

from typing import Any

import pytest
import torch

import offload
from bench.architectures import names, prepared
from bench.equality import tensors_in
from offload.batches.mapping import map_batches
from tests.equal import assert_equal

ARCHITECTURES = [
    *(("causal", name) for name in ("llama", "gpt2", "mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss", "mamba")),
    *(("causal", name) for name in ("gemma3_text", "bloom", "zamba", "falcon", "opt")),
    *(("seq2seq", name) for name in ("t5", "bart", "mbart")),
    *(("encoder", name) for name in ("bert", "clip", "albert", "qwen2_vl", "vit", "whisper")),
]


def outputs(model: Any, inputs: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: one.detach().clone() for name, one in tensors_in(model(**inputs))}


def varied(probe: dict[str, Any], count: int) -> list[dict[str, Any]]:
    """Inputs of the same kind with different numbers."""
    batches = []
    for at in range(count):
        generator = torch.Generator().manual_seed(at)
        batches.append(
            {
                name: value + torch.randn(value.shape, generator=generator).to(value.dtype)
                if isinstance(value, torch.Tensor) and value.is_floating_point() and value.numel() > 8
                else value.roll(at, -1)
                if name == "input_ids"
                else value
                for name, value in probe.items()
            }
        )
    return batches


@torch.no_grad()
@pytest.mark.parametrize(("kind", "name"), ARCHITECTURES, ids=lambda value: value)
def test_every_architecture_gives_the_same_results_as_one_by_one(kind, name, tmp_path):
    subject = prepared(name, names(kind)[name], tmp_path / "source")
    model = offload.from_pretrained(subject.folder, model_class=subject.model_class).eval()
    assert subject.probe is not None
    batches = varied(subject.probe, 4)
    expected = [outputs(model, batch) for batch in batches]

    found = list(map_batches(lambda batch: outputs(model, batch), batches, model, in_flight=3))

    assert_equal(expected, found)


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "mixtral", "mamba", "t5"])
def test_generation_of_different_lengths_gives_the_same_tokens_as_one_by_one(name, tmp_path):
    kind = "seq2seq" if name == "t5" else "causal"
    subject = prepared(name, names(kind)[name], tmp_path / "source")
    model = offload.from_pretrained(subject.folder, model_class=subject.model_class).eval()

    def fn(at: int) -> torch.Tensor:
        prompt = torch.arange(3, 3 + 2 * (at + 1)).reshape(2, -1)
        ways: list[dict[str, Any]] = [{}, {"num_beams": 2}, {"use_cache": False}]
        way = ways[at % 3] if name != "mamba" else {}
        if name == "t5":
            way = {**way, "decoder_start_token_id": 0}
        return model.generate(prompt, do_sample=False, max_new_tokens=2 + 3 * (at % 3), pad_token_id=0, **way)

    expected = [fn(at) for at in range(7)]
    found = list(map_batches(fn, range(7), model, in_flight=3))

    assert all(map(torch.equal, expected, found))


@torch.no_grad()
def test_assistants_streamers_and_sampling_work_in_lockstep(tmp_path):
    subject = prepared("llama", names("causal")["llama"], tmp_path / "source")
    model = offload.from_pretrained(subject.folder, model_class=subject.model_class).eval()
    helper = subject.model_class.from_pretrained(subject.folder).eval()

    class Streamer:
        def __init__(self) -> None:
            self.seen: list[int] = []

        def put(self, value: torch.Tensor) -> None:
            self.seen.extend(value.flatten().tolist())

        def end(self) -> None:
            self.seen.append(-1)

    def fn(at: int) -> tuple[torch.Tensor, list[int]]:
        prompt = torch.arange(1, 6 + at).reshape(1, -1)
        options: dict[str, Any] = {"max_new_tokens": 6, "pad_token_id": 0}
        if at % 2:
            return model.generate(prompt, do_sample=False, assistant_model=helper, **options), []
        streamer = Streamer()
        return model.generate(prompt, do_sample=False, streamer=streamer, **options), streamer.seen

    expected = [fn(at) for at in range(4)]
    found = list(map_batches(fn, range(4), [model, helper], in_flight=4))

    assert all(torch.equal(a, b) and c == d for (a, c), (b, d) in zip(expected, found, strict=True))

    def sample(at: int) -> torch.Tensor:
        return model.generate(torch.arange(1, 6 + at).reshape(1, -1), do_sample=True, max_new_tokens=6, pad_token_id=0)

    ways = []
    for in_flight in (1, 3):
        torch.manual_seed(3)
        ways.append(list(map_batches(sample, range(4), model, in_flight=in_flight)))
    assert all(map(torch.equal, *ways))
