"""How long the first token takes when the beginning of its prompt is kept, beside a pass that has it in memory.

Always true:
- both compute the same tokens, in turn, in one process; the ratio is the median of pairs of processor time
- the answers with and without kept prompts are compared
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

import offload
from offload.checkpoints.companions import tokenizer_in
from offload.generation import PromptCache
from offload.integrations.hub import folder_of
from offload.transformers_api import cache_option

_CACHE = cache_option()
_TEXT = "The ship left the harbour at {} in the morning, and {} people on the shore waved until it was out of sight. "


def figures(name: str, *, tokens: int, rounds: int, new: int) -> dict[str, Any]:
    """Seconds and ratios for a model: a folder, a GGUF file, or a name on the hub."""
    torch.set_num_threads(1)
    model = offload.from_pretrained(name)
    text = "".join(_TEXT.format(hour % 12 + 1, hour * 37 % 90) for hour in range(tokens))
    asked = tokenizer_in(folder_of(name), trust_remote_code=False)
    start = asked(text, return_tensors="pt")["input_ids"][:, :tokens]
    prompt = torch.cat([start, asked("So how many people waved?", return_tensors="pt")["input_ids"]], 1)
    options = {"max_new_tokens": new, "do_sample": False}
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        prompts = PromptCache(Path(folder, "prompts"))
        plain, expected = _timed(lambda: model.generate(prompt, **options))
        model.generate(start, prompt_cache=prompts, max_new_tokens=1)
        found = model.generate(prompt, prompt_cache=prompts, **options)
        prompts = PromptCache(prompts.folder)
        pairs = [_pair(model, prompts, prompt) for _ in range(rounds)]
    return {
        "tokens": prompt.shape[1],
        "known": pairs[0][2],
        "same answer": torch.equal(expected, found),
        "answer without (s)": plain,
        "first token (s)": median(first for first, _, _ in pairs),
        "a pass (s)": median(whole for _, whole, _ in pairs),
        "ratio": median(first / whole for first, whole, _ in pairs),
    }


def _pair(model: Any, prompts: PromptCache, prompt: torch.Tensor) -> tuple[float, float, int]:
    """Seconds until the logits of the first token, seconds of a pass over the same tokens, and how many are known."""

    def first() -> Any:
        past = prompts.past_for(model, prompt)
        return past, model(prompt[:, past.get_seq_length() :], **{_CACHE: past}, logits_to_keep=1)

    seconds, (past, _) = _timed(first)
    known = past.prompt.prefix.length
    past.crop(known - past.get_seq_length())
    whole, _ = _timed(lambda: model(prompt[:, known:], **{_CACHE: past}, logits_to_keep=1))
    return seconds, whole, known


def _timed(act: Callable[[], Any]) -> tuple[float, Any]:
    begun = time.process_time()
    result = act()
    return time.process_time() - begun, result


def main(argv: Sequence[str] | None = None) -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("model")
    options.add_argument("--tokens", type=int, default=2000, help="of the common beginning")
    options.add_argument("--rounds", type=int, default=9)
    options.add_argument("--new", type=int, default=32, help="tokens of the answer")
    chosen = options.parse_args(argv)
    for name, value in figures(chosen.model, tokens=chosen.tokens, rounds=chosen.rounds, new=chosen.new).items():
        print(f"{name}: {value:.3f}" if isinstance(value, float) else f"{name}: {value}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
