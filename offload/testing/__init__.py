"""For tests: whether two values are equal, a checkpoint to try things on, and torch's op database as a judge.

Always true:
- two values are equal when their bits are; what is laxer is asked for
- torch's testing internals, transformers, and what these need are imported when they are asked for
- random generators are left as they were

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
