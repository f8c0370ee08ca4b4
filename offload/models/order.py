"""The order in which the values of a model are likely to be read.

Always true:
- it is a guess for the first pass: what is really read is learned from the reads themselves
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from offload.memory import uncollected
from offload.prefetch.engine import expect
from offload.prefetch.residency import SMALL, Pool
from offload.storage.handle import Handle
from offload.tensor.wrapper import handle_of, is_offloaded


@uncollected()
def expect_reads(model: nn.Module, pool: Pool | None = None) -> None:
    """Have the values on disk of a model read ahead block by block, in each the small ones first.

    Of embeddings rows are picked, and of stacks of matrices (experts) some: they are not expected as wholes.

    Args:
        model: a module whose parameters and buffers are where they will be.
        pool: the budget that they are to be under; None for that of the process.
    """
    handles: dict[int, Handle] = {}
    for block in _blocks(model):
        modules = [module for module in block if not isinstance(module, nn.Embedding | nn.EmbeddingBag)]
        members = [member for module in modules for member in (*module._parameters.values(), *module._buffers.values())]
        stored = [member for member in members if is_offloaded(member) and member.dim() != 3]
        for tensor in sorted(stored, key=lambda tensor: tensor.nbytes > SMALL):
            handles.setdefault(id(handle_of(tensor)), handle_of(tensor))
    expect(handles.values(), pool)


def _blocks(module: nn.Module) -> Iterator[list[nn.Module]]:
    """A module's parts in their order; what stands in a list is a block with all that is in it."""
    yield [module]
    for child in module.children():
        if isinstance(child, nn.ModuleList | nn.Sequential):
            yield from (list(block.modules()) for block in child.children())
        else:
            yield from _blocks(child)
