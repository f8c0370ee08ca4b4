"""A cache of transformers whose first tokens come from blocks.

Always true:
- the states of a layer are read when the pass gets there; those of the next layers are on their way meanwhile
- they are joined to the new ones in the copy that transformers makes at each step
- what does not match its checksums, or the new states, is computed again by the model
- once a layer has its first tokens, it is what transformers' own layer is
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import torch

from offload.errors import ArgumentError, CorruptFileError, UnsupportedOpError
from offload.generation.blocks import TOKENS, Block, Form, States
from offload.tensor.rules import is_followed
from offload.transformers_api import given_cache

log = logging.getLogger("offload.generation")

_AHEAD = 4  # layers that are read together

Result = TypeVar("Result")


class Prefix:
    """The beginning of a prompt that is in blocks: `length` tokens, 0 for none."""

    def __init__(self, model: Any, input_ids: torch.Tensor, chains: list[list[Block]], drop: Callable[[Path], None]):
        """`input_ids`, (batch, length), has a chain of blocks for each row; all are equally long."""
        self.length = len(chains[0]) * TOKENS
        self.device = model.device
        self._model = model
        self._input_ids = input_ids[:, : self.length]
        self._are_alike = bool((self._input_ids == self._input_ids[:1]).all())
        self._chains = chains[:1] if self._are_alike else chains
        self._rows = len(input_ids) if self._are_alike else 1  # of the batch, for each chain
        self._drop = drop
        self._computed: Any = None
        for block in chain.from_iterable(self._chains):
            block.announce(0, _AHEAD)

    def __deepcopy__(self, _: dict[int, Any]) -> Prefix:
        return self

    def joined(self, layer: int, device: torch.device, new: States | None = None) -> States:
        """Keys and values of a layer, (batch, heads, tokens, size), followed by new ones."""
        if self._computed is None:
            try:
                return self._stored(layer, device, new)
            except CorruptFileError as error:
                log.warning("%s: its tokens are computed again", error)
                self._computed = self._compute()
        again = self._computed.layers[layer]
        return _joined([again.keys], new and new[0], device), _joined([again.values], new and new[1], device)

    @property
    def is_damaged(self) -> bool:
        return self._computed is not None

    def block(self, row: int, depth: int) -> list[States]:
        """All states of a block, (1, heads, TOKENS, size); raises `CorruptFileError`."""
        block = self._chains[0 if self._are_alike else row][depth]
        return [block.states(layer) for layer in range(len(block.forms))]

    def _stored(self, layer: int, device: torch.device, new: States | None) -> States:
        self._bring_in(layer, None if new is None else Form.of(*new))
        found = []
        for row, blocks in enumerate(self._chains):
            rows = slice(None) if self._are_alike else slice(row, row + 1)
            states = [self._dropping(block, block.states, layer) for block in blocks]
            keys, values = (
                _joined([part.expand(self._rows, -1, -1, -1) for part in parts], new and new[place][rows], device)
                for place, parts in enumerate(zip(*states, strict=True))
            )
            found.append((keys, values))
        if len(found) == 1:
            return found[0]
        keys, values = (torch.cat(rows) for rows in zip(*found, strict=True))
        return keys, values

    def _bring_in(self, layer: int, form: Form | None) -> None:
        for block in chain.from_iterable(self._chains):
            if form not in (None, block.forms[layer]):
                raise CorruptFileError(f"{block.path} has other states in layer {layer} than the model")
            if layer % _AHEAD == 0:
                self._dropping(block, block.bring_in, layer, layer + _AHEAD)
                block.announce(layer + _AHEAD, layer + 2 * _AHEAD)

    def _dropping(self, block: Block, act: Callable[..., Result], *args: object) -> Result:
        """What `act` gives; the block is removed if that fails."""
        try:
            return act(*args)
        except CorruptFileError:
            self._drop(block.path)
            raise

    def _compute(self) -> Any:
        from transformers import DynamicCache

        model = self._model
        past = DynamicCache(config=model.config)
        takes = inspect.signature(model.forward).parameters
        options = {str(given_cache(takes)): past, **({"logits_to_keep": 1} if "logits_to_keep" in takes else {})}
        with torch.no_grad():
            model(self._input_ids.to(model.device), use_cache=True, **options)
        return past


def _joined(parts: list[torch.Tensor], new: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        parts = [torch.cat(parts, dim=-2).to(device)]
    return torch.cat(parts if new is None else [*parts, new], dim=-2)


def past_of(config: Any, prefix: Prefix, until: int) -> Any:
    """A `DynamicCache` that begins with a prefix, and tells the states of its first `until` tokens; `ArgumentError`."""
    from transformers import DynamicCache

    past = DynamicCache(config=config)
    layers = []
    for place, layer in enumerate(past.layers):
        of: Any = type(layer)
        kind = _stored_kind(of)
        if kind is None:
            raise ArgumentError(
                f"prompts can't be kept for this model: layer {place} of its cache is a {type(layer).__name__}, whose "
                "state after a part of a prompt can't be had from that after the whole: leave prompt_cache out"
            )
        stored = kind.__new__(kind)
        stored.__dict__.update({key: value for key, value in vars(layer).items() if key not in ("keys", "values")})
        stored._begin(prefix, place, until)
        layers.append(stored)
    past.layers = layers
    return past


@cache
def _stored_kind(kind: Any) -> Any:
    """A subclass of a layer's class whose first tokens come from a prefix; None if it has other states."""
    from offload.transformers_api import DynamicLayer, DynamicSlidingWindowLayer

    part = {DynamicLayer: _StoredLayer, DynamicSlidingWindowLayer: _StoredSlidingLayer}.get(kind)
    return part and type(f"{kind.__name__}WithPrefix", (part, kind), {"_layer_type": None})


