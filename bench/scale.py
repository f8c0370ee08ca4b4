"""How large the measured things are, and how often they are measured.

Always true:
- every case runs at every scale; but the toy scale's figures say nothing about speed
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.gguf_models import NAMED, TOY_NAMED, Shape
from bench.models import (
    experts,
    fp8_experts,
    larger_experts,
    larger_llama,
    llama,
    toy_experts,
    toy_fp8_experts,
    toy_llama,
    toy_sliced_experts,
    toy_sliced_llama,
    with_values_of,
)


@dataclass(frozen=True)
class Timed:
    """How many tokens: to warm up, and measured; and for how many seconds at most, each."""

    warm_up: int
    tokens: int
    seconds: float = 60.0


@dataclass(frozen=True)
class Scale:
    """Sizes and counts.

    Attributes:
        model: creates the checkpoint of a language model.
        experts: creates that of a mixture of experts.
        draft_model: creates that of a model that is drafted for.
        larger: by kind, creates a checkpoint of this many gigabytes in a folder.
        packed_experts: the same for a mixture of experts in FP8; its files may have holes instead of values.
        larger_times: size relative to the machine's memory.
        value_megabytes: size of the largest values in models that are read cold, and under a cap; each in two dtypes.
        value_gigabytes: approximate size of these models.
        packed_gigabytes: approximate size of a packed checkpoint when dense; 0 for two small layers.
        layer_counts: numbers of tokens for which the experts of a layer are measured, of `experts.TOKENS`.
        gguf_layers: layers of a Llama in a GGUF file, some 50 MB each.
        named: shapes of the models in the table of named ones.
        memory: what each of them may use, in bytes; None for all that there is.
        table_gigabytes: size of a table of rows in a model.
        named_tokens: how many tokens of them, to warm up and measured, and for how long.
        rounds: runs per arm.
        pairs: tokens decoded in turn in one process.
        packed_pairs: the same for packed models.
        tokens: tokens decoded by a warm trial.
        capped_tokens: tokens decoded by a capped trial.
        drafted_tokens: tokens generated with drafts.
        prompts: tokens per cold pass.
        picks: reads of matrices picked from a stack.
        factors: sizes of a model relative to the budget.
        worlds: numbers of ranks.
        calls: calls of an op per timing.
        load_tensors: tensors in a checkpoint of many tiny ones.
        load_gigabytes: size of a mixture of experts that is loaded without reading.
        small_tensors: tensors of 64 KiB in a checkpoint that is read cold.
        value_rows: rows of 16 KiB in a value that is replaced.
        written_rows: rows of it that are written in place.
        cache_bytes: size of a table of rows.
        cache_batches: batches of 256 rows to read from it.
        cache_seconds: time limit for slow stores.
    """

    name: str
    model: Callable[[], Path]
    experts: Callable[[], Path]
    draft_model: Callable[[], Path]
    packed_experts: Callable[..., Path]
    larger: dict[str, Callable[[Path, float], Path]]
    larger_times: float
    value_megabytes: tuple[float, ...]
    value_gigabytes: float
    packed_gigabytes: float
    layer_counts: int
    gguf_layers: int
    named: tuple[Shape, ...]
    memory: tuple[int | None, ...]
    named_tokens: Timed
    table_gigabytes: float
    rounds: int
    pairs: int
    packed_pairs: int
    tokens: int
    capped_tokens: int
    drafted_tokens: int
    prompts: tuple[int, ...]
    picks: int
    factors: tuple[float, ...]
    worlds: tuple[int, ...]
    calls: int
    load_tensors: int
    load_gigabytes: float
    small_tensors: int
    value_rows: int
    written_rows: int
    cache_bytes: int
    cache_batches: int
    cache_seconds: float

    def by_value(self, scratch: Path) -> Iterator[tuple[str, Path, int]]:
        """Models by the size of their largest values: a description, the folder, and the size in bytes.

        Each exists until the next one is requested.
        """
        for megabytes, dtype in product(self.value_megabytes, ("float32", "bfloat16")):
            with TemporaryDirectory(dir=scratch) as made:
                folder = with_values_of(Path(made), megabytes, dtype, self.value_gigabytes)
                yield f"{megabytes:g} MB {dtype}", folder, int(megabytes * 1e6)


FULL = Scale(
    name="full",
    model=llama,
    experts=experts,
    draft_model=partial(llama, 2.0),
    packed_experts=fp8_experts,
    larger={"dense": larger_llama, "experts": larger_experts},
    larger_times=1.2,
    value_megabytes=(8, 46, 128, 470),
    value_gigabytes=1.0,
    packed_gigabytes=2.0,
    layer_counts=10,
    gguf_layers=28,
    named=NAMED,
    memory=(None, 8 << 30, 4 << 30),
    named_tokens=Timed(20, 10, seconds=8),
    table_gigabytes=20.0,
    rounds=3,
    pairs=60,
    packed_pairs=15,
    tokens=8,
    capped_tokens=3,
    drafted_tokens=80,
    prompts=(1, 16, 256),
    picks=4_000,
    factors=(1.5, 3.0),
    worlds=(1, 2, 4),
    calls=300,
    load_tensors=4_000,
    load_gigabytes=20.0,
    small_tensors=4_000,
    value_rows=4096,
    written_rows=256,
    cache_bytes=512 << 20,
    cache_batches=32,
    cache_seconds=2.0,
)
TOY = Scale(
    name="toy",
    model=toy_llama,
    experts=toy_experts,
    draft_model=toy_llama,
    packed_experts=toy_fp8_experts,
    larger={"dense": toy_sliced_llama, "experts": toy_sliced_experts},
    larger_times=0,
    value_megabytes=(0.1,),
    value_gigabytes=0.006,
    packed_gigabytes=0.0,
    layer_counts=2,
    gguf_layers=1,
    named=TOY_NAMED,
    memory=(None,),
    named_tokens=Timed(1, 2),
    table_gigabytes=0.01,
    rounds=1,
    pairs=3,
    packed_pairs=3,
    tokens=2,
    capped_tokens=2,
    drafted_tokens=12,
    prompts=(1, 4),
    picks=200,
    factors=(3.0,),
    worlds=(1, 2),
    calls=10,
    load_tensors=20,
    load_gigabytes=0.0,
    small_tensors=10,
    value_rows=16,
    written_rows=4,
    cache_bytes=8 << 20,
    cache_batches=2,
    cache_seconds=2.0,
)
