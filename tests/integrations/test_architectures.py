"""Tiny models of many architectures, from disk: two dozen here, those that generate in the campaign `architectures`.

All of them with `python -m bench.architectures`.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import transformers

import offload
from bench import architectures, equality
from bench.architectures import DIFFERS, EQUAL, VALUES, Row, examined, examined_apart, generating, names, prepared
from offload.models.pretrained import _kind_from_disk
from tests.equal import assert_equal
from tests.processes import run_script

GENERATING = [
    ("causal", "llama"),
    ("causal", "gpt2"),  # Conv1D: weights are transposed
    ("causal", "mixtral"),  # experts are stacked by loading, and split by saving
    ("causal", "gemma3_text"),  # sliding windows
    ("causal", "zamba"),  # layers that share their weights
    *(("causal", name) for name in ("qwen3_moe", "deepseek_v3", "gpt_oss", "mamba", "bloom")),
    ("seq2seq", "t5"),
    ("seq2seq", "bart"),
    ("generating", "WhisperForConditionalGeneration"),
]
SEEN = "vit dinov2 swin convnext resnet siglip clip qwen2_vl"  # models for images, with and without text
ENCODING = [("encoder", name) for name in f"bert csm whisper wav2vec2 hubert {SEEN}".split()]
WITH_GRADIENTS = [("causal", "mixtral"), ("seq2seq", "t5"), ("generating", "WhisperForConditionalGeneration")]


# They have `generate`, and nothing else of transformers' for generating, or a `generate` that takes something else.
ON_THEIR_OWN = {
    "DiffusionGemmaForBlockDiffusion": "",  # not in older versions; its settings are of a class of their own
    "InformerForPrediction": "generates",
    "PatchTSMixerForPrediction": "does not generate",  # the plain one: its usual configuration has no distribution
    "PatchTSTForPrediction": "generates",
    "SpeechT5ForTextToSpeech": "generates",
    "TimeSeriesTransformerForPrediction": "generates",
}
EXAMINED = """
    import json, sys
    from dataclasses import asdict
    from bench.architectures import examined
    print(json.dumps(asdict(examined(*sys.argv[1:3]))))
"""


def examined_alone(kind: str, name: str) -> Row:
    """In a process that has no file for what is printed: the bytes that are written are those of loading."""
    return Row(**json.loads(run_script(EXAMINED, kind, name).splitlines()[-1]))


@pytest.mark.parametrize(("kind", "name"), [*GENERATING, *ENCODING], ids=lambda value: value)
def test_a_model_is_equal_in_every_respect(kind, name):
    row = examined_alone(kind, name)

    assert EQUAL == row.equal, row.note
    assert "generates" in row.note.split("; ") or (kind, name) in ENCODING
    assert 0 == row.written


@pytest.mark.parametrize(("kind", "name"), [*ENCODING, *WITH_GRADIENTS])
def test_a_model_is_of_the_class_that_its_configuration_names_and_has_the_gradients_of_memory(kind, name, tmp_path):
    """A whole Whisper, not its decoder; an encoder without a language model's head, whose values nobody trained."""
    subject = prepared(name, names(kind)[name], tmp_path)
    plain = subject.model_class.from_pretrained(subject.folder)
    model, info = offload.from_pretrained(subject.folder, output_loading_info=True)
    for one in (plain, model):
        outputs = [value for _, value in equality.tensors_in(one(**subject.probe)) if value.requires_grad]
        sum(value.square().mean() for value in outputs).backward()

    assert type(plain) is model.__class__
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    expected, found = ({key: value.grad for key, value in one.named_parameters()} for one in (plain, model))
    assert any(value is not None for value in expected.values())
    assert_equal(expected, found)
    assert not any(map(offload.is_offloaded, model.buffers()))


@pytest.mark.parametrize("name", ON_THEIR_OWN)
def test_a_model_with_a_generate_of_its_own_is_equal_in_every_respect(name):
    if not hasattr(transformers, name):
        pytest.skip("this transformers does not have it")
    row = examined("generating", name)

    assert EQUAL == row.equal, row.note
    assert ON_THEIR_OWN[name] in row.note


@pytest.mark.campaign("architectures", only=True)
@pytest.mark.parametrize("kind", ["causal", "seq2seq", architectures.GENERATING])
def test_no_model_class_that_generates_differs_from_disk(kind, monkeypatch):
    monkeypatch.setattr(architectures, "_SECONDS", 1800)  # however busy the machine is
    rows = examined_apart([(kind, name) for name in names(kind)])

    assert [] == [(row.name, row.note) for row in rows if row.equal == DIFFERS]
    assert len(rows) / 2 < sum(row.equal in (EQUAL, VALUES) for row in rows)


@pytest.mark.campaign("architectures", only=True)
def test_every_class_that_generates_has_a_kind_from_disk():
    """Also those that no tiny configuration is known for."""
    found = {name: _kind_from_disk(getattr(transformers, name)) for name in generating()}

    assert len(found) > 300
    assert [] == [name for name, kind in found.items() if not issubclass(kind, getattr(transformers, name))]


def _set(model: Any, name: str, value: torch.nn.Parameter) -> None:
    model.get_submodule(name.rpartition(".")[0]).weight = value


CHANGES: dict[str, Any] = {
    "state_dict: model.norm.weight has other values": lambda model: model.model.norm.weight[3].neg_(),
    "output .logits": lambda model: model.model.norm.weight[3].add_(1),
    "saved: model.norm.weight has other values": lambda model: model.model.norm.weight[3].add_(1),
    "state_dict: lm_head.weight is torch.float16": lambda m: setattr(m.lm_head.weight, "data", m.lm_head.weight.half()),
    "state_dict has other names: ['extra.weight']": lambda m: setattr(m, "extra", torch.nn.Linear(1, 1, bias=False)),
    "lm_head.weight is in memory": lambda m: _set(m, "lm_head.weight", torch.nn.Parameter(m.lm_head.weight + 0)),
    "tied parameters": lambda m: _set(m, "lm_head.weight", m.model.embed_tokens.weight),
    "tokens": lambda m: m.lm_head.weight[7].copy_(100 * m.lm_head.weight[7].sign()),
}


@torch.no_grad()
@pytest.mark.parametrize("words", CHANGES)
def test_a_difference_is_found(words, tmp_path):
    subject = prepared("mixtral", "MixtralForCausalLM", tmp_path)
    plain = subject.model_class.from_pretrained(subject.folder)
    model = offload.from_pretrained(subject.folder)
    CHANGES[words](model)

    found = equality.differences(plain, model, subject.folder, subject.probe, [])
    assert any(line.startswith(words) for line in found)
