"""Derivatives of functions of offloaded tensors are those of plain ones, bit for bit, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import func, nn
from torch.autograd import forward_ad, functional
from torch.utils._pytree import tree_leaves

import offload
from offload import OffloadedTensor
from tests.equal import assert_equal

VALUE = torch.arange(1.0, 17).view(4, 4) / 7
TANGENT = torch.eye(4) + 0.5
OTHER = torch.linspace(-1, 1, 4)


LAYER = nn.Linear(4, 4, bias=False)


def stored(value: torch.Tensor = VALUE) -> OffloadedTensor:
    return OffloadedTensor.from_original_tensor(value, "w")


def cube(w: torch.Tensor) -> torch.Tensor:
    return (F.linear(OTHER, w) * w * w).sum()


def matrix(w: torch.Tensor) -> torch.Tensor:
    return torch.cat([w * 2, torch.matmul(w, w)])


DERIVATIVES: dict[str, Callable[[torch.Tensor], Any]] = {
    "jacobian": lambda w: functional.jacobian(matrix, w),
    "vectorized jacobian": lambda w: functional.jacobian(matrix, w, vectorize=True),
    "forward jacobian": lambda w: functional.jacobian(matrix, w, vectorize=True, strategy="forward-mode"),
    "functional jvp": lambda w: functional.jvp(matrix, w, TANGENT),
    "functional vhp": lambda w: functional.vhp(cube, w, TANGENT),
    "functional hessian": lambda w: functional.hessian(cube, w),
    "forward hessian": lambda w: functional.hessian(cube, w, vectorize=True, outer_jacobian_strategy="forward-mode"),
    "jvp": lambda w: func.jvp(matrix, (w,), (TANGENT,)),
    "vjp": lambda w: func.vjp(cube, w)[1](torch.ones(())),
    "grad": lambda w: func.grad(cube)(w),
    "jacfwd": lambda w: func.jacfwd(matrix)(w),
    "jacrev": lambda w: func.jacrev(matrix)(w),
    "hessian": lambda w: func.hessian(cube)(w),
    "vmap": lambda w: func.vmap(lambda column: column.cumsum(0), in_dims=1)(w),
    "vmap of gradients": lambda w: func.vmap(func.grad(lambda t, row: F.linear(row, t).sum()), (None, 0))(w, TANGENT),
    "functional call": lambda w: func.functional_call(LAYER, {"weight": w}, (OTHER,)),
    "linearize": lambda w: func.linearize(matrix, w)[1](TANGENT),
    "of a frozen weight": lambda w: func.jacfwd(lambda x: F.linear(x, w) * w)(OTHER),
    "forward, of a frozen weight": lambda w: functional.jacobian(
        lambda x: F.linear(x, w) * w, OTHER, vectorize=True, strategy="forward-mode"
    ),
}


@pytest.mark.parametrize("name", DERIVATIVES)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_derivative_is_that_of_a_plain_tensor(name, requires_grad):
    derivative = DERIVATIVES[name]

    actual = derivative(stored().requires_grad_(requires_grad))

    expected = derivative(VALUE.clone().requires_grad_(requires_grad))
    assert any(leaf.any() for leaf in tree_leaves(expected))
    assert_equal(expected, actual)


def of_duals(function: Callable[[torch.Tensor], torch.Tensor], value: torch.Tensor) -> list[torch.Tensor]:
    """The result of a function and its tangent."""
    with forward_ad.dual_level():
        found = forward_ad.unpack_dual(function(forward_ad.make_dual(value, TANGENT.clone())))
        return [found.primal.clone(), found.tangent.clone()]


def by_a_view(w: torch.Tensor) -> torch.Tensor:
    w[1].mul_(w[0])
    return w


def seen_by_a_view(w: torch.Tensor) -> torch.Tensor:
    view = w.t()
    w.mul_(3)
    return view


def by_rows(w: torch.Tensor) -> torch.Tensor:
    w[1] = w[2] * 3
    return w.copy_(w * w)


@pytest.mark.parametrize("write", [by_a_view, seen_by_a_view, by_rows])
@pytest.mark.parametrize("graph", [False, True])
def test_a_write_to_the_file_writes_the_tangent(write, graph):
    with torch.set_grad_enabled(graph):
        actual = of_duals(write, stored())

        assert_equal(of_duals(write, VALUE.clone()), actual)


def test_functions_that_drop_tangents_are_refused():
    """`torch.sparse.mm` with a reduction, and `out=`: a result without its tangent would be wrong."""
    left = torch.eye(4).to_sparse_csr()
    out = stored()

    for function in (lambda w: torch.sparse.mm(left, w, "mean"), lambda w: torch.mul(w, 2, out=out)):
        for value in (VALUE, stored()):
            with pytest.raises(NotImplementedError, match="forward AD"):
                of_duals(function, value)


def test_out_is_written_where_others_have_tangents():
    """`matrix_rank` by itself never writes to the `out` of a subclass."""
    out = OffloadedTensor.from_original_tensor(torch.zeros((), dtype=torch.int64), "rank")

    with forward_ad.dual_level():
        torch.linalg.matrix_rank(stored(), out=out)

    assert torch.linalg.matrix_rank(VALUE) == out


def test_results_of_dual_tensors_stay_in_memory():
    """A file can't hold a tangent."""

    def norm_of_double(w: torch.Tensor) -> torch.Tensor:
        return torch.linalg.norm(w * 2)

    expected = of_duals(norm_of_double, VALUE.clone())
    for value in (VALUE.clone(), stored()):
        with offload.offloading(min_bytes=0):
            actual = of_duals(norm_of_double, value)

        assert_equal(expected, actual)


def test_a_reduced_product_with_a_sparse_matrix_has_the_gradient_of_memory():
    """Whose backward reads the dense factor below every dispatcher: torch would crash."""
    left, plain = torch.rand(4, 4).to_sparse_csr(), torch.randn(4, 3, requires_grad=True)
    stored = offload.OffloadedTensor.from_original_tensor(plain.detach(), "w").requires_grad_()
    for right in (plain, stored):
        torch.sparse.mm(left, right, "amax").sum().backward()

    assert torch.equal(plain.grad, stored.grad)
