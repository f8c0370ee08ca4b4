"""`PromptCache`: the beginnings of prompts, kept for later runs.

Always true:
- at least the last token of a prompt is computed
- a prompt with padding, images or other inputs than tokens is refused, and so is a model whose states at the end of a
  block can't be had from those at the end of a prompt
- if a prompt can't be kept, the answer is there all the same
"""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from offload.errors import ArgumentError, ArgumentTypeError, FileError
from offload.generation.blocks import TOKENS, Block, Blocks, States
from offload.generation.identity import Identities
from offload.generation.past import Prefix, past_of
from offload.transformers_api import CACHES, cache_name, cache_option, fills_after_cache

log = logging.getLogger("offload.generation")

BEGINS = "drafts_begin_after_a_prefix"  # an attribute of a class of models
_LEAVE_OUT = ": leave prompt_cache out"
_DEPENDS_ON_LENGTH = ("dynamic", "longrope")  # kinds of rope whose angles depend on how long the whole text is
_OF_TEXT = ("bos", "cls", "eos", "mask", "pad", "sep", "unk", "decoder_start")
_MAY_BE_GIVEN = {"input_ids", "attention_mask", "use_cache", "logits_to_keep", "return_dict"}


@dataclass(frozen=True)
class _Prompt:
    identity: str | None  # None for a model whose prompts are not kept
    rows: list[list[int]]
    copies: int  # of each row in the batch
    prefix: Prefix


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
        >>> answer = prompts.generate(model, question, max_new_tokens=4)
        >>> prompts.past_for(model, question).get_seq_length()
        64
    """

    def __init__(self, folder: str | os.PathLike[str], *, max_disk: int | float | str = "10GiB") -> None:
        """
        Args:
            folder: a new or empty folder, or one of kept prompts. Several processes may use it at once.
            max_disk: how much it may take: "10GiB", bytes, or a fraction of what is free. What was not used for
                longest goes. Each process keeps to its own limit when it writes.

        Raises:
            ForeignFileError: the folder holds something else.
            ValueError: `max_disk` is not an amount.
            WriteError, ReadError
        """
        self._blocks = Blocks(folder, max_disk)
        self._identities = Identities()
        self.folder, self.max_disk = self._blocks.folder, self._blocks.max_disk

    def past_for(
        self, model: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, *, copies: int = 1
    ) -> Any:
        """What is known of a prompt: a cache for `model.generate(..., cache=)`, or for the model itself.

        Its length, `get_seq_length()`, is the number of tokens that need not be computed: 0 if nothing is known.

        Args:
            model: a transformers model, on disk or in memory.
            input_ids: the prompt, (batch, length). Of several rows, the part is used that is known of each.
            attention_mask: that of the prompt.
            copies: how many rows in the batch each prompt has: of `num_beams` or `num_return_sequences`.

        Returns:
            A `DynamicCache`; before transformers 5.24 the option is `past_key_values`. Give it to `keep` after the run.

        Raises:
            ValueError: the prompt has padding or images, or the model keeps other states than keys and values.
            MissingFileError, ChangedFileError, ReadError: a file of the model has changed.
        """
        return self._past(model, input_ids, attention_mask, copies)

    def _past(
        self, model: Any, input_ids: Any, attention_mask: torch.Tensor | None, copies: int, *, is_new: bool = False
    ) -> Any:
        if not isinstance(input_ids, torch.Tensor) or input_ids.dim() != 2 or input_ids.is_floating_point():
            raise ArgumentTypeError("a prompt is a tensor of tokens, (batch, length)")
        _refuse_model(model)
        _refuse_padding(model, input_ids, attention_mask)
        _refuse_placeholders(model, input_ids)
        rows = input_ids.tolist()
        identity = self._identities.of(model)
        chains: list[list[Block]] = [[] for _ in rows]
        if identity is not None and not is_new:
            chains = self._known(identity, rows)
        many = [chain for chain in chains for _ in range(copies)]
        prefix = Prefix(many)
        past = past_of(model.config, prefix, model.device, input_ids.shape[1])
        past.prompt = _Prompt(identity, rows, copies, prefix)
        log.info("%d of %d tokens of the prompt are known", prefix.length, input_ids.shape[1])
        return past

    def _known(self, identity: str, rows: list[list[int]]) -> list[list[Block]]:
        """The blocks of each row, as many as all rows have; at least the last token is left to compute."""
        found: dict[tuple[int, ...], list[Block]] = {}
        for row in rows:
            if tuple(row) not in found:
                found[tuple(row)] = self._blocks.find(identity, row[:-1])
        shared = min(map(len, found.values()))
        return [found[tuple(row)][:shared] for row in rows]

    def keep(self, past: Any) -> None:
        """Keep the prompt for which `past_for` made `past`, once the model has run on it.

        What is there already is not written again. Nothing is written if the pass has not got to the end of the
        prompt, if the cache was reset or cropped into it, or if the model has hooks or anything else that can't be
        compared.

        Args:
            past: what `past_for` returned.

        Raises:
            WriteError: the disk is full, the folder is read-only...
            TypeError: `past` is another cache.
        """
        prompt = getattr(past, "prompt", None)
        if not isinstance(prompt, _Prompt):
            raise ArgumentTypeError(f"keep takes what past_for returned, not {type(past).__name__}")
        if prompt.identity is None or not all(layer.has_all for layer in past.layers):
            return
        for row, tokens in enumerate(prompt.rows):

            def states(depth: int, row: int = row * prompt.copies) -> list[States]:
                start, end = depth * TOKENS, (depth + 1) * TOKENS
                if end <= prompt.prefix.length:
                    return prompt.prefix.block(row, depth)
                passed = (layer.passed(start, end) for layer in past.layers)
                return [(keys[row : row + 1], values[row : row + 1]) for keys, values in passed]

            self._blocks.put(prompt.identity, tokens, states)

    def generate(self, model: Any, inputs: torch.Tensor | None = None, **options: Any) -> Any:
        """Like `model.generate`, from what is known of the prompt; the prompt is kept afterwards.

        Args:
            model: a transformers model, on disk or in memory.
            inputs: the prompt, (batch, length); or `input_ids` in the options.
            options: those of `model.generate`.

        Returns:
            What `model.generate` returns.

        Raises:
            ValueError: as `past_for`; or the prompt has inputs beside tokens, or a cache of its own.
        """
        input_ids = options.pop("input_ids", None) if inputs is None else inputs
        takes = {*inspect.signature(model.forward).parameters, *CACHES}
        others = sorted(name for name in takes & options.keys() - _MAY_BE_GIVEN if options[name] is not None)
        if others or options.get("use_cache") is False or options.get("cache_implementation"):
            raise ArgumentError(f"prompts are kept of tokens alone, not with {', '.join(others) or 'that'}{_LEAVE_OUT}")
        settings = options.get("generation_config") or model.generation_config
        many = ("num_beams", "num_return_sequences")
        copies = max(options.get(name) or getattr(settings, name, None) or 1 for name in many)
        drafts = options.get("assistant_model") or options.get("prompt_lookup_num_tokens")
        drafts = bool(drafts or getattr(settings, "prompt_lookup_num_tokens", None))
        in_chunks = options.get("prefill_chunk_size") or getattr(settings, "prefill_chunk_size", None)
        repeats = drafts and not getattr(type(model), BEGINS, False)  # transformers (5.23) begins with the whole prompt
        repeats = repeats or bool(in_chunks and not fills_after_cache())
        past = self._past(model, input_ids, options.get("attention_mask"), copies, is_new=repeats)
        past.drafts = drafts
        try:
            return model.generate(input_ids, **{**options, cache_option(): past})
        finally:
            try:
                self.keep(past)
            except FileError as error:
                log.warning("the prompt is not kept: %s", error)


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
