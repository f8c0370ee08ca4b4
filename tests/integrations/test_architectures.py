"""Tiny models of many architectures, from disk: two dozen here, those that generate in the campaign `architectures`.

All of them with `python -m bench.architectures`.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import offload
from bench import architectures, equality
from bench.architectures import (
    ABSENT,
    DIFFERS,
    EQUAL,
    VALUES,
    Row,
    examined,
    examined_apart,
    generating,
    names,
    prepared,
)
from bench.tiny import tiny_configs
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


@pytest.fixture
def subject(tmp_path):
    return prepared("mixtral", "MixtralForCausalLM", tmp_path / "source")


@pytest.fixture
def plain(subject):
    return subject.model_class.from_pretrained(subject.folder)


@pytest.fixture
def model(subject):
    return offload.from_pretrained(subject.folder, model_class=subject.model_class)


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


# That the comparison sees what differs


@torch.no_grad()
def test_a_changed_value_is_found(plain, model, subject):
    model.model.norm.weight[3] += 1

    assert ["state_dict: model.norm.weight has other values"] == list(equality.in_states(plain, model))
    assert "logits" in equality.first(equality.in_outputs(plain, model, subject.probe, []))
    assert ["saved: model.norm.weight has other values"] == list(equality.in_saved(plain, model, subject.folder, []))


def _sign(plain, model):
    plain.model.norm.weight[0] = 0.0
    model.model.norm.weight[0] = -0.0


def _dtype(_, model):
    model.lm_head.weight.data = model.lm_head.weight.half()


def _name(_, model):
    model.extra = torch.nn.Linear(1, 1, bias=False)


@torch.no_grad()
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_sign, "state_dict: model.norm.weight has other values"),
        (_dtype, "state_dict: lm_head.weight is torch.float16"),
        (_name, "state_dict has other names: ['extra.weight']"),
    ],
)
def test_a_changed_sign_of_zero_dtype_or_name_is_found(change, words, plain, model):
    change(plain, model)

    (line,) = equality.in_states(plain, model)
    assert line.startswith(words)


def test_a_parameter_in_memory_is_found(model):
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.materialize())

    assert ["lm_head.weight is in memory"] == list(equality.not_on_disk(model))


def test_random_outputs_of_the_plain_model_are_noted_and_not_compared(plain, model, subject, monkeypatch):
    passes = iter(range(10))
    monkeypatch.setattr(plain, "forward", lambda **_: {"a": torch.tensor(next(passes)), "b": torch.ones(1)})
    monkeypatch.setattr(model, "forward", lambda **_: {"a": torch.tensor(-1), "b": torch.zeros(1)})
    notes = []

    assert ["output .b has other values"] == list(equality.in_outputs(plain, model, subject.probe, notes))
    assert [".a is not the same in two passes of the plain model"] == notes


def test_a_missing_tie_is_found(plain, model):
    model.lm_head.weight = model.model.embed_tokens.weight

    (line,) = equality.in_ties(plain, model)
    assert "lm_head.weight" in line


def test_different_tokens_are_found(plain, model, subject):
    with torch.no_grad():
        model.lm_head.weight[7] = 100 * model.lm_head.weight[7].sign()

    assert "tokens" in equality.first(equality.in_tokens(plain, model, subject.probe, [], 4))


def test_a_checkpoint_lacks_nothing(plain, model, subject, monkeypatch):
    save = model.save_pretrained
    monkeypatch.setattr(model, "save_pretrained", lambda folder, **options: (save(folder, **options), _drop(folder)))

    (line,) = equality.in_saved(plain, model, subject.folder, [])
    assert line.startswith("saved names: ")


def _drop(folder: Any) -> None:
    shard = min(folder.glob("*.safetensors"))
    tensors = load_file(shard)
    tensors.popitem()
    save_file(tensors, shard, metadata={"format": "pt"})


# The run


def test_a_model_that_transformers_cannot_build_is_absent_with_the_reason(monkeypatch):
    def refuse(*_):
        raise ValueError("not today")

    monkeypatch.setattr("transformers.LlamaForCausalLM.__init__", refuse)

    row = examined("causal", "llama")
    assert (ABSENT, "not built: ValueError: not today") == (row.equal, row.note)


def test_a_failure_on_disk_alone_counts_as_a_difference(monkeypatch):
    def refuse(*_, **__):
        raise ValueError("not today")

    monkeypatch.setattr("offload.from_pretrained", refuse)

    row = examined("causal", "llama")
    assert (DIFFERS, "ValueError: not today") == (row.equal, row.note)


def test_recipes_are_counted_and_bytes_that_loading_writes(tmp_path):
    writing = """
    import sys
    from pathlib import Path
    import offload
    load = offload.from_pretrained

    def load_and_write(*arguments, **options):
        Path(sys.argv[3], "more").write_bytes(bytes(8192))
        return load(*arguments, **options)

    offload.from_pretrained = load_and_write
    """
    row = Row(**json.loads(run_script(writing + EXAMINED, "causal", "mixtral", tmp_path).splitlines()[-1]))

    assert (EQUAL, 4) == (row.equal, row.recipes), row.note
    assert row.written >= 8192  # more where the file system counts blocks of its own for a new file


def test_without_inputs_values_alone_are_compared(monkeypatch):
    monkeypatch.setattr(architectures, "probes", lambda _: iter([{"pixel_values": None}]))

    row = examined("causal", "llama")
    assert VALUES == row.equal
    assert row.note.startswith("forward not run: pixel_values: ValueError: You must specify")


def test_a_slow_worker_costs_its_own_row_only(monkeypatch):
    monkeypatch.setattr(architectures, "_SECONDS", 0)

    assert [(DIFFERS, "it took more than 0 s")] * 2 == [
        (row.equal, row.note) for row in examined_apart([("causal", "gpt2"), ("causal", "llama")], 1)
    ]


def test_a_reason_is_a_line_without_paths_of_this_machine():
    error = ValueError("no such name in <module from '/home/someone/site-packages/transformers/x.py'>\nat | all")

    found = architectures.reason(error)
    assert "ValueError: no such name in <module from 'transformers/x.py'> at / all" == found


def test_every_kind_has_its_architectures():
    assert {"llama", "gpt2"} <= names("causal").keys()
    assert {"bert", "clip"} <= names("encoder").keys()
    assert {"t5", "bart"} <= names("seq2seq").keys()


def test_a_hybrid_keeps_layers_of_each_kind():
    _, config = next(tiny_configs("qwen3_next"))

    assert {"linear_attention", "full_attention"} == set(config.layer_types)
    assert len(config.layer_types) == config.num_hidden_layers == 2


def test_the_report_has_counts_and_reasons():
    rows = [Row("causal", "a", "A", EQUAL, "input_ids", 2, 0), Row("causal", "b", "B", ABSENT, "not built"), _miss()]

    lines = list(architectures.report(rows))
    assert (
        "- causal: 1 of 3 equal; 0 equal in values and files, without a forward pass; 1 without a plain model; "
        "1 not equal; 1 with recipes; 1 written by loading"
    ) in lines
    assert "| a (A) | yes | 2 | 0 | input_ids |" in lines
    assert "| b (B) | not tried |  |  | not built |" in lines
    assert "| c (C) | NO | 0 | 512 | tokens |" in lines


def _miss() -> Row:
    return Row("causal", "c", "C", DIFFERS, "tokens", 0, 512)
