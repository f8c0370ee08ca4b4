"""A kind of file that `tests.fuzz.campaign` damages and reads.

Always true:
- a sample is a whole folder, as bytes by relative path: each trial damages its own copy
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

Files = dict[str, bytes]  # by relative path


class Wrong(Exception):
    """What was read is not what the file contains."""


@dataclass(frozen=True)
class Kind:
    """A kind of file.

    Attributes:
        samples: complete sample folders.
        damage: returns randomly damaged files for some.
        read: reads a folder; returns what was read, for comparison.
        theirs: what another library reads from it; None if there is none.
        weight: its share of the time.
    """

    name: str
    samples: Sequence[Files]
    damage: Callable[[Files, random.Random], Files]
    read: Callable[[Path], Mapping[str, torch.Tensor]]
    theirs: Callable[[Path], Mapping[str, torch.Tensor]] | None = None
    weight: float = 1.0


def files_of(folder: Path) -> Files:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
