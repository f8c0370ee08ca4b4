"""Nothing is read or written beside a tensor: C is given no address of a tensor that does not fit.

`make kernels-asan` runs these tests with a library that notices each byte beside one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from offload.errors import ArgumentError
from offload.kernels import native
from offload.kernels.native import ExpertRows, Matrix, Product, WeightedSum
from offload.kernels.packed import GgufRows, NumberRows, WordColumns
from tests.kernels.multiplying import multiply
from tests.processes import run_script

pytestmark = pytest.mark.skipif(native.library() is None, reason="the kernels were not built")

ROWS, COLUMNS = 24, 64
_ALIVE: list[torch.Tensor] = []  # pieces of matrices


def matrix(rows: int = ROWS, columns: int = COLUMNS) -> Matrix:
    _ALIVE.append(torch.zeros(rows, columns, dtype=torch.int8))
    _ALIVE.append(torch.ones(rows, 1))
    made = NumberRows("signed_bytes").matrix(_ALIVE[-2:], columns)
    assert made is not None
    return made


def words() -> Matrix:
    pieces = [torch.zeros(shape, dtype=torch.int32).t() for shape in ((COLUMNS // 8, 32), (2, 4))]
    _ALIVE.extend([*pieces, torch.ones(2, 32).t()])
    made = WordColumns().matrix(_ALIVE[-3:], COLUMNS)
    assert made is not None
    return made


def expert(hidden: int = 64, wide: int = 64, inner: int = 32, width: int = 40) -> tuple[Product, Product]:
    up = Product([(matrix(wide - 8, hidden), wide - 8), (matrix(8, hidden), 8)])
    return up, Product([(matrix(width, inner), width)])


def total(picks: int = 2, rows: int = 5, width: int = 40) -> WeightedSum:
    return WeightedSum(torch.arange(6).view(-1, picks) % rows, torch.ones(6), torch.empty(6 // picks, width))


def sums(experts: list[ExpertRows], x: torch.Tensor, down: torch.Tensor, tokens: Any, up: Any, **total: Any) -> None:
    native.multiply_experts(experts, x, down, tokens=tokens, up=up, total=WeightedSum(**total) if total else None)


def gather(first: torch.Tensor, last: torch.Tensor, place: torch.Tensor, begins: list[int]) -> None:
    native.gather([first, last], begins, place)


LOGPS = {"width": 14, "id_bits": 10, "bits": 10}
FOUR = {"x": torch.ones(4, 64), "down": torch.empty(5, 40), "tokens": torch.tensor([0, 1, 2, 3, 3])}
EXPERTS = [ExpertRows(*expert(), 3, 0), ExpertRows(*expert(), 2, 3)]
GIVEN: dict[str, tuple[Callable[..., None], dict[str, Any]]] = {
    "decode": (native.decode, {"matrix": matrix(), "first": 8, "place": torch.empty(16, COLUMNS)}),
    "decode_turned": (native.decode_turned, {"matrix": matrix(), "place": torch.empty(COLUMNS, ROWS)}),
    "pick": (native.pick, {"matrix": matrix(), "rows": torch.tensor([3, 1, 23]), "place": torch.empty(3, COLUMNS)}),
    "gather": (
        gather,
        {
            "begins": [2, 8],
            **{name: torch.zeros(n, dtype=torch.uint8) for name, n in (("first", 5), ("last", 9), ("place", 17))},
        },
    ),
    "pack_logps": (
        native.pack_logps,
        {"ids": torch.zeros(5, 4, dtype=torch.int64), "logps": torch.zeros(5, 4), **LOGPS},
    ),
    "unpack_logps": (native.unpack_logps, {"packed": torch.zeros(5, 14, dtype=torch.uint8), "k": 4, **LOGPS}),
    "multiply": (
        multiply,
        {"matrix": matrix(), "x": torch.ones(5, COLUMNS), "bias": torch.ones(ROWS), "place": torch.empty(5, ROWS)},
    ),
    "experts": (sums, {"experts": EXPERTS, **FOUR, "up": None, **total()._asdict()}),
    "experts, up": (sums, {"experts": EXPERTS, **FOUR, "up": torch.empty(5, 64)}),
    "experts, down": (
        sums,
        {"experts": EXPERTS, "x": torch.ones(5, 32), "down": torch.empty(5, 40), "tokens": None, "up": None},
    ),
    "experts, sum": (
        sums,
        {"experts": [], **dict.fromkeys(("tokens", "up")), "x": torch.ones(1, 1), "down": torch.ones(5, 40)}
        | total()._asdict(),
    ),
}

OTHERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "fewer rows": lambda x: x[:-1].clone(),
    "more rows": lambda x: torch.cat([x, x[:1]]),
    "no rows": lambda x: x[:0],
    "fewer columns": lambda x: x[..., :-1].clone(),
    "more columns": lambda x: torch.cat([x, x[..., :1]], -1),
    "columns that are apart": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "rows that are apart": lambda x: torch.cat([x, x], -1)[..., : x.shape[-1]],
    "a dimension less": lambda x: x[0],
    "a dimension more": lambda x: x[None],
    "another dtype": lambda x: x.to(torch.float64 if x.is_floating_point() else torch.int16),
    "no memory": lambda x: x.to("meta"),
    "memory that was taken away": lambda x: taken_away(x.clone()),
}
FITS = {  # the caller decides how many rows there are, or how far they are apart
    "decode": {("place", "fewer rows"), ("place", "no rows"), ("place", "rows that are apart")},
    "decode_turned": {("place", "rows that are apart")},
    "pick": {("place", "rows that are apart"), ("rows", "columns that are apart"), ("rows", "another dtype")},
    "gather": {("first", "more rows"), ("first", "more columns"), ("place", "more rows"), ("place", "more columns")}
    | {(name, other) for name in ("first", "last") for other in ("fewer rows", "fewer columns", "no rows")},
    "pack_logps": {(name, f"{what} that are apart") for name in ("ids", "logps") for what in ("rows", "columns")},
    "unpack_logps": {
        ("packed", other)
        for other in ("fewer rows", "more rows", "no rows", "rows that are apart", "columns that are apart")
    },
    "multiply": {(name, "rows that are apart") for name in ("x", "place")},
    "experts": {("x", "rows that are apart"), ("x", "more rows"), ("down", "more rows")},
    "experts, up": {("x", "rows that are apart"), ("x", "more rows"), ("down", "more rows")},
    "experts, down": {("x", "rows that are apart"), ("down", "more rows")},
    "experts, sum": {("x", other) for other in OTHERS} | {("down", "more rows")},
}


def taken_away(x: torch.Tensor) -> torch.Tensor:
    x.untyped_storage().resize_(0)
    return x


def _is_taken_away(other: str) -> bool:
    return other in ("no memory", "memory that was taken away")


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether the other is no other: what is done to rows changes nothing in a vector."""
    return one.shape == other.shape and one.stride() == other.stride() and one.dtype == other.dtype


