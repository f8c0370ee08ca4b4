"""Functions of torch's that call functions: `cond`, `while_loop`, `map`, `scan`..., and dimensions that are objects."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._higher_order_ops import associative_scan, map, scan, while_loop
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention.flex_attention import flex_attention

import offload
from offload import OffloadedTensor
from tests.equal import assert_equal

pytestmark = pytest.mark.usefixtures("fresh_compiler")

Case = Callable[[nn.Module, torch.Tensor], torch.Tensor]


@torch.compiler.nested_compile_region
def _product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return (x @ weight).sin()


def _looped(m: Any, x: torch.Tensor) -> torch.Tensor:
    start = (torch.tensor(0), x)
    result: torch.Tensor = while_loop(lambda i, _: i < 3, lambda i, x: (i + 1, (x @ m.w).tanh() + m.b), start)[1]
    return result


def _with_view(turned: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.cond(x.sum() > 0, lambda x: x @ turned, lambda x: x - turned.sum(), (x,))  # type: ignore[no-any-return]


def _attended(m: Any, x: torch.Tensor) -> torch.Tensor:
    heads = x[None, None].expand(1, 2, 4, 4)
    values = m.w[None, None].expand(1, 2, 4, 4)
    found = flex_attention(heads, heads, values, score_mod=lambda s, b, h, i, j: s + m.w[i, j])
    assert isinstance(found, torch.Tensor)
    return found


CASES: dict[str, Case] = {
    "cond": lambda m, x: torch.cond(x.sum() > 0, lambda x: x @ m.w + m.b, lambda x: x @ m.w.t() - m.b, (x,)),
    "cond, an argument": lambda m, x: torch.cond(x.sum() > 0, lambda x, w: x @ w, lambda x, w: x - w.sum(), (x, m.w)),
    "cond, a view": lambda m, x: _with_view(m.w.t(), x),
    "while_loop": _looped,
    "map": lambda m, x: map(lambda row, w: row @ w, x, m.w),
    "map, a view": lambda m, x: map(lambda row, w: row @ w, x, m.w.t()),
    "map over it": lambda m, x: map(lambda row, y: (row * y).sum(-1), m.w, x[0]),
    "scan": lambda m, x: scan(lambda carry, row: ((carry + row) @ m.w, carry * row + m.b), x[0].clone(), x)[1],
    "associative_scan": lambda m, x: associative_scan(lambda a, b: a + b, m.w * x, 0, combine_mode="generic"),
    "a region": lambda m, x: _product(_product(x, m.w), m.w),
    "attention": _attended,
}
WAYS: dict[str, Callable[[nn.Module, torch.Tensor], Callable[[torch.Tensor], torch.Tensor]]] = {
    "called": lambda module, _: module,
    "compiled": lambda module, _: torch.compile(module, backend="aot_eager", fullgraph=True),
    "exported": lambda module, x: torch.export.export(module, (x,), strict=True).module(),
    "exported as it runs": lambda module, x: torch.export.export(module, (x,), strict=False).module(),
    "traced": lambda module, x: make_fx(module)(x),
}


class Holder(nn.Module):
    """A case, and the parameters that its functions compute with."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.case, self.w, self.b = case, nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.case(self, x)


def _both(case: Case) -> tuple[Holder, Holder]:
    """In memory and on disk."""
    return Holder(case), offload.disk_offload(Holder(case))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", CASES)
def test_functions_of_functions_compute_with_weights_on_disk(case: str, way: str) -> None:
    x = torch.randn(4, 4).abs()
    plain, stored = _both(CASES[case])

    with torch.no_grad():
        runs = [WAYS[way](module.requires_grad_(False), x) for module in (plain, stored)]
        for given in (x, -x):
            expected, found = (run(given) for run in runs)
            assert_equal(expected, found)
            assert type(found) is torch.Tensor


@pytest.mark.parametrize("way", ["called", "compiled"])
@pytest.mark.parametrize("case", sorted(CASES.keys() - {"cond, an argument", "cond, a view", "attention"}))
def test_functions_of_functions_have_the_gradients_of_memory(case: str, way: str) -> None:
    """In memory, attention has none on the CPU, nor compiled code that of an argument or view in a branch (2.13)."""
    plain, stored = _both(CASES[case])
    inputs = [torch.ones(4, 4, requires_grad=True) for _ in range(2)]

    for module, x in zip((plain, stored), inputs, strict=True):
        WAYS[way](module, x)(x).square().sum().backward()

    assert_equal(inputs[0].grad, inputs[1].grad)
    for expected, found in zip(plain.parameters(), stored.parameters(), strict=True):
        assert_equal(expected.grad, found.grad)


DIMENSIONS: dict[str, Callable[[torch.Tensor, torch.Tensor, Any, Any, Any], torch.Tensor]] = {
    "indices": lambda w, x, i, j, k: w[i, j].order(j, i),
    "a product": lambda w, x, i, j, k: (x[k, i] * w[i, j]).sum(i).order(k, j),
    "a part": lambda w, x, i, j, k: w[i].sum(i),
    "two parts": lambda w, x, i, j, k: (w[i, j] + w[j, i]).order(i, j),
    "a pack": lambda w, x, i, j, k: w[(i,), 0].order(i),
    "an index on disk": lambda w, x, i, j, k: x[i, w[0].argsort()[:2]].order(i),
    "a write": lambda w, x, i, j, k: w.__setitem__((i, j), x[j, i]) or w,
    "an addition": lambda w, x, i, j, k: (w[i].add_(1), w)[1],
}


@pytest.mark.parametrize("act", DIMENSIONS)
def test_dimensions_of_functorch_index_tensors_on_disk(act: str) -> None:
    from functorch.dim import dims

    plain, x = torch.randn(4, 4), torch.randn(4, 4)
    stored = OffloadedTensor.from_original_tensor(plain, "w")

    expected, found = (DIMENSIONS[act](one, x, *dims(3)) for one in (plain, stored))

    assert_equal(expected, found)
    assert_equal(plain, stored.materialize())


def test_a_weight_on_disk_is_first_in_a_symbolic_trace() -> None:
    plain, stored = _both(lambda m, x: m.w @ x + torch.add(m.b, x))
    x = torch.randn(4, 4)

    assert_equal(torch.fx.symbolic_trace(plain)(x), torch.fx.symbolic_trace(stored)(x))
