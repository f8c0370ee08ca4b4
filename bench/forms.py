"""Other kinds of checkpoints: pickled shards, experts stored separately, weights that are cast, and packed ones.

Always true:
- pickled shards and experts are measured as in `bench.generate`, against peers; the others as in `bench.packed`,
  against the same values stored dense
"""

from __future__ import annotations

from pathlib import Path

from bench import packed
from bench.generate import figures_of
from bench.models import pickled
from bench.peers import OURS
from bench.rounds import Figure
from bench.scale import Scale


def figures(scale: Scale, scratch: Path) -> list[Figure]:
    """Load, token and memory figures for the first two; time per token and decoding rate for the others."""
    folders = {"forms, pickled": pickled(scale.model()), "forms, experts": scale.experts()}
    found = [figure for case, folder in folders.items() for figure in figures_of(case, folder, scale, scratch)]
    return found + [figure for name in packed.FORMS for figure in _figures_or_reason(name, scale, scratch)]


def _figures_or_reason(name: str, scale: Scale, scratch: Path) -> list[Figure]:
    """A form that can't be measured loses only its own figures."""
    try:
        return packed.figures_of(name, scale, scratch)
    except Exception as error:
        return [Figure(f"forms, {name}", "", {}, [], "", {OURS: f"{type(error).__name__}: {error}"})]
