"""Every op that succeeds on plain tensors gives the same bits on offloaded ones: over torch's own op database.

The campaign `ops` tries more samples of each op, and its derivatives and inference mode in a second dtype, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.testing._internal import common_methods_invocations as database

from tests import ops
from tests.campaigns import campaign
from tests.op_census import CLOSE, FEWER, MOST, OFFLOADED
from tests.ops import Count, Sample

pytestmark = pytest.mark.usefixtures("quick_values")

OPS = ops.op_database()
FOREACH_OPS = {
    op.full_name: op
    for name in dir(database)
    if name.startswith("foreach_") and name.endswith("_op_db")
    for op in getattr(database, name)
}

FIRST_DTYPE = torch.float32
SECOND_DTYPES = (torch.complex64, torch.int64, torch.bfloat16, torch.float64, torch.bool)

# Gradients for which torch uses a formula with another order of summation if it sees a tensor subclass (2.13).
_PRODUCTS = "the gradient beside zeros is made of cumulative products, not of a quotient"
_MASKS = "the value's gradient is a sum over a product with the mask, not over a selection"
_STEPS = "the tangent is made of new tensors, not in place: other last bits"
VALUES_CLOSE: dict[tuple[str, str], str] = {
    ("masked_fill", "trainable"): _MASKS,
    ("masked_fill", "frozen"): _MASKS,
    **{(name, check): _PRODUCTS for name in ("prod", "masked.prod") for check in ("trainable", "tangents")},
    ("cumprod", "trainable"): "the gradient is made of cumulative products that autograd can follow",
    ("linalg.vander", "trainable"): "made of a cumulative product",
    **{(name, "tangents"): "the same of the tangent, from torch 2.15 on" for name in ("linalg.det", "logdet")},
    ("linalg.lstsq.grad_oriented", "tangents"): "made of products of matrices, folded otherwise",
    ("matmul", "frozen"): "a batch of one is squeezed away: `mm` instead of `bmm`",
    ("matmul", "tangents"): "a batch of one is squeezed away: `mm` instead of `bmm`",
    ("__rmatmul__", "tangents"): "a batch of one is squeezed away: `mm` instead of `bmm`",
    **dict.fromkeys(
        [
            *[(f"nn.functional.{name}_norm", "tangents") for name in ("batch", "group", "instance", "layer")],
            *[(f"native_{name}_norm", "tangents") for name in ("batch", "group")],
            ("_native_batch_norm_legit", "tangents"),
            ("_batch_norm_with_update", "tangents"),
        ],
        _STEPS,
    ),
}

# Numbers of samples for ops that were wrong for a few of them, for one that takes seconds, and for one whose samples
# are not all with tensors.
SAMPLES = {
    **dict.fromkeys(["linalg.pinv", "linalg.lstsq", "linalg.vecdot", "pinverse"], 24),
    **dict.fromkeys(["fft.hfft", "fft.hfft2", "fft.hfftn"], 24),
    "grid_sampler_3d": 2,
    "normal.number_mean": 5,
}

# Ops without tensor arguments: only their `out` can be compared.
FACTORIES = (
    "arange", "broadcast_shapes", "empty", "empty_permuted", "empty_strided", "eye", "full", "linspace", "logspace",
    "ones", "randint", "randn", "scalar_tensor", "tril_indices", "triu_indices", "zeros",
    *(name for name in OPS if name.startswith("signal.windows.")),
)  # fmt: skip

# Ops and checks that run in plain torch, but without any offloaded tensor.
NOTHING_TO_COMPARE = {(name, check) for name in FACTORIES for check in ("forward", "inference")}


def dtypes_of(op: Any) -> list[torch.dtype]:
    """The op's first usual dtype, and one more if it supports one."""
    known = op.supported_dtypes("cpu")
    first = FIRST_DTYPE if FIRST_DTYPE in known else min(known, key=str)
    return [first, *[dtype for dtype in SECOND_DTYPES if dtype in known and dtype != first][:1]]


def trials(op: Any) -> Iterator[tuple[str, torch.dtype, list[Sample]]]:
    """The checks of an op in each dtype, with all available samples.

    Autograd, and what inference mode leaves out of it, are the same in every dtype: they are tried in the first.
    """
    first, *_ = dtypes = dtypes_of(op)
    for dtype in dtypes:
        samples, is_whole = ops.samples_of(op, dtype, requires_grad=False), dtype == first or campaign("ops")
        yield from ((check, dtype, samples) for check in ("inplace", "out"))
        if is_whole:
            yield from ((check, dtype, samples) for check in ("inference", "inference inplace"))
        if is_whole and dtype in op.supported_backward_dtypes("cpu"):
            samples = ops.samples_of(op, dtype, requires_grad=True)
            yield from ((check, dtype, samples) for check in ops.DERIVATIVES)
        yield "forward", dtype, samples  # with tensors that require grad, if possible


def compare(op: Any, check: str, dtype: torch.dtype, samples: list[Sample]) -> Count:
    """Run a check; if values are only close, over all samples, and with a tolerance.

    Raises:
        Exception: from the op, or an AssertionError.
    """
    if (op.full_name, check) in VALUES_CLOSE:
        return ops.DERIVATIVES[check](CLOSE, op, samples)
    usual = MOST if dtype == dtypes_of(op)[0] and check not in ops.DERIVATIVES else FEWER
    most = SAMPLES.get(op.full_name, usual)
    with ops.memory_filled(op):
        return ops.CHECKS[check](OFFLOADED, op, ops.spread(samples, f"{op.full_name} {dtype} {check}", most=most))


def faults(op: Any) -> Iterator[str]:
    """What is wrong with an op, or with its entries in the tables."""
    for check, dtype, samples in trials(op):
        try:
            count = compare(op, check, dtype, samples)
        except Exception as error:
            yield f"{check}, {dtype}: {type(error).__name__}: {error}"
            continue
        if bool(count.plain) > bool(count.compared) and (op.full_name, check) not in NOTHING_TO_COMPARE:
            yield f"{check}, {dtype}: plain torch runs, and nothing was compared"


@pytest.mark.campaign("ops")
@pytest.mark.parametrize("name", OPS)
def test_op_gives_on_offloaded_tensors_what_it_gives_on_plain_ones(name: str) -> None:
    """Forward, in place, with `out=`, in inference mode; gradients of trainable tensors and beside frozen
    ones; tangents."""
    found = list(faults(OPS[name]))

    assert not found, "\n".join(found)


@pytest.mark.campaign("ops")
@pytest.mark.parametrize("name", FOREACH_OPS)
@pytest.mark.parametrize("check", ["forward", "inplace"])
def test_foreach_op_gives_on_lists_of_offloaded_tensors_what_it_gives_on_plain_ones(name: str, check: str) -> None:
    """Optimizers step over whole lists of parameters."""
    op = FOREACH_OPS[name]
    if (check == "forward" and not op.supports_out) or (check == "inplace" and op.has_no_in_place):
        pytest.skip("torch has no such variant")
    samples = ops.samples_of(op, FIRST_DTYPE, requires_grad=False)

    count = ops.CHECKS[check](OFFLOADED, op, ops.spread(samples, f"{name} {check}", most=MOST))

    assert count.plain == count.compared > 0
