"""Every torch module gives bit for bit the same with offloaded parameters and buffers as with plain ones.

Uses torch's own module database. A module without parameters and buffers gets offloaded inputs instead.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.testing._internal.common_modules import module_db
from torch.utils._pytree import tree_leaves, tree_map

from offload import OffloadedTensor
from tests import op_census, ops
from tests.campaigns import amount, campaign
from tests.equal import assert_equal

pytestmark = pytest.mark.usefixtures("quick_values")

SAMPLES = amount("ops", 3, 4)  # per module, dtype and mode; the database has up to a few hundred
MODULES = {module.name: module for module in module_db}
FIRST_DTYPE = torch.float32
SECOND_DTYPES = (torch.complex64, torch.bfloat16, torch.float64)
OPTIMIZERS = (partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01), partial(torch.optim.AdamW, lr=0.1))

# Modules and modes that fail without gradients, with the reason. An entry that passes fails the test.
EXPECTED_FAILURES = {("nn.Transformer", "eval"): "in inference mode its fused encoder layer has other last bits"}
MODULES_AND_MODES = [
    pytest.param(
        name,
        mode == "train",
        id=f"{name}-{mode}",
        marks=[
            pytest.mark.xfail(reason=reason, strict=True)
            for entry, reason in EXPECTED_FAILURES.items()
            if entry == (name, mode)
        ],
    )
    for name in MODULES
    for mode in ("train", "eval")
]


class Case(NamedTuple):
    """A module as created by torch, the same one with its tensors offloaded, and arguments for each."""

    plain: nn.Module
    offloaded: nn.Module
    plain_arguments: Any
    arguments: Any


def cases(name: str, dtype: torch.dtype, *, training: bool) -> Iterator[Case]:
    info = MODULES[name]
    ops.seed(0)
    options = {"device": "cpu", "dtype": dtype, "requires_grad": True, "training": training}
    found = list(info.module_inputs_func(info, **options))
    for sample in ops.spread(found, f"{name} {dtype} {training}", most=SAMPLES):
        plain = made(info, sample.constructor_input, dtype).train(training)
        arguments = (sample.forward_input.args, sample.forward_input.kwargs)
        if info.is_lazy:
            attempt(plain, copied(arguments))  # a lazy parameter has no values before the first call
        with_offloaded_tensors = offload_tensors(copy.deepcopy(plain))
        offloaded_arguments = copied(arguments) if tensors_of(plain) else copied(arguments, op_census.offloaded)
        yield Case(plain, with_offloaded_tensors, copied(arguments), offloaded_arguments)


def made(info: Any, constructor: Any, dtype: torch.dtype) -> nn.Module:
    """The module, with parameters in `dtype` if its constructor accepts one."""
    ops.seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return info.module_cls(*constructor.args, **constructor.kwargs, dtype=dtype, device="cpu")
        except TypeError:
            return info.module_cls(*constructor.args, **constructor.kwargs).to(dtype)


def copied(arguments: Any, change: Callable[[Any], Any] = op_census.dense) -> Any:
    """Copies of the tensors; one that is passed twice stays one."""
    copies: dict[int, Any] = {}
    return tree_map(lambda leaf: copies.setdefault(id(leaf), change(leaf)), arguments)


def offload_tensors(module: nn.Module) -> nn.Module:
    """Replace parameters and buffers by offloaded ones."""
    for prefix, part in module.named_modules():
        for key, parameter in list(part.named_parameters(prefix, recurse=False)):
            stored = OffloadedTensor.from_original_tensor(parameter.detach(), key)
            setattr(part, key.rpartition(".")[2], nn.Parameter(stored, requires_grad=parameter.requires_grad))
        for key, buffer in list(part.named_buffers(prefix, recurse=False)):
            part._buffers[key.rpartition(".")[2]] = OffloadedTensor.from_original_tensor(buffer, key)
    return module


def tensors_of(module: nn.Module) -> dict[str, torch.Tensor]:
    return dict([*module.named_parameters(), *module.named_buffers()])


def dtypes_of(name: str) -> list[torch.dtype]:
    return [FIRST_DTYPE, *[dtype for dtype in SECOND_DTYPES if dtype in MODULES[name].dtypes][:1]]


def attempt(module: nn.Module, arguments: Any) -> tuple[Any, Exception | None]:
    return ops.attempt(module, *arguments[0], **arguments[1])


def succeed(module: nn.Module, arguments: Any) -> Any:
    return ops.succeed(module, *arguments[0], **arguments[1])


def gradients(results: Any, arguments: Any) -> list[torch.Tensor | None]:
    """Gradients of the arguments; those of parameters are in their `grad`."""
    outputs = [leaf for leaf in tree_leaves(results) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    ops.seed(2)
    if outputs:
        torch.autograd.backward(outputs, [torch.randn(leaf.shape, dtype=leaf.dtype) for leaf in outputs])
    return [leaf.grad for leaf in tree_leaves(arguments) if isinstance(leaf, torch.Tensor)]


def assert_same_tensors(plain: nn.Module, offloaded: nn.Module) -> None:
    actual = tensors_of(offloaded)
    assert_equal(tensors_of(plain), actual)
    for key, tensor in actual.items():
        assert isinstance(tensor, OffloadedTensor), f"{key} is not offloaded"
    op_census.assert_stored(actual)


def assert_same_gradients(plain: nn.Module, offloaded: nn.Module) -> None:
    expected, actual = ([parameter.grad for parameter in module.parameters()] for module in (plain, offloaded))
    assert_equal(expected, actual)
    assert not ops.takes_part(actual)


@pytest.mark.campaign("ops")
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", MODULES)
def test_module_learns_on_disk_what_it_learns_in_memory(name: str, training: bool) -> None:
    """Results, gradients, buffers, and parameters after steps of optimizers are equal."""
    compared = 0
    first, *others = dtypes_of(name)
    for dtype in (first, *(others if campaign("ops") else ())):
        for case in cases(name, dtype, training=training):
            modules = (case.plain, case.offloaded)
            before = [ops.versions(tensors_of(module)) for module in modules]
            expected, error = attempt(case.plain, case.plain_arguments)
            if error is not None:
                continue
            actual = succeed(case.offloaded, case.arguments)
            assert_equal(expected, actual)
            op_census.assert_untouched(actual, tensors_of(case.offloaded))
            assert_same_tensors(case.plain, case.offloaded)
            assert_equal(gradients(expected, case.plain_arguments), gradients(actual, case.arguments))
            assert_same_gradients(case.plain, case.offloaded)
            for optimizer in OPTIMIZERS if [*case.plain.parameters()] else ():
                for module in modules:
                    optimizer(module.parameters()).step()
                assert_same_tensors(case.plain, case.offloaded)
            moves = [ops.moves(then, tensors_of(module)) for then, module in zip(before, modules, strict=True)]
            assert moves[0] == moves[1], "versions have not moved alike"
            compared += 1

    assert compared


@pytest.mark.campaign("ops")
@pytest.mark.parametrize(("name", "training"), MODULES_AND_MODES)
def test_module_runs_on_disk_as_in_memory_without_gradients(name: str, training: bool) -> None:
    compared = 0
    for dtype in dtypes_of(name):
        for case in cases(name, dtype, training=training):
            for mode in (torch.no_grad, torch.inference_mode):
                with mode():
                    expected, error = attempt(case.plain, case.plain_arguments)
                    if error is not None:
                        continue
                    actual = succeed(case.offloaded, case.arguments)
                    assert_equal(expected, actual)
                    assert_equal(tensors_of(case.plain), tensors_of(case.offloaded))
                    compared += 1

    assert compared
