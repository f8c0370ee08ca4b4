"""`generate` with drafts: methods that a class of models gets.

Always true:
- without an assistant, a lookup or layers that draft, they do what those of the class do
"""

from __future__ import annotations

import inspect
from functools import partial, wraps
from typing import Any

from offload.generation.alike import alike_rows
from offload.generation.candidates import drafts_for
from offload.generation.mtp import mtp_candidates
from offload.models.pretrained import feature


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
        if getattr(given["generation_config"], "use_mtp", None):
            return mtp_candidates(self, given)
        return drafts_for(self, partial(kind._get_candidate_generator, self), given)

    return {one.__name__: one for one in (_assisted_decoding, _get_candidate_generator)}
