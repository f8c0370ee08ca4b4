"""Names of types that signatures of several wings share.

Always true:
- nothing is imported from the package, and nothing but types is defined
"""

from __future__ import annotations

from typing import Any, TypeAlias

Args: TypeAlias = tuple[Any, ...]
"""Positional arguments, as `__torch_function__` and `__torch_dispatch__` receive them."""

Kwargs: TypeAlias = dict[str, Any]
"""Keyword arguments."""

Json: TypeAlias = Any
"""What `json.loads` returns."""
