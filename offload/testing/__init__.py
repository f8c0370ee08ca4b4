"""Helpers for tests: comparing values, a small checkpoint, and torch's op database as a reference.

Always true:
- two values are equal if their bits are; looser comparisons are options
- torch's testing internals, transformers, and their dependencies are imported on use
- random generators are left unchanged

| module | what |
| --- | --- |
| `equal` | `assert_equal`, `is_equal` |
| `checkpoints` | `tiny_checkpoint` |
| `ops` | `census`: a tensor subclass against plain tensors, op by op |
"""

from offload.testing.checkpoints import tiny_checkpoint
from offload.testing.equal import assert_equal, is_equal
from offload.testing.ops import Trial, census

__all__ = ["Trial", "assert_equal", "census", "is_equal", "tiny_checkpoint"]