def _of_prefix(name: str) -> property:
    """Keys or values, which are taken from the prefix when they are asked for, and leave it when they are set."""

    def get(layer: Any) -> Any:
        if layer._prefix is not None:
            layer._take()
        return getattr(layer, name)

    def put(layer: Any, states: torch.Tensor | None) -> None:
        layer._prefix = None
        setattr(layer, name, states)

    return property(get, put)


class _StoredLayer:
    dtype: torch.dtype
    device: torch.device
    is_initialized: bool
    keys, values = _of_prefix("_keys"), _of_prefix("_values")

    def _begin(self, prefix: Prefix, place: int, until: int) -> None:
        self._prefix: Prefix | None = prefix if prefix.length else None  # until its states are here
        self._place = place
        self._keys: Any = None
        self._values: Any = None
        self._until = until
        self._seen = prefix.length  # tokens, all in their order
        self.is_initialized = self._prefix is not None
        self.device = prefix.device

    @property
    def has_all(self) -> bool:
        """Whether it has seen the first `until` tokens once, and no others in their place."""
        return self._seen >= self._until

    def passed(self, start: int, end: int) -> States:
        """Keys and values of some of the first tokens, (batch, heads, tokens, size)."""
        return self.keys[:, :, start:end], self.values[:, :, start:end]

    def get_seq_length(self) -> int:
        return super().get_seq_length() if self._prefix is None else self._prefix.length  # type: ignore[misc]

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **options: object) -> States:
        self._count(key_states.shape[-2])
        if self._prefix is None:
            return super().update(key_states, value_states, *args, **options)  # type: ignore[misc,no-any-return]
        self._take(key_states, value_states)
        return self._keys, self._values

    def reset(self) -> None:
        super().reset()  # type: ignore[misc]
        self._seen = -1

    def _count(self, new: int) -> None:
        if self._seen < self._until:
            before = self.get_seq_length()
            self._seen = before + new if before == self._seen else -1  # -1: it was reset, or cropped
        elif self._seen > 0 and self.get_seq_length() < self._until:
            self._seen = -1

    def _take(self, *new: torch.Tensor) -> None:
        assert self._prefix is not None
        if any(map(is_followed, new)):
            raise UnsupportedOpError(
                "kept keys and values carry no gradients: use torch.no_grad(), or leave prompt_cache out"
            )
        if new and new[0].shape[-2] >= self._until:  # as transformers' assisted generation does (5.23)
            raise ArgumentError(
                f"the model was given the whole prompt, although its first {self._prefix.length} tokens are known: "
                "give it those that follow, or call PromptCache.generate, which drafts tokens as well"
            )
        self.device = new[0].device if new else self.device
        self._keys, self._values = self._prefix.joined(self._place, self.device, new or None)  # type: ignore[arg-type]
        self.dtype = self._keys.dtype
        self._prefix = None


class _StoredSlidingLayer(_StoredLayer):
    """Like `_KeptLayer`, for layers that keep only the tokens in a window: the first ones are remembered for blocks."""

    sliding_window: int
    cumulative_length: int
    _sliding_window_tensor: torch.Tensor

    def _begin(self, prefix: Prefix, place: int, until: int) -> None:
        super()._begin(prefix, place, until)
        self.cumulative_length = self._first = prefix.length
        self._sliding_window_tensor = self._sliding_window_tensor.to(self.device)
        self._since: list[States] = []

    def passed(self, start: int, end: int) -> States:
        """Keys and values of some of the first tokens, but for those of the prefix."""
        keys, values = (torch.cat(parts, dim=-2) for parts in zip(*self._since, strict=True))
        self._since = [(keys, values)]
        some = slice(start - self._first, end - self._first)
        return keys[:, :, some], values[:, :, some]

    def get_seq_length(self) -> int:
        return self.cumulative_length

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **options: object) -> States:
        if self._prefix is not None:
            self._take(key_states, value_states)
        if 0 <= self._seen < self._until:
            self._since.append((key_states, value_states))
        return super().update(key_states, value_states, *args, **options)

    def _take(self, *new: torch.Tensor) -> None:
        """The states of the prefix that the window covers; `update` appends the new ones."""
        super()._take(*new)
        end = self.get_seq_length() if not new else -new[0].shape[-2]
        window = self.sliding_window - 1
        self._keys, self._values = (states[:, :, :end][:, :, -window:] for states in (self._keys, self._values))
