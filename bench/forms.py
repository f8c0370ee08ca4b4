"""Other forms of checkpoint: pickled shards, and experts that transformers joins when it loads them.

Always true:
- what is measured, and how, is as in `bench.generate`
"""

from __future__ import annotations

from pathlib import Path

from bench.generate import figures_of
from bench.models import pickled
from bench.rounds import Figure
from bench.scale import Scale


def figures(scale: Scale, scratch: Path) -> list[Figure]:
    """Loading, the first token, the others, and memory, for each form."""
    folders = {"forms, pickled": pickled(scale.model()), "forms, experts": scale.experts()}
    return [figure for case, folder in folders.items() for figure in figures_of(case, folder, scale, scratch)]
