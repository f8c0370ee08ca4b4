"""`PromptCache`: the beginnings of prompts, kept for later runs.

Always true:
- at least the last token of a prompt is computed
- a prompt with padding, images or other inputs than tokens is refused, and so are several at once, and a model whose
  states at the end of a block can't be had from those at the end of a prompt
- if a prompt can't be kept, the answer is there all the same
"""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from offload.errors import ArgumentError, ArgumentTypeError, FileError
from offload.generation.blocks import TOKENS, Block, Blocks
from offload.generation.identity import identity_of
from offload.generation.past import past_of
from offload.transformers_api import CACHES, cache_name, cache_option, fills_after_cache

log = logging.getLogger("offload.generation")

BEGINS = "drafts_begin_after_a_prefix"  # an attribute of a class of models
_LEAVE_OUT = ": leave prompt_cache out"
_DEPENDS_ON_LENGTH = ("dynamic", "longrope")  # kinds of rope whose angles depend on how long the whole text is
_OF_TEXT = ("bos", "cls", "eos", "mask", "pad", "sep", "unk", "decoder_start")
_MAY_BE_GIVEN = {"input_ids", "attention_mask", "use_cache", "logits_to_keep", "return_dict"}


class PromptCache:
    """A folder that keeps the keys and values of prompts, for later runs and other prompts that begin alike.

    The keys and values of a prompt are kept in blocks of 64 tokens. A later prompt, of this or of another process,
    begins with the blocks that it has in common with those that are there, and only what follows is computed.

    A block belongs to its tokens, to all tokens before it, and to its model: to the class, configuration, weights,
    adapters and device, and to the versions of torch and transformers. Those of another model, revision, dtype or rope
    are never used.

    The numbers are those of the pass that computed a block. Products of matrices of another height may differ in
    their last bits, so logits equal those without the cache, bit for bit, where the first pass was cut at the same
    place; else they are as close as those of two passes with different `prefill_chunk_size`.

    Attributes:
        folder: where the blocks are.
        max_disk: how many bytes they may take.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=9)
        >>> model = LlamaForCausalLM(LlamaConfig(**sizes)).eval()
        >>> prompts = PromptCache("prompts", max_disk="2GiB")
        >>> question = torch.arange(100)[None] % 9
        >>> prompts.generate(model, question, max_new_tokens=4).shape
        torch.Size([1, 104])
    """

    def __init__(self, folder: str | os.PathLike[str], *, max_disk: int | str = "10GiB") -> None:
        """
        Args:
            folder: a new or empty folder, or one of kept prompts. Several processes may use it at once.
            max_disk: how much it may take: "10GiB", or bytes. What was not used for longest goes. Each process keeps to
                its own limit when it writes.

        Raises:
            ForeignFileError: the folder holds something else.
            ValueError: `max_disk` is not an amount.
            WriteError, ReadError
        """
        self._blocks = Blocks(folder, max_disk)
        self.folder, self.max_disk = self._blocks.folder, self._blocks.max_disk

    def generate(self, model: Any, inputs: torch.Tensor | None = None, **options: Any) -> Any:
        """Like `model.generate`, from what is known of the prompt; the prompt is kept afterwards.

        Nothing is kept of a model that has hooks or anything else that can't be compared.

        Args:
            model: a transformers model, on disk or in memory.
            inputs: the prompt, (1, length); or `input_ids` in the options.
            options: those of `model.generate`.

        Returns:
            What `model.generate` returns.

        Raises:
            ValueError: there are several prompts or answers, padding, images, inputs beside tokens or a cache of its
                own; or the model keeps other states than keys and values.
            MissingFileError, ChangedFileError, ReadError: a file of the model has changed.
        """
        input_ids = options.pop("input_ids", None) if inputs is None else inputs
        settings = options.get("generation_config") or getattr(model, "generation_config", None)

        def chosen(name: str) -> Any:
            return options.get(name) or getattr(settings, name, None)

        _refuse(model, input_ids, options)
        if (chosen("num_beams") or 1) > 1 or (chosen("num_return_sequences") or 1) > 1:
            raise ArgumentError(f"prompts are kept for one answer at a time{_LEAVE_OUT}")
        drafts = bool(options.get("assistant_model") or chosen("prompt_lookup_num_tokens"))
        repeats = drafts and not getattr(type(model), BEGINS, False)  # transformers (5.23) begins with the whole prompt
        repeats = repeats or bool(chosen("prefill_chunk_size") and not fills_after_cache())
        identity, blocks = self._known(model, input_ids)
        blocks = [] if repeats else blocks
        log.info("%d of %d tokens of the prompt are known", len(blocks) * TOKENS, input_ids.shape[1])
        past = past_of(model.config, blocks, model.device, input_ids.shape[1])
        past.drafts = drafts
        try:
            return model.generate(input_ids, **{**options, cache_option(): past})
        finally:
            if identity is not None and all(layer.has_all for layer in past.layers):
                self._keep(identity, input_ids, len(blocks), past)

    def _known(self, model: Any, input_ids: torch.Tensor) -> tuple[str | None, list[Block]]:
        """The model's identity, and the blocks for the beginning of a prompt; the last token is left to compute."""
        identity = identity_of(model)
        return identity, [] if identity is None else self._blocks.find(identity, input_ids[0, :-1].tolist())

    def _keep(self, identity: str, input_ids: torch.Tensor, known: int, past: Any) -> None:
        def states(depth: int) -> list[Any]:
            return [layer.passed(depth * TOKENS, (depth + 1) * TOKENS) for layer in past.layers]

        try:
            self._blocks.put(identity, input_ids[0].tolist(), known, states)
        except FileError as error:
            log.warning("the prompt is not kept: %s", error)


