"""Passes in which a row does not depend on those beside it: a token's logits are those without a draft.

Always true:
- products with packed weights go through the kernels, however many rows there are; attention is computed row by row,
  as it is when tokens come one at a time
- the model's configuration names this attention while `generate` runs with drafts, and then as before; other threads
  compute as usual meanwhile

It is transformers' `sdpa` attention. Products of torch's own, with dense weights such as a head or the router of a
mixture, depend on how many rows there are.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from offload.system.locks import fork_safe_lock
from offload.tensor.backends import any_rows
from offload.tensor.products import are_multiplied_packed

_NAME, _USUAL = "offload_rows", "sdpa"

_on: ContextVar[bool | None] = ContextVar("on", default=None)  # None: outside of `alike_rows`
_LOCK = fork_safe_lock()
_AT_WORK: dict[int, int] = {}  # how many calls are under way, by the id of the configuration


def is_switchable() -> bool:
    """Whether passes of the running thread can be such, within `alike_rows`."""
    return _on.get() is not None


def switch_alike(*, on: bool) -> None:
    """Whether the passes that follow in the running thread are such, if they can be."""
    if is_switchable():
        _on.set(on)
        any_rows.set(on)


@contextmanager
def alike_rows(model: Any) -> Iterator[None]:
    """Within the block, passes of a model can be switched to such ones, unless its rows depend on others anyway."""
    config = model.config.get_text_config(decoder=True)
    with _LOCK:
        is_usual = config._attn_implementation == _USUAL or id(config) in _AT_WORK
    if not is_usual or not are_multiplied_packed(model):
        yield
        return
    from offload.transformers_api import ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(_NAME, attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(_NAME, ALL_MASK_ATTENTION_FUNCTIONS[_USUAL])
    on, rows = _on.set(False), any_rows.set(False)
    with _LOCK:
        _AT_WORK[id(config)] = _AT_WORK.get(id(config), 0) + 1
        config._attn_implementation_internal = _NAME
    try:
        yield
    finally:
        with _LOCK:
            _AT_WORK[id(config)] -= 1
            if not _AT_WORK[id(config)]:
                del _AT_WORK[id(config)]
                config._attn_implementation_internal = _USUAL
        _on.reset(on)
        any_rows.reset(rows)


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: object,
) -> tuple[torch.Tensor, None]:
    """Attention as transformers' `sdpa` computes it, one row of the query after the other.

    `query` is (1, heads, rows, size), `key` and `value` (1, heads, tokens, size), the rows' own tokens at the end;
    the mask (1, 1, rows, tokens) says which ones a row sees, None all up to its own. Returns (1, rows, heads,
    size), and None.
    """
    from offload.transformers_api import sdpa_attention_forward

    rows, tokens = query.shape[2], key.shape[2]
    is_usual = attention_mask is None or attention_mask.dtype == torch.bool
    if not _on.get() or rows == 1 or not is_usual or query.shape[0] > 1:
        result: tuple[torch.Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **options)
        return result
    parts = []
    for row in range(rows):
        begin, end, mask = 0, tokens - rows + row + 1, None
        if attention_mask is not None:
            seen = attention_mask[0, 0, row]
            begin = int(seen.int().argmax()) if options.get("sliding_window") else 0
            mask = attention_mask[:, :, row : row + 1, begin:end]
            mask = None if bool(mask.all()) else mask
        one, of_row = slice(row, row + 1), slice(begin, end)
        seen_by_row = key[:, :, of_row], value[:, :, of_row]
        parts.append(sdpa_attention_forward(module, query[:, :, one], *seen_by_row, mask, **options)[0])
    return torch.cat(parts, dim=1), None
