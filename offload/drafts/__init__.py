"""Drafts: several tokens for each pass of a model, as many as pay for what the pass costs.

Always true:
- a draft changes how fast tokens come, not which: transformers accepts or rejects them by its own rule
- the length of a draft follows from what passes and drafts took, and from what was accepted; it may be none
- an assistant stays in memory, and counts in the budget of the model that it drafts for

| module | what |
| --- | --- |
| `candidates` | drafts for one call of `generate`, in transformers' interface |
| `costs` | what a pass and a draft take, what of it is accepted, and the length that follows |
| `lookup` | a draft from the text itself: what followed the same tokens before |
| `alike` | passes in which a row does not depend on those beside it |
"""

from offload.drafts.candidates import draft_summary

__all__ = ["draft_summary"]