def cases() -> Iterator[tuple[str, str, str]]:
    for name, (_, given) in GIVEN.items():
        for argument, value in given.items():
            if isinstance(value, torch.Tensor):
                yield from ((name, argument, other) for other in OTHERS)


def outcome(name: str, **others: Any) -> str:
    act, given = GIVEN[name]
    try:
        act(**{**given, **others})
    except ArgumentError as error:
        return str(error)
    return ""


def outcome_of_other(name: str, argument: str, other: str) -> str | None:
    value = GIVEN[name][1][argument]
    if _is_taken_away(other) and not value.numel():
        return None
    changed = OTHERS[other](value)
    is_same = not _is_taken_away(other) and same(value, changed)
    return None if is_same else outcome(name, **{argument: changed})


def test_each_function_that_takes_a_tensor_is_tried():
    functions = [act for name, act in vars(native).items() if inspect.isfunction(act) and name[0] != "_"]
    taking = {one.__name__ for one in functions if "torch.Tensor" in str(inspect.signature(one))}

    of_logps, looks = {"pack_logps", "unpack_logps"}, {"is_usual"}
    given = {"decode", "decode_turned", "gather", "pick", "multiply_experts", "memory_of"}
    assert given | of_logps | looks == taking


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("argument", ["x", "bias"])
def test_a_product_takes_usual_tensors_that_fit_alone(argument, other):
    given = GIVEN["multiply"][1]
    product, tensors = Product([(given["matrix"], ROWS)]), {name: given[name] for name in ("x", "bias")}
    changed = OTHERS[other](tensors[argument])
    of_other_shapes = {"fewer rows", "more rows", "a dimension less", "a dimension more"}
    is_same = not _is_taken_away(other) and same(tensors[argument], changed)
    fits = is_same or (argument == "x" and other in of_other_shapes)

    found = product.times(**{**tensors, argument: changed}, dtype=torch.float32, most=native.MOST_ROWS)

    assert (found is not None) == fits
    assert found is None or found.shape == (*(changed if argument == "x" else given["x"]).shape[:-1], ROWS)
    assert product.times(**tensors, dtype=torch.float32, most=4) is None


def test_addresses_are_taken_in_one_place_and_of_usual_tensors():
    folder = Path(native.__file__).parent
    lines = [line for path in folder.glob("*.py") for line in path.read_text(encoding="utf-8").splitlines()]

    assert 1 + 3 == sum("data_ptr" in line for line in lines)  # three in `Product.times`
    assert "data_ptr" not in (folder.parent / "tensor/experts.py").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", GIVEN)
