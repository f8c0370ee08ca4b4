"""Kept prompts: keys and values of the beginnings of prompts, in a folder, for later runs and other processes.

Always true:
- a model gets keys and values that were computed for the same tokens by the same model, or none
- whatever is missing or damaged is computed again

| module | what |
| --- | --- |
| `prompt_cache` | `PromptCache`: finds the longest known beginning of a prompt, and keeps what a run computed |
| `keeping` | `generate(..., prompt_cache=)` of models from disk |
| `past` | a cache of transformers whose first tokens come from blocks, layer by layer |
| `blocks` | the folder: a file per block of tokens, found by hash, under a budget of disk |
| `identity` | what distinguishes a model from all others that could give other keys and values |
"""

from offload.prompts.prompt_cache import PromptCache

__all__ = ["PromptCache"]
