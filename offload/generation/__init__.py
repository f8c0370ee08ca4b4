"""Text from a language model on disk: prompts and answers in tokens, drafts, and prompts that are kept for later runs.

Always true:
- models know nothing of this: `features` registers what `generate` of their classes can do beyond its own
- a draft changes how fast tokens come, not which: transformers accepts or rejects them by its own rule
- the length of a draft follows from what passes and drafts took, and from what was accepted; it may be none
- an assistant on disk stays in memory, within a budget of its own
- a model gets keys and values that were computed for the same tokens by the same model, or none
- whatever is missing or damaged of kept prompts is computed again
- whatever a request says is answered or refused, and is never code

| module | what |
| --- | --- |
| `bodies` | what a request asks for, and refusals in OpenAI's form |
| `chat` | what requests say, in tokens; messages by the chat template of the model |
| `answering` | one answer: `generate`, and the scores of a prompt |
| `text` | tokens as text, as they come, up to a stop string |
| `features` | `generate` of models from disk, with drafts, and `generate(..., prompt_cache=)` |
| `candidates` | drafts for one call of `generate`, in transformers' interface, also from the text; their length |
| `alike` | passes in which a row does not depend on those beside it |
| `prompt_cache` | `PromptCache`: finds the longest known beginning of a prompt, and keeps what a run computed |
| `past` | a cache of transformers whose first tokens come from blocks |
| `blocks` | the folder: a file per block of tokens, found by hash, under a budget of disk |
| `identity` | what distinguishes a model from all others that could give other keys and values |
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from offload.generation.prompt_cache import PromptCache

__all__ = ["PromptCache"]


def __getattr__(name: str) -> Any:
    """Public names, imported when asked for: the command reads its line with `bodies` and `chat`, without torch."""
    if name in __all__:
        return getattr(import_module("offload.generation.prompt_cache"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
