"""Sizes of small language models of transformers."""

from __future__ import annotations

from typing import Any

SIZES: dict[str, Any] = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2}
