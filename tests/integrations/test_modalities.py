"""transformers models for images and sound, on disk: bit-identical to those in memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from conftest import contents

import offload

TINY = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
IMAGE = {"image_size": 32, "patch_size": 8}
TEXT = {"vocab_size": 64, "max_position_embeddings": 20}
SPEECH = {
    "vocab_size": 32,
    "conv_dim": (16, 16),
    "conv_stride": (5, 2),
    "conv_kernel": (10, 3),
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 2,
}

PIXELS = {"pixel_values": torch.linspace(-1, 1, 2 * 3 * 32 * 32).reshape(2, 3, 32, 32)}
ONE_IMAGE = {"pixel_values": PIXELS["pixel_values"][:1]}
IDS = {"input_ids": torch.arange(3, 13)[None]}
WAVE = {"input_values": torch.linspace(0, 50, 800).sin()[None]}
SPECTRUM = {"input_features": torch.linspace(0, 20, 8 * 40).sin().reshape(1, 8, 40)}


def whisper() -> Any:
    return hf.WhisperConfig(
        vocab_size=64,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        num_mel_bins=8,
        max_source_positions=20,
        max_target_positions=30,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=3,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )


def llava() -> Any:
    return hf.LlavaConfig(
        vision_config=hf.CLIPVisionConfig(**{**TINY, **IMAGE, "patch_size": 16}, projection_dim=32),
        text_config=hf.LlamaConfig(**TINY, num_key_value_heads=2, vocab_size=64, pad_token_id=0),
        image_token_index=60,
        image_seq_length=4,
    )


def qwen2_vl() -> Any:
    rope = {"type": "mrope", "mrope_section": [2, 2, 4]}
    return hf.Qwen2VLConfig(
        text_config={**TINY, "num_key_value_heads": 1, "vocab_size": 64, "rope_scaling": rope},
        vision_config={
            "depth": 2,
            "embed_dim": 32,
            "hidden_size": 32,
            "num_heads": 2,
            "mlp_ratio": 2,
            "patch_size": 4,
            "spatial_merge_size": 2,
            "temporal_patch_size": 1,
        },
        image_token_id=60,
        vision_start_token_id=61,
        vision_end_token_id=62,
        video_token_id=59,
    )


def both_towers(config: Any) -> Any:
    return config(text_config={**TINY, **TEXT, "eos_token_id": 12}, vision_config={**TINY, **IMAGE}, projection_dim=16)


MODELS: dict[str, tuple[Any, Any, dict[str, torch.Tensor]]] = {
    "vit": (lambda: hf.ViTConfig(**TINY, **IMAGE), hf.AutoModelForImageClassification, PIXELS),
    "dinov2": (lambda: hf.Dinov2Config(**TINY, **IMAGE), hf.AutoModel, PIXELS),
    "swin": (
        lambda: hf.SwinConfig(
            image_size=32, patch_size=4, embed_dim=16, depths=[1, 1], num_heads=[2, 2], window_size=4
        ),
        hf.AutoModelForImageClassification,
        PIXELS,
    ),
    "convnext": (
        lambda: hf.ConvNextConfig(hidden_sizes=[16, 32], depths=[1, 1], num_stages=2),
        hf.AutoModelForImageClassification,
        PIXELS,
    ),
    "resnet": (
        lambda: hf.ResNetConfig(embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1], layer_type="basic"),
        hf.AutoModelForImageClassification,
        PIXELS,
    ),
    "clip": (lambda: both_towers(hf.CLIPConfig), hf.AutoModel, {**IDS, **PIXELS}),
    "siglip": (lambda: both_towers(hf.SiglipConfig), hf.AutoModel, {**IDS, **PIXELS}),
    "whisper": (whisper, hf.AutoModelForSpeechSeq2Seq, {**SPECTRUM, "decoder_input_ids": IDS["input_ids"]}),
    "wav2vec2": (lambda: hf.Wav2Vec2Config(**TINY, **SPEECH), hf.AutoModelForCTC, WAVE),
    "hubert": (lambda: hf.HubertConfig(**TINY, **SPEECH), hf.AutoModelForCTC, WAVE),
    "llava": (
        llava,
        hf.AutoModelForImageTextToText,
        {"input_ids": torch.tensor([[5, 60, 60, 60, 60, 7]]), **ONE_IMAGE},
    ),
    "qwen2-vl": (
        qwen2_vl,
        hf.AutoModelForImageTextToText,
        {
            "input_ids": torch.tensor([[5, 61, 60, 60, 60, 60, 62, 7]]),
            "mm_token_type_ids": torch.tensor([[0, 0, 1, 1, 1, 1, 0, 0]]),
            "pixel_values": PIXELS["pixel_values"].flatten()[: 16 * 48].reshape(16, 48),
            "image_grid_thw": torch.tensor([[1, 4, 4]]),
        },
    ),
}
SEQUENCES = [kind for kind in MODELS if kind in ("whisper", "llava", "qwen2-vl")]


@pytest.fixture(params=MODELS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def both(kind: str, folder: Path) -> tuple[Any, Any]:
    """The saved model, loaded by transformers, and on disk."""
    config, model_class, _ = MODELS[kind]
    torch.manual_seed(0)
    model_class.from_config(config()).save_pretrained(folder)
    return model_class.from_pretrained(folder).eval(), offload.from_pretrained(folder, model_class=model_class)


def test_the_class_is_the_one_that_the_configuration_names(kind: str, tmp_path: Path) -> None:
    """A whole Whisper, not its decoder; an encoder without a language model's head, whose values nobody trained."""
    config, model_class, _ = MODELS[kind]
    model = model_class.from_config(config())
    model.save_pretrained(tmp_path)

    on_disk, info = offload.from_pretrained(tmp_path, output_loading_info=True)

    assert type(model) is on_disk.__class__
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]


