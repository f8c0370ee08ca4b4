"""Packed pieces of weights, written to a file and opened there; comparing results by their bits."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

import offload
from offload import OffloadedTensor
from offload.checkpoints.checkpoint import open_checkpoint
from tests.checkpoints.forms import FORMS


def stored(folder: Path, pieces: Mapping[str, torch.Tensor]) -> Mapping[str, OffloadedTensor]:
    """The tensors of a checkpoint with these pieces."""
    save_file({name: piece.contiguous() for name, piece in pieces.items()}, folder / "model.safetensors")
    return open_checkpoint(folder).tensors(None)


def bits_of(value: torch.Tensor) -> torch.Tensor:
    """The bits of floats, so that zeros have signs; all NaNs are equal."""
    plain = torch.where(value.isnan(), torch.full_like(value, torch.nan), value)
    return plain.contiguous().view({2: torch.int16, 4: torch.int32}[value.itemsize])


def random_bytes(*shape: int, dtype: torch.dtype = torch.uint8, seed: int = 0) -> torch.Tensor:
    """Random bit patterns."""
    generator = torch.Generator().manual_seed(seed)
    count = torch.Size(shape).numel() * dtype.itemsize
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator).view(dtype).view(shape)


def random_scales(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> torch.Tensor:
    """Between 0.001 and 0.1."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(shape, generator=generator) * 0.099 + 0.001).to(dtype)


def loaded_from_new(folder: Path, form: str) -> Any:
    """The model on disk of a new checkpoint in that format."""
    FORMS[form].write(folder)
    return offload.from_pretrained(folder, **FORMS[form].options)


def losses_of_an_adapter(model: Any, prompt: torch.Tensor, steps: int = 3) -> list[float]:
    """For a LoRA of rank 4 on all linear layers, trained for a few steps."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights="gaussian"))
    trained = [value for value in adapted.parameters() if value.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.01)
    losses = []
    for _ in range(steps):
        loss = adapted(prompt, labels=prompt).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses
