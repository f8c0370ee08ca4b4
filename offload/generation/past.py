"""A cache of transformers whose first tokens come from blocks.

Always true:
- a layer is what transformers' own layer is; beside that it counts the tokens that it has seen, for those that are kept
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from offload.errors import ArgumentError
from offload.generation.blocks import TOKENS, Block, States


def past_of(config: Any, blocks: list[Block], device: torch.device, until: int) -> Any:
    """A `DynamicCache` that begins with blocks, and tells the states of its first `until` tokens; `ArgumentError`."""
    from transformers import DynamicCache

    past = DynamicCache(config=config)
    for place, layer in enumerate(past.layers):
        kind = _stored_kind(layer.__class__)
        if kind is None:
            raise ArgumentError(
                f"prompts can't be kept for this model: layer {place} of its cache is a {type(layer).__name__}, whose "
                "state after a part of a prompt can't be had from that after the whole: leave prompt_cache out"
            )
        stored = past.layers[place] = kind.__new__(kind)
        vars(stored).update(vars(layer))
        stored._begin(len(blocks) * TOKENS, until)
        if blocks:
            keys, values = zip(*(block.states(place) for block in blocks), strict=True)
            stored._fill(torch.cat(keys, dim=-2).to(device), torch.cat(values, dim=-2).to(device))
    return past


@cache
def _stored_kind(kind: Any) -> Any:
    """A subclass of a layer's class whose first tokens may come from blocks; None if it has other states."""
    from offload.transformers_api import DynamicLayer, DynamicSlidingWindowLayer

    part = {DynamicLayer: _StoredLayer, DynamicSlidingWindowLayer: _StoredSlidingLayer}.get(kind)
    return part and type(f"{kind.__name__}WithPrefix", (part, kind), {"_layer_type": None})


class _StoredLayer:
    keys: Any
    values: Any
    lazy_initialization: Any

    def _begin(self, known: int, until: int) -> None:
        self._known, self._until = known, until
        self._seen = known  # tokens, all in their order

    def _fill(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """The states of what is known, (1, heads, tokens, size)."""
        self.lazy_initialization(keys, values)
        self.keys, self.values = keys, values

    @property
    def has_all(self) -> bool:
        """Whether it has seen the first `until` tokens once, and has them, and no others in their place."""
        length: int = self.get_seq_length()  # type: ignore[attr-defined]
        return min(self._seen, length) >= self._until

    def passed(self, start: int, end: int) -> States:
        """Keys and values of some of the first tokens, (1, heads, tokens, size)."""
        return self.keys[:, :, start:end], self.values[:, :, start:end]

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **options: object) -> States:
        if self._seen == self._known > 0:
            self._follow(key_states)
        self._count(key_states.shape[-2])
        return super().update(key_states, value_states, *args, **options)  # type: ignore[misc,no-any-return]

    def reset(self) -> None:
        super().reset()  # type: ignore[misc]
        self._seen = -1

    def _follow(self, new: torch.Tensor) -> None:
        """Refuse the first states after those that are known, if they can't follow them."""
        if new.shape[-2] >= self._until:  # as a way to generate may do that knows nothing of caches
            raise ArgumentError(f"the model was given the whole prompt, of which {self._known} tokens are known")
        self.device = new.device
        self.keys, self.values = (states.to(self.device) for states in (self.keys, self.values))

    def _count(self, new: int) -> None:
        before: int = self.get_seq_length()  # type: ignore[attr-defined]
        if self._seen < self._until:
            self._seen = before + new if before == self._seen else -1  # -1: it was reset, or cropped
        elif before < self._until:
            self._seen = -1


class _StoredSlidingLayer(_StoredLayer):
    """For layers that keep only the tokens in a window: those after the known ones are remembered for blocks."""

    sliding_window: int
    cumulative_length: int

    def _begin(self, known: int, until: int) -> None:
        super()._begin(known, until)
        self._since: list[States] = []

    def _fill(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        window = self.sliding_window - 1
        super()._fill(keys[:, :, -window:], values[:, :, -window:])
        self.cumulative_length = self._known

    def passed(self, start: int, end: int) -> States:
        """Keys and values of some of the first tokens, but for those that were known."""
        keys, values = (torch.cat(parts, dim=-2) for parts in zip(*self._since, strict=True))
        self._since = [(keys, values)]
        some = slice(start - self._known, end - self._known)
        return keys[:, :, some], values[:, :, some]

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **options: object) -> States:
        if 0 <= self._seen < self._until:
            self._since.append((key_states, value_states))
        return super().update(key_states, value_states, *args, **options)
