"""Helpers for tests: comparing values, and a small checkpoint.

Always true:
- two values are equal if their bits are; looser comparisons are options
- transformers is imported on use
- random generators are left unchanged

| module | what |
| --- | --- |
| `equal` | `assert_equal`, `is_equal` |
| `checkpoints` | `tiny_checkpoint` |
"""

from offload.testing.checkpoints import tiny_checkpoint
from offload.testing.equal import assert_equal, is_equal

__all__ = ["assert_equal", "is_equal", "tiny_checkpoint"]
