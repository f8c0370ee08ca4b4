"""Packed pieces of weights: written to a file, and opened there; two results compared by their bits."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from offload import OffloadedTensor
from offload.models.checkpoint import open_checkpoint


def stored(folder: Path, pieces: Mapping[str, torch.Tensor]) -> Mapping[str, OffloadedTensor]:
    """The tensors of a checkpoint that is made of these."""
    save_file({name: piece.contiguous() for name, piece in pieces.items()}, folder / "model.safetensors")
    return open_checkpoint(folder).tensors(None)


def bits_of(value: torch.Tensor) -> torch.Tensor:
    """The bits of floats, so that zeros have signs; all that are no numbers are one."""
    plain = torch.where(value.isnan(), torch.full_like(value, torch.nan), value)
    return plain.contiguous().view({2: torch.int16, 4: torch.int32}[value.itemsize])


def random_bytes(*shape: int, dtype: torch.dtype = torch.uint8, seed: int = 0) -> torch.Tensor:
    """Numbers of any bits."""
    generator = torch.Generator().manual_seed(seed)
    count = torch.Size(shape).numel() * dtype.itemsize
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator).view(dtype).view(shape)


def random_scales(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> torch.Tensor:
    """Between 0.001 and 0.1."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(shape, generator=generator) * 0.099 + 0.001).to(dtype)


def written_llama(folder: Path, entry: Any, quantization: Mapping[str, Any], **config: Any) -> None:
    """A Llama whose linear weights are what `entry(name, rows, columns)` says, and nothing else of them is made."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"vocab_size": 256, "num_attention_heads": 16, "num_key_value_heads": 16, "tie_word_embeddings": False}
    said = AutoConfig.for_model("llama", **{**sizes, **config}, dtype="bfloat16")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(said, dtype=torch.bfloat16)
    entries: dict[str, torch.Tensor] = {}
    for name, value in model.state_dict().items():
        if value.dim() == 2 and "proj" in name:
            entries |= entry(name, *value.shape)
        else:
            entries[name] = torch.full(value.shape, 0.5, dtype=value.dtype)
    save_file(entries, folder / "model.safetensors", metadata={"format": "pt"})
    said.save_pretrained(folder)
    config_file = folder / "config.json"
    config_file.write_text(json.dumps({**json.loads(config_file.read_text()), "quantization_config": quantization}))


# A model past the budget: what is in memory after three forwards. Arguments: its folder, the budget.
PAST_BUDGET = """
    import json, os, sys, torch, offload
    from offload.memory import anonymous_bytes

    def written():
        with open("/proc/self/io") as lines:
            return next(int(line.split()[1]) for line in lines if line.startswith("write_bytes"))

    offload.from_pretrained(sys.argv[1] + "/small")(torch.tensor([[1, 2, 3]]))  # imports, first calls
    before, written_before = anonymous_bytes(), written()
    model = offload.from_pretrained(sys.argv[1] + "/large", max_memory=sys.argv[2])
    loaded = anonymous_bytes() - before
    with torch.no_grad():
        found = [model(torch.tensor([[1, 2, 3]])).logits for _ in range(3)]
    on_disk = all(offload.is_offloaded(value) for value in model.parameters() if value.nbytes > 1024)
    said = dict(loaded=loaded, run=anonymous_bytes() - before, written=written() - written_before, on_disk=on_disk)
    finite = bool(found[0].isfinite().all())
    print(json.dumps(dict(**said, finite=finite, equal=torch.equal(found[0], found[2]))))
"""


def losses_of_an_adapter(model: Any, prompt: torch.Tensor, steps: int = 3) -> list[float]:
    """Of a LoRA of rank 4 over all linear layers, trained for some steps."""
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
