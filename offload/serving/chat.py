"""Messages in tokens, in the form that a model was trained on.

Always true:
- a chat template, which is a program from the checkpoint, runs within limits
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from offload.annotations import Json
from offload.errors import CheckpointError
from offload.serving.limited import within_limits

ONLY_TOKENS = {"return_token_type_ids": False}
"""For a tokenizer: language models take no segment ids, which some tokenizers return by default."""
TOKENS_ALONE = {"return_dict_in_generate": False}
"""For `generate`, whatever the model's generation settings ask for."""


def in_chat(tokenizer: Any, messages: list[Json]) -> Any:
    """Messages in tokens, in the form of the model's chat template, up to where the model answers.

    Raises:
        ArgumentError: the template refuses them, or takes too long.
    """
    text = within_limits(
        lambda: tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False), "the chat template"
    )
    return tokenizer(text, add_special_tokens=False, return_tensors="pt", **ONLY_TOKENS)


def ends_of(model: Any, folder: Path) -> list[int]:
    """The tokens after which nothing follows.

    Raises:
        CheckpointError: the model's generation settings say something else.
    """
    said = model.generation_config.eos_token_id
    ends = [] if said is None else said if isinstance(said, list) else [said]
    if not all(type(end) is int for end in ends):
        raise CheckpointError(
            f"{folder} says in its generation_config.json, or in its config.json, that the eos_token_id is {said!r}: "
            "it should be the number of a token, or a list of them"
        )
    return ends