def tensors_of(output: Any) -> Iterator[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, dict):
        yield from tensors_of(list(output.values()))
    elif isinstance(output, (list, tuple)):
        for value in output:
            yield from tensors_of(value)


def test_every_output_is_that_of_the_model_in_memory(kind: str, tmp_path: Path) -> None:
    """Including hidden states of every layer; the folder is not written to."""
    plain, on_disk = both(kind, tmp_path)
    before, inputs = contents(tmp_path), MODELS[kind][2]

    with torch.no_grad():
        expected, actual = (
            list(tensors_of(model(**inputs, output_hidden_states=True, return_dict=True))) for model in (plain, on_disk)
        )

    assert len(expected) == len(actual) > 0
    assert all(torch.equal(one, other) for one, other in zip(expected, actual, strict=True))
    assert before == contents(tmp_path)


def test_parameters_are_on_disk_and_buffers_in_memory_with_their_values(kind: str, tmp_path: Path) -> None:
    """CLIP's 0-d scale, parts of a weight norm, batch norm statistics, positions that are never saved."""
    plain, on_disk = both(kind, tmp_path)

    for names in ("named_parameters", "named_buffers"):
        expected, actual = dict(getattr(plain, names)()), dict(getattr(on_disk, names)())
        assert list(expected) == list(actual)
        torch.testing.assert_close(offload.materialize(actual), expected, rtol=0, atol=0)
        assert {offload.is_offloaded(tensor) for tensor in actual.values()} <= {names == "named_parameters"}
    assert list(plain.state_dict()) == list(on_disk.state_dict())


def test_gradients_are_those_of_the_model_in_memory(kind: str, tmp_path: Path) -> None:
    """For every parameter that is used."""
    plain, on_disk = both(kind, tmp_path)
    for model in (plain, on_disk):
        output = model(**MODELS[kind][2])
        sum(t.square().mean() for t in tensors_of(output.to_tuple()) if t.requires_grad).backward()

    expected = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    actual = {name: p.grad for name, p in on_disk.named_parameters() if p.grad is not None}
    assert expected
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


@pytest.mark.parametrize("options", [{}, {"num_beams": 2}, {"do_sample": True}], ids=["greedy", "beams", "sampled"])
@pytest.mark.parametrize("sequence", SEQUENCES)
def test_generated_tokens_are_those_of_the_model_in_memory(
    sequence: str, options: dict[str, Any], tmp_path: Path
) -> None:
    """From an image or a sound."""
    inputs = {name: value for name, value in MODELS[sequence][2].items() if name != "decoder_input_ids"}
    generated = []
    for model in both(sequence, tmp_path):
        torch.manual_seed(0)
        generated.append(model.generate(**inputs, max_new_tokens=6, **{"do_sample": False, **options}))

    assert torch.equal(*generated)


def test_a_model_saved_from_disk_is_the_same_in_memory(kind: str, tmp_path: Path) -> None:
    """`save_pretrained`, including parametrized weights and 0-d values."""
    plain, on_disk = both(kind, tmp_path / "first")

    on_disk.save_pretrained(tmp_path / "second")

    again = MODELS[kind][1].from_pretrained(tmp_path / "second")
    torch.testing.assert_close(dict(again.state_dict()), dict(plain.state_dict()), rtol=0, atol=0)
