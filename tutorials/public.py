"""The modules that users import from, beside the package itself: the reference has a page for each.

Always true:
- the names of each are those in its `__all__`
"""

from __future__ import annotations

import offload

MODULES = (
    offload.budget,
    offload.errors,
    offload.generation,
    offload.integrations,
    offload.training,
)
