"""`generate` of models from disk: methods that a class of models gets, for drafts and kept prompts.

Always true:
- without an assistant or a lookup, and without a prompt cache, they do what those of the class do
- drafts begin after what is known of a prompt, as all else does
"""

from __future__ import annotations

import inspect
from functools import partial, wraps
from typing import Any

import torch

from offload.budget import filled_devices
from offload.generation.alike import alike_rows
from offload.generation.candidates import drafts_for
from offload.generation.prompt_cache import BEGINS, PromptCache
from offload.models.pretrained import feature
from offload.transformers_api import given_cache


@feature
def drafting(kind: Any) -> dict[str, Any]:
    """Methods of a class of models that generates text, with which the length of drafts follows what a pass costs."""
    if not hasattr(kind, "_assisted_decoding"):
        return {}

    @wraps(kind._assisted_decoding)
    def _assisted_decoding(self: Any, *args: object, **options: object) -> Any:
        with alike_rows(self):
            return kind._assisted_decoding(self, *args, **options)

    @wraps(kind._get_candidate_generator)
    def _get_candidate_generator(self: Any, *args: object, **options: object) -> Any:
        given = inspect.signature(kind._get_candidate_generator).bind(self, *args, **options).arguments
        return drafts_for(self, partial(kind._get_candidate_generator, self), given)

    return {one.__name__: one for one in (_assisted_decoding, _get_candidate_generator)}


@feature
def keeping_prompts(kind: Any) -> dict[str, Any]:
    if not hasattr(kind, "generate") or not hasattr(kind, "prepare_inputs_for_generation"):  # it generates by itself
        return {}

    @wraps(kind.generate)
    def generate(self: Any, *args: Any, prompt_cache: Any = None, **options: Any) -> Any:
        if prompt_cache is None:
            with filled_devices(self, _context(self, *args, **options)):
                return kind.generate(self, *args, **options)
        prompts = prompt_cache if isinstance(prompt_cache, PromptCache) else PromptCache(prompt_cache)
        return prompts.generate(self, *args, **options)

    @wraps(kind.prepare_inputs_for_generation)
    def prepare_inputs_for_generation(self: Any, *args: Any, **options: Any) -> Any:
        begins = options.get("is_first_iteration") and len(args) == 1 and options.get("next_sequence_length") is None
        past: Any = options.get(given_cache(options) or "")
        if begins and getattr(past, "drafts", False):
            known = past.get_seq_length()
            options["next_sequence_length"] = args[0].shape[1] - known  # transformers (5.24) gives all of them
        return kind.prepare_inputs_for_generation(self, *args, **options)

    return {BEGINS: True, **{one.__name__: one for one in (generate, prepare_inputs_for_generation)}}


def _context(
    model: Any, inputs: Any = None, generation_config: Any = None, *_others: object, **options: Any
) -> int | None:
    """How many tokens `generate` will have keys and values of; None if that is not said."""
    prompt = options.get("input_ids", inputs)
    settings = generation_config or getattr(model, "generation_config", None)
    names = ("max_new_tokens", "num_beams", "num_return_sequences")
    new, beams, answers = (options.get(name) or getattr(settings, name, None) for name in names)
    if not isinstance(prompt, torch.Tensor) or prompt.dim() != 2 or not isinstance(new, int):
        return None
    return len(prompt) * max(beams or 1, answers or 1) * (prompt.shape[1] + new)
