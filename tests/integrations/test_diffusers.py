"""Models and pipelines of diffusers, their weights on disk."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import contents

import offload
from tests.equal import assert_equal

diffusers = pytest.importorskip("diffusers", reason="needs diffusers, which is not installed")


LATENTS = torch.linspace(-1, 1, 2 * 4 * 8 * 8).reshape(2, 4, 8, 8)
STEPS = torch.tensor([5, 6])
TEXT = torch.linspace(0, 1, 2 * 3 * 32).reshape(2, 3, 32)
FLUX_INPUTS = {
    "hidden_states": LATENTS.reshape(2, 64, 4),
    "encoder_hidden_states": TEXT,
    "pooled_projections": TEXT[:, 0],
    "timestep": STEPS / 10,
    "img_ids": torch.arange(64 * 3.0).reshape(64, 3),
    "txt_ids": torch.zeros(3, 3),
}

HEADS = {"num_attention_heads": 2, "attention_head_dim": 8, "in_channels": 4, "num_layers": 2, "sample_size": 8}
JOINED = {"joint_attention_dim": 32, "pooled_projection_dim": 32}
BLOCKS = {"block_out_channels": (16, 32), "layers_per_block": 1, "sample_size": 8, "norm_num_groups": 8}
DOWN, UP = ("DownBlock2D", "CrossAttnDownBlock2D"), ("CrossAttnUpBlock2D", "UpBlock2D")
FLUX = {"num_attention_heads": 2, "attention_head_dim": 16, "in_channels": 4, "num_layers": 1, "num_single_layers": 1}


def unet() -> Any:
    blocks = {**BLOCKS, "down_block_types": DOWN, "up_block_types": UP}
    return diffusers.UNet2DConditionModel(**blocks, cross_attention_dim=32, attention_head_dim=8)


def autoencoder() -> Any:
    return diffusers.AutoencoderKL(block_out_channels=(16,), latent_channels=4, norm_num_groups=8, sample_size=8)


MODELS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "unet": (unet, lambda model: model(LATENTS, STEPS, TEXT)),
    "autoencoder": (autoencoder, lambda model: model(LATENTS[:, :3])),
    "sd3": (
        lambda: diffusers.SD3Transformer2DModel(**HEADS, **JOINED, out_channels=4, caption_projection_dim=16),
        lambda model: model(LATENTS, TEXT, TEXT[:, 0], STEPS),
    ),
    "flux": (
        lambda: diffusers.FluxTransformer2DModel(**FLUX, **JOINED, patch_size=1, axes_dims_rope=(4, 4, 8)),
        lambda model: model(**FLUX_INPUTS),
    ),
}


def made(kind: str) -> Any:
    torch.manual_seed(0)
    return MODELS[kind][0]().eval()


def loaded(model_class: Any, folder: Path) -> Any:
    """A model from that folder, on disk: created empty, then filled."""
    with offload.init_empty_weights():
        model = model_class.from_config(model_class.load_config(folder))
    return offload.load_checkpoint_and_dispatch(model, folder).eval()


def sample(kind: str, model: Any) -> torch.Tensor:
    with torch.no_grad():
        return MODELS[kind][1](model).sample


def all_on_disk(model: Any) -> bool:
    return all(offload.is_offloaded(parameter) for parameter in model.parameters())


@pytest.mark.parametrize("shard", [None, "20KB"], ids=["one-file", "sharded"])
@pytest.mark.parametrize("kind", MODELS)
def test_a_model_of_a_folder_runs_on_disk(kind, shard, tmp_path):
    """`diffusion_pytorch_model.safetensors` or its index is found; the folder is not written to."""
    made(kind).save_pretrained(tmp_path, **({"max_shard_size": shard} if shard else {}))
    before = contents(tmp_path)
    assert (shard is not None) == any(name.endswith(".index.json") for name in before)
    plain = type(made(kind)).from_pretrained(tmp_path).eval()

    on_disk = loaded(type(plain), tmp_path)

    assert torch.equal(sample(kind, plain), sample(kind, on_disk))
    assert all_on_disk(on_disk)
    assert_equal(plain, on_disk)
    assert before == contents(tmp_path)


@pytest.mark.parametrize("kind", MODELS)
def test_a_model_that_was_in_memory_is_converted_and_saved_from_disk(kind, tmp_path):
    plain = made(kind)
    on_disk = offload.disk_offload(copy.deepcopy(plain))

    assert torch.equal(sample(kind, plain), sample(kind, on_disk))
    for model in (plain, on_disk):
        model.to(torch.bfloat16)
    assert torch.bfloat16 == on_disk.dtype
    assert all_on_disk(on_disk)
    on_disk.save_pretrained(tmp_path)
    assert_equal(plain, type(plain).from_pretrained(tmp_path, torch_dtype=torch.bfloat16))


@pytest.mark.parametrize("shard", [None, "20KB"])
def test_a_model_is_not_saved_over_the_files_that_it_refers_to(shard, tmp_path):
    """diffusers would remove shards before reading the weights."""
    autoencoder().save_pretrained(tmp_path, **({"max_shard_size": shard} if shard else {}))
    model = offload.load_checkpoint_and_dispatch(autoencoder(), tmp_path)
    before = contents(tmp_path)

    with pytest.raises(offload.errors.ForeignFileError, match=r"refer to .*save to another folder"):
        model.save_pretrained(tmp_path, max_shard_size="50KB")

    assert before == contents(tmp_path)
    model.save_pretrained(tmp_path / "elsewhere")


def images(pipeline: Any, **options: Any) -> Any:
    generator = torch.Generator().manual_seed(0)
    pipeline.set_progress_bar_config(disable=True)
    return torch.from_numpy(pipeline(num_inference_steps=3, generator=generator, output_type="np", **options).images)


def text_to_image() -> Any:
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

    torch.manual_seed(0)
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = [*letters, *(f"{letter}</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    ids = {word: place for place, word in enumerate(words)}
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"vocab_size": len(words), "max_position_embeddings": 16}
    ends = {"bos_token_id": len(words) - 2, "eos_token_id": len(words) - 1, "pad_token_id": len(words) - 1}
    return diffusers.StableDiffusionPipeline(
        vae=autoencoder(),
        text_encoder=CLIPTextModel(CLIPTextConfig(**sizes, **ends)),
        tokenizer=CLIPTokenizer(vocab=ids, merges=[], model_max_length=16),
        unet=unet(),
        scheduler=diffusers.DDIMScheduler(clip_sample=False, steps_offset=1),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def test_a_text_to_image_pipeline_makes_the_same_images(tmp_path):
    """With text encoder, network and autoencoder on disk; saved from there, the pipeline is the same again."""
    text_to_image().save_pretrained(tmp_path / "saved")
    before = contents(tmp_path / "saved")
    parts = ("text_encoder", "unet", "vae")
    plain = diffusers.StableDiffusionPipeline.from_pretrained(tmp_path / "saved")
    on_disk = diffusers.StableDiffusionPipeline.from_pretrained(tmp_path / "saved")
    for part in parts:
        offload.disk_offload(getattr(on_disk, part))
    asked = {"prompt": "a cat on a disk", "height": 8, "width": 8}
    expected = images(plain, **asked)
    aligned = images(text_to_image(), **asked)

    assert torch.equal(aligned, images(on_disk, **asked))
    assert all(all_on_disk(getattr(on_disk.to("cpu"), part)) for part in parts)
    on_disk.save_pretrained(tmp_path / "again")
    again = diffusers.StableDiffusionPipeline.from_pretrained(tmp_path / "again")
    assert torch.equal(expected, images(again, **asked))
    assert before == contents(tmp_path / "saved")