def test_arguments_that_fit_are_computed(name):
    assert "" == outcome(name)


WRONG: dict[str, tuple[str, dict[str, Any]]] = {
    "a row before the first": ("decode", {"first": -1}),
    "a row after the last": ("decode", {"first": 9}),
    "words that are turned": ("decode_turned", {"matrix": words(), "place": torch.empty(COLUMNS, 32)}),
    "an index before the first row": ("pick", {"rows": torch.tensor([3, -1, 2])}),
    "an index after the last row": ("pick", {"rows": torch.tensor([3, 24, 2])}),
    "an index that overflows": ("pick", {"rows": torch.tensor([3, 2**62, 2])}),
    "more rows than there are": ("multiply", {"matrix": matrix(ROWS - 1)}),
    "rows of other columns": ("multiply", {"matrix": matrix(ROWS, COLUMNS + 1)}),
    "65 rows": ("multiply", {"x": torch.ones(65, COLUMNS), "place": torch.empty(65, ROWS)}),
    "a piece before the first byte": ("gather", {"begins": [-1, 8]}),
    "a piece after the last byte": ("gather", {"begins": [2, 9]}),
    "a piece without a place": ("gather", {"begins": [2]}),
    "another level": ("multiply", {"level": native.best_level() + 1}),
    "a level below plain C": ("decode", {"level": -1}),
    "a token before the first": ("experts", {"tokens": torch.tensor([0, 1, -1, 3, 3])}),
    "a token after the last": ("experts", {"tokens": torch.tensor([0, 1, 4, 3, 3])}),
    "a place before none": ("experts", {"places": torch.tensor([[0, 1], [-2, 3], [4, 1]])}),
    "a place after the last": ("experts", {"places": torch.tensor([[0, 1], [5, 3], [4, 1]])}),
    "a place after the last, for the sum alone": ("experts, sum", {"places": torch.tensor([[0, 1], [5, 3], [4, 1]])}),
    "an expert with 65 rows": (
        "experts",
        {"experts": [ExpertRows(*expert(), 65, 0)], "tokens": torch.arange(65) % 4, "down": torch.empty(65, 40)},
    ),
    "an expert without rows": ("experts", {"experts": [*EXPERTS, ExpertRows(*expert(), 0, 0)]}),
    "results before the first": ("experts", {"experts": [EXPERTS[0], ExpertRows(*expert(), 2, -1)]}),
    "results after the last": ("experts", {"experts": [EXPERTS[0], ExpertRows(*expert(), 2, 4)]}),
    **{
        f"an expert with another {size}": (
            "experts",
            {"experts": [EXPERTS[0], ExpertRows(*expert(**{size: more}), 2, 3)]},
        )
        for size, more in {"hidden": 96, "wide": 72, "inner": 64, "width": 41}.items()
    },
    "half of the gates": ("experts", {"experts": [ExpertRows(*expert(wide=48), 5, 0)]}),
    "products with `up` of no tokens": ("experts, up", {"tokens": None, "x": torch.ones(5, 32)}),
}


@pytest.mark.parametrize(
    "parts",
    [[(matrix(), ROWS + 1)], [(matrix(), -1)], [(matrix(), 4), (matrix(columns=32), 4)]],
    ids=["more rows than there are", "fewer than none", "other columns"],
)
def test_parts_of_an_expert_that_do_not_fit_are_refused(parts):
    with pytest.raises(ArgumentError, match="do not take"):
        Product(parts)


def not_as_expected() -> list[object]:
    """What was taken and does not fit, or was refused and fits."""
    taken: list[object] = [what for what, (name, others) in WRONG.items() if not outcome(name, **others)]
    for name, argument, other in cases():
        found = outcome_of_other(name, argument, other)
        if found is not None and ((argument, other) in FITS[name]) != (found == ""):
            taken.append((name, argument, other))
    return taken


def test_tensors_and_numbers_that_do_not_fit_are_refused():
    """Without assertions: with `python -O`, there are none."""
    code = "from tests.kernels.test_sizes import not_as_expected; print(__debug__, not_as_expected())"

    assert [] == not_as_expected()
    assert "False []\n" == run_script(code, env={"PYTHONOPTIMIZE": "1"}, fresh=True)


def test_a_piece_that_is_not_in_memory_is_refused():
    rows = torch.zeros(4, 34, dtype=torch.uint8)

    assert GgufRows("Q8_0").matrix([rows], 32) is not None
    for wrong in (rows.to("meta"), taken_away(rows.clone())):
        with pytest.raises(ArgumentError, match="no memory"):
            GgufRows("Q8_0").matrix([wrong], 32)
