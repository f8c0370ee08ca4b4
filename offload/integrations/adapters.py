"""peft: adapters over the layers of a model, whose values stay where they are.

Always true:
- peft itself makes the layers, and reads the adapter: what transformers' own loading makes of it is the same or less
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn

from offload.errors import CheckpointError, OffloadError
from offload.system.reasons import first_line


def layers_over(model: nn.Module, adapter: str, **options: object) -> Any:
    """peft's model over a base, which gets its layers; `CheckpointError` if it is another's, damaged, or holds code."""
    from peft import PeftModel

    try:
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.filterwarnings("error", "Found missing adapter keys")
            return PeftModel.from_pretrained(model, adapter, **options)
    except OffloadError:
        raise
    except Exception as error:  # peft can raise anything for settings that it does not expect, and for cut files
        raise CheckpointError(
            f"{adapter} is not an adapter for this {type(model).__name__}, or it is damaged: {first_line(error)}"
        ) from error


def load_adapter(model: Any, adapter: str) -> None:
    """Give a model of transformers the adapter in a folder, as its own loading does; may raise `CheckpointError`."""
    config = layers_over(model, adapter, autocast_adapter_dtype=False).active_peft_config
    if config.is_prompt_learning:
        raise CheckpointError(
            f"{adapter} holds an adapter of kind {config.peft_type.value}, which is no part of the layers: load the "
            "model without it (adapter=False), and add it with peft.PeftModel.from_pretrained(model, folder)"
        )
    model._hf_peft_config_loaded = True
