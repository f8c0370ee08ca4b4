"""What the op census holds an op to: everything that a plain tensor passes, an offloaded one passes with equal bits."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from offload import OffloadedTensor

SAMPLES = 8  # per op, dtype and check; the op database has up to some hundreds, cut in other ways

# Ops whose values are arbitrary: only shapes, strides and dtypes are compared.
ARBITRARY = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}

# torch itself writes out of bounds for a batched `out` that is not contiguous (seen in 2.13).
OUT_OF_BOUNDS = {"tril", "triu"}


def storable(x: Any) -> bool:
    return (
        type(x) in (torch.Tensor, torch.nn.Parameter)
        and x.layout == torch.strided
        and not x.is_quantized
        and not x.is_nested
        and not x.is_meta
    )


def dense(x: Any) -> Any:
    """A copy with the strides under which a tensor is stored."""
    return x.detach().clone().requires_grad_(x.requires_grad) if storable(x) else x


def offloaded(x: Any) -> Any:
    if not storable(x):
        return x
    return OffloadedTensor.from_original_tensor(x.detach(), "x").requires_grad_(x.requires_grad)


def plain(x: Any) -> Any:
    return x.materialize() if isinstance(x, OffloadedTensor) else x.detach() if isinstance(x, torch.Tensor) else x


def samples(op: Any, dtype: torch.dtype, *, requires_grad: bool) -> Iterator[tuple[Any, list[Any], dict[str, Any]]]:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for sample in itertools.islice(op.sample_inputs("cpu", dtype, requires_grad=requires_grad), SAMPLES):
            yield sample.input, list(sample.args), dict(sample.kwargs)


def attempt(function: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, Exception | None]:
    torch.manual_seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return function(*args, **kwargs), None
        except Exception as error:
            return None, error


def pair(sample: Any) -> tuple[Any, Any]:
    """A sample with plain dense tensors, and the same with offloaded ones."""
    leaves, spec = tree_flatten(sample)
    dense_leaves = [dense(leaf) for leaf in leaves]
    return tree_unflatten(dense_leaves, spec), tree_unflatten([offloaded(leaf) for leaf in dense_leaves], spec)


def assert_same(expected: Any, actual: Any, *, values: bool = True, strides: bool = True) -> None:
    """Equal structure, shapes, strides, dtypes, and bits."""
    left, left_spec = tree_flatten(expected)
    right, right_spec = tree_flatten(actual)
    assert len(left) == len(right), f"{left_spec} != {right_spec}"
    for one, other in zip(left, right, strict=True):
        if not isinstance(one, torch.Tensor):
            if isinstance(one, (bool, int, float, complex, str, torch.dtype)):
                assert one == other or one != one, f"{one} != {other}"
            continue
        assert one.shape == other.shape, f"shapes {one.shape} != {other.shape}"
        assert one.dtype == other.dtype
        assert one.layout == other.layout
        if one.layout == torch.strided and not one.is_nested:
            if strides and one.numel() > 1 and torch.ops.aten.is_non_overlapping_and_dense(one):
                assert one.stride() == other.stride(), f"strides {one.stride()} != {other.stride()}"
            if values:
                torch.testing.assert_close(plain(other), plain(one), rtol=0, atol=0, equal_nan=True)
        elif values:
            torch.testing.assert_close(plain(other).to_dense(), plain(one).to_dense(), rtol=0, atol=0, equal_nan=True)


def assert_untouched(results: Any, arguments: Any) -> None:
    """No plain result shares memory with a file: writing to it would write to the file."""
    files = [leaf.untyped_storage() for leaf in tree_leaves(arguments) if isinstance(leaf, OffloadedTensor)]
    ranges = [(storage.data_ptr(), storage.data_ptr() + storage.nbytes()) for storage in files if storage.nbytes()]
    for leaf in tree_leaves(results):
        if type(leaf) is torch.Tensor and storable(leaf) and leaf.untyped_storage().nbytes():
            at = leaf.untyped_storage().data_ptr()
            assert not any(start <= at < stop for start, stop in ranges), "a plain result shares memory with the file"


def check_forward(op: Any, dtype: torch.dtype) -> int:
    """How many samples were compared."""
    checked = 0
    for sample in samples(op, dtype, requires_grad=False):
        expected_of, actual_of = pair(sample)
        expected, error = attempt(op, expected_of[0], *expected_of[1], **expected_of[2])
        if error is not None:
            continue
        actual, error = attempt(op, actual_of[0], *actual_of[1], **actual_of[2])
        if error is not None:
            raise error
        assert_same(expected, actual, values=op.name not in ARBITRARY)
        assert_untouched(actual, actual_of)
        assert_same(expected_of, actual_of)
        checked += 1
    return checked


def check_inplace(op: Any, dtype: torch.dtype) -> int:
    checked = 0
    inplace = op.get_inplace()
    if inplace is None:
        return 0
    for sample in samples(op, dtype, requires_grad=False):
        expected_of, actual_of = pair(sample)
        if not isinstance(actual_of[0], OffloadedTensor):
            continue
        version = actual_of[0]._version
        plain_version = expected_of[0]._version
        expected, error = attempt(inplace, expected_of[0], *expected_of[1], **expected_of[2])
        if error is not None:
            continue
        alias = actual_of[0].detach()
        actual, error = attempt(inplace, actual_of[0], *actual_of[1], **actual_of[2])
        if error is not None:
            raise error
        if isinstance(expected, torch.Tensor) and expected is expected_of[0]:
            assert actual is actual_of[0]
        assert_same(expected_of, actual_of)
        assert expected_of[0]._version - plain_version == actual_of[0]._version - version
        if alias.shape == actual_of[0].shape and alias.stride() == actual_of[0].stride():
            assert_same(expected_of[0], alias)
        checked += 1
    return checked


def check_out(op: Any, dtype: torch.dtype) -> int:
    checked = 0
    if not op.supports_out:
        return 0
    for sample in samples(op, dtype, requires_grad=False):
        expected_of, actual_of = pair(sample)
        expected, error = attempt(op, expected_of[0], *expected_of[1], **expected_of[2])
        if error is not None or not all(storable(leaf) for leaf in tree_leaves(expected)):
            continue
        for shape_of in (torch.empty_like, _nothing_like, _transposed_like):
            if shape_of is _transposed_like and op.name in OUT_OF_BOUNDS:
                continue
            outs = tree_map(shape_of, expected)
            plain_outs = tree_map(dense, outs)
            offloaded_outs = tree_map(offloaded, plain_outs)
            versions = [leaf._version for leaf in tree_leaves(offloaded_outs)]
            plain_result, error = attempt(op, expected_of[0], *expected_of[1], **expected_of[2], out=plain_outs)
            if error is not None:
                continue
            result, error = attempt(op, actual_of[0], *actual_of[1], **actual_of[2], out=offloaded_outs)
            if error is not None:
                raise error
            if plain_result is not None:
                for leaf, out in zip(tree_leaves(result), tree_leaves(offloaded_outs), strict=True):
                    assert leaf is out
            assert_same(plain_outs, offloaded_outs, values=op.name not in ARBITRARY)
            assert_same(plain_result, result, values=op.name not in ARBITRARY)
            for version, leaf in zip(versions, tree_leaves(offloaded_outs), strict=True):
                assert leaf._version > version
            checked += 1
    return checked


def _nothing_like(result: torch.Tensor) -> torch.Tensor:
    return result.new_empty(0)


def _transposed_like(result: torch.Tensor) -> torch.Tensor:
    return (
        torch.empty_like(result.transpose(0, -1).contiguous()).transpose(0, -1) if result.dim() > 1 else result.clone()
    )


def _backward(op: Any, sample: Any) -> list[torch.Tensor | None]:
    inputs = [leaf for leaf in tree_leaves(sample) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    result = op(sample[0], *sample[1], **sample[2])
    if op.output_func is not None if hasattr(op, "output_func") else False:
        result = op.output_func(result)
    outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    torch.manual_seed(2)
    seeds = [torch.randn(leaf.shape, dtype=leaf.dtype) for leaf in outputs]
    return list(torch.autograd.grad(outputs, inputs, seeds, allow_unused=True))


def check_gradients(op: Any, dtype: torch.dtype, *, frozen: bool) -> int:
    """Gradients of trainable offloaded tensors; or of plain ones beside frozen offloaded ones."""
    checked = 0
    for sample in samples(op, dtype, requires_grad=True):
        if frozen:
            sample = _freeze_all_but_first(sample)
            if sample is None:
                continue
        expected_of, actual_of = pair(sample)
        if frozen:
            actual_of = (dense(expected_of[0]), *actual_of[1:])
        expected, error = attempt(_backward, op, expected_of)
        if error is not None:
            continue
        actual, error = attempt(_backward, op, actual_of)
        if error is not None:
            raise error
        assert_same(expected, actual, strides=False)  # autograd takes other formulas for some subclasses
        checked += 1
    return checked


def _freeze_all_but_first(sample: Any) -> Any:
    """The sample with a plain trainable input and frozen other tensors; None if there are no other."""
    first, args, kwargs = sample
    others = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    if not isinstance(first, torch.Tensor) or not first.requires_grad or not others:
        return None
    freeze = lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf  # noqa: E731
    return first, tree_map(freeze, args), tree_map(freeze, kwargs)