def _refuse(model: Any, input_ids: Any, options: Mapping[str, Any]) -> None:
    """Refuse a prompt of which more than its tokens counts."""
    _refuse_model(model)
    if not isinstance(input_ids, torch.Tensor) or input_ids.dim() != 2 or input_ids.is_floating_point():
        raise ArgumentTypeError("a prompt is a tensor of tokens, (1, length)")
    if len(input_ids) != 1:
        raise ArgumentError("prompts are kept one by one: pass them so, or with offload.map_batches")
    takes = {*inspect.signature(model.forward).parameters, *CACHES}
    others = sorted(name for name in takes & options.keys() - _MAY_BE_GIVEN if options[name] is not None)
    if others or options.get("use_cache") is False or options.get("cache_implementation"):
        raise ArgumentError(f"prompts are kept of tokens alone, not with {', '.join(others) or 'that'}{_LEAVE_OUT}")
    _refuse_padding(model, input_ids, options.get("attention_mask"))
    _refuse_placeholders(model, input_ids)


def _refuse_model(model: Any) -> None:
    config = getattr(model, "config", None)
    if not hasattr(config, "get_text_config") or not callable(getattr(model, "generate", None)):
        raise ArgumentTypeError(f"a transformers model that generates is needed, not {type(model).__name__}")
    text = config.get_text_config(decoder=True)  # type: ignore[union-attr]
    if config.is_encoder_decoder or cache_name(model.forward) is None:  # type: ignore[union-attr]
        raise ArgumentError(f"prompts can't be kept for {type(model).__name__}: it has no keys and values{_LEAVE_OUT}")
    if getattr(text, "use_bidirectional_attention", None) or getattr(text, "is_causal", True) is False:
        raise ArgumentError(
            f"prompts can't be kept for {type(model).__name__}: its tokens see those that follow{_LEAVE_OUT}"
        )
    kinds = set(_kinds_of_rope(config.to_dict())) & set(_DEPENDS_ON_LENGTH)  # type: ignore[union-attr]
    if kinds:
        raise ArgumentError(
            f"prompts can't be kept: the rope is {min(kinds)}, whose keys depend on the length of the text{_LEAVE_OUT}"
        )


def _kinds_of_rope(settings: object) -> Iterator[str]:
    if isinstance(settings, Mapping):
        for key, value in settings.items():
            if key in ("rope_type", "type") and isinstance(value, str):
                yield value
            yield from _kinds_of_rope(value)


def _refuse_padding(model: Any, input_ids: torch.Tensor, mask: torch.Tensor | None) -> None:
    if mask is None:
        settings = model.generation_config
        ends = settings.eos_token_id
        pad = settings.pad_token_id
        is_pad = pad is not None and pad not in (ends if isinstance(ends, list) else [ends])
        has_padding = is_pad and bool((input_ids == pad).any())  # transformers makes a mask of them
    else:
        has_padding = mask.shape != input_ids.shape or not bool((mask == 1).all())
    if has_padding:
        raise ArgumentError(
            f"prompts with padding are not kept, since their first token is not at position 0: pass them one by one, "
            f"or with offload.map_batches, or{_LEAVE_OUT[1:]}"
        )


def _refuse_placeholders(model: Any, input_ids: torch.Tensor) -> None:
    """Tokens that stand for an image, or other media: they are the same for each image."""
    modalities = getattr(model, "input_modalities", "text")
    if modalities in ("text", ("text",), ["text"]):
        return
    for name, value in model.config.to_dict().items():
        is_placeholder = name.endswith(("_token_id", "_token_index")) and not name.startswith(_OF_TEXT)
        if is_placeholder and isinstance(value, int) and bool((input_ids == value).any()):
            raise ArgumentError(f"prompts with images, sound or video ({name}) are not kept{_LEAVE_OUT}")
