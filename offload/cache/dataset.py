"""A cache as a dataset of torch.

Always true:
- rows that are asked for together are read together
- another process gets the path and not the data
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch.utils.data import Dataset

if TYPE_CHECKING:
    from offload.cache.reading import ReadByIndex


class RowDataset(Dataset[dict[str, Any]]):
    """Rows of a cache as dicts. Use `TensorCache.as_dataset`."""

    def __init__(self, cache: ReadByIndex, columns: Sequence[str] | None) -> None:
        self.cache = cache
        self.columns = columns

    def __len__(self) -> int:
        return len(self.cache)

    def __getitem__(self, rows: Any) -> dict[str, Any]:
        """A row; of several rows, the batch, for a `DataLoader` with `batch_size=None` and a batch sampler."""
        return self.cache.get(rows, columns=self.columns)

    def __getitems__(self, rows: Sequence[int]) -> list[dict[str, Any]]:
        """Rows one by one, read together."""
        batch = self.cache.get(list(rows), columns=self.columns)
        return [{name: values[at] for name, values in batch.items()} for at in range(len(rows))]
