"""What the op census holds an op to: everything that a plain tensor passes, an offloaded one passes with equal bits.

Always true:
- each argument that can be stored is offloaded: as a whole value, as a part of a larger one, or lazily conjugated
- the plain tensors it is held against have the same strides, and the same alignment to 64 bytes
- a check counts the calls that plain torch carries out, and those of them in which an offloaded tensor took part
"""

from __future__ import annotations

import contextlib
import random
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy
import torch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from offload import OffloadedTensor

SAMPLES = 5  # per op, dtype and check; the op database has up to a thousand

# Ops whose values are arbitrary: only shapes, strides and dtypes are compared.
ARBITRARY = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}

# Ops that plain torch computes from uninitialized memory; two plain calls differ, unless it is filled.
FILL_MEMORY = {
    "linalg.lstsq": "driver gelsy starts from pivots that it leaves uninitialized (torch 2.13)",
}

# torch itself writes outside of a batched `out` that is not contiguous (2.13): such an `out` is not tried.
OUT_OF_BOUNDS = {"tril", "triu", "lu_unpack", "linalg.lu"}

# torch itself does not write its result to `out`, for one dimension (2.13): the values are not compared.
GARBAGE_OUT = {"fft.ihfft2", "fft.ihfftn"}


class Sample(NamedTuple):
    """The arguments of one call, and its place in the list of an op's samples."""

    place: int
    input: Any
    args: list[Any]
    kwargs: dict[str, Any]

    def passed_to(self, function: Callable[..., Any], **more: Any) -> Any:
        return function(self.input, *self.args, **self.kwargs, **more)


class Count(NamedTuple):
    """How many calls plain torch carries out, and how many of them were compared."""

    plain: int = 0
    compared: int = 0

    def plus(self, *, compared: bool) -> Count:
        return Count(self.plain + 1, self.compared + compared)


# Samples


def all_samples(op: Any, dtype: torch.dtype, *, requires_grad: bool) -> list[Sample]:
    seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = op.sample_inputs("cpu", dtype, requires_grad=requires_grad, set_seed=False)
        return [
            Sample(place, sample.input, list(sample.args), dict(sample.kwargs)) for place, sample in enumerate(found)
        ]


def seed(number: int) -> None:
    """Much faster than `torch.manual_seed`, which formats a traceback for each kind of device (torch 2.13)."""
    torch.default_generator.manual_seed(number)
    numpy.random.seed(number)
    random.seed(number)


def spread(samples: list[Any], key: str, *, most: int = SAMPLES) -> list[Any]:
    """At most so many of the samples, from all over the list; other ones for another key."""
    if len(samples) <= most:
        return samples
    return [samples[place] for place in sorted(random.Random(key).sample(range(len(samples)), most))]


# Plain and offloaded arguments


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


def as_whole(x: torch.Tensor) -> tuple[torch.Tensor, OffloadedTensor]:
    copy = dense(x).detach()
    return copy, offloaded(copy)


def as_part(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The second row of a value with two."""
    rows = torch.stack([torch.zeros_like(x), x.detach()])
    if rows[1].stride() != x.stride():
        return as_whole(x)
    return rows[1], offloaded(rows)[1]


def as_conjugate(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    copy, stored = as_whole(x.detach().conj().resolve_conj()) if x.is_complex() else as_whole(x)
    return (copy.conj(), stored.conj()) if x.is_complex() else (copy, stored)


Form = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
FORMS = (as_whole, as_part, as_conjugate)


def pair(sample: Any, form: Form = as_whole) -> tuple[Any, Any]:
    """A sample with plain dense tensors, and the same with offloaded ones."""
    leaves, spec = tree_flatten(sample)
    pairs = [form(leaf) if storable(leaf) else (leaf, leaf) for leaf in leaves]
    for leaf, both in zip(leaves, pairs, strict=True):
        if storable(leaf):
            for tensor in both:
                tensor.requires_grad_(leaf.requires_grad)
    return tuple(tree_unflatten([both[side] for both in pairs], spec) for side in (0, 1))  # type: ignore[return-value]


def has_offloaded(sample: Any) -> bool:
    return any(isinstance(leaf, OffloadedTensor) for leaf in tree_leaves(sample))


def pairs(samples: Iterable[Sample]) -> Iterator[tuple[Sample, Sample]]:
    """Plain and offloaded samples, the forms of their tensors by turns."""
    for sample in samples:
        yield pair(sample, form_of(sample))


def form_of(sample: Sample) -> Form:
    return FORMS[sample.place % len(FORMS)]


# Calls


def attempt(function: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, Exception | None]:
    torch.default_generator.manual_seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return function(*args, **kwargs), None
        except Exception as error:
            return None, error


def succeed(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    result, error = attempt(function, *args, **kwargs)
    if error is not None:
        raise error
    return result


@contextlib.contextmanager
def memory_filled(op: Any) -> Iterator[None]:
    """For ops that read memory before they have written it."""
    if op.name not in FILL_MEMORY:
        yield
        return
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


# Comparisons


def assert_same(expected: Any, actual: Any, *, values: bool = True, strides: bool = True) -> None:
    """Equal structure, shapes, strides, dtypes, and bits."""
    left, left_spec = tree_flatten(expected)
    right, right_spec = tree_flatten(actual)
    assert left_spec == right_spec
    for one, other in zip(left, right, strict=True):
        if isinstance(one, torch.Tensor):
            assert_same_tensor(one, other, values=values, strides=strides)
        else:
            assert type(one) is type(other), f"{one!r} != {other!r}"
            if isinstance(one, (bool, int, float, complex, str, torch.dtype)):
                assert one == other or one != one, f"{one} != {other}"


def assert_same_tensor(one: torch.Tensor, other: Any, *, values: bool, strides: bool) -> None:
    assert isinstance(other, torch.Tensor), f"a tensor != {other!r}"
    assert one.shape == other.shape, f"shapes {one.shape} != {other.shape}"
    assert one.dtype == other.dtype
    assert one.layout == other.layout
    if one.layout != torch.strided or one.is_nested:
        if values:
            assert_same_bits(plain(one).to_dense(), plain(other).to_dense())
        return
    if strides and one.numel() > 1 and torch.ops.aten.is_non_overlapping_and_dense(one):
        assert one.stride() == other.stride(), f"strides {one.stride()} != {other.stride()}"
    if values:
        assert_same_bits(plain(one), plain(other))


def assert_same_bits(one: torch.Tensor, other: torch.Tensor) -> None:
    if not torch.equal(bits(one), bits(other)):
        torch.testing.assert_close(other, one, rtol=0, atol=0, equal_nan=True)
        raise AssertionError("equal, but for the sign of zeros or the bits of NaNs")


def bits(tensor: torch.Tensor) -> torch.Tensor:
    tensor = torch.dequantize(tensor) if tensor.is_quantized else tensor
    tensor = tensor.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    return tensor.view(-1).view(torch.uint8)


def storages(tree: Any) -> set[int]:
    """Where the storages of plain tensors start."""
    return {leaf.untyped_storage().data_ptr() for leaf in tree_leaves(tree) if storable(leaf)} - {0}


def assert_on_disk_if_view(expected: Any, actual: Any, arguments: Any) -> None:
    """A result is offloaded if the plain one shares memory with an argument, else it is plain."""
    shared = storages(arguments)
    for one, other in zip(tree_leaves(expected), tree_leaves(actual), strict=True):
        if storable(one) and one.numel():
            is_view = one.untyped_storage().data_ptr() in shared
            assert is_view == isinstance(other, OffloadedTensor), f"{'a' if is_view else 'not a'} view: {type(other)}"


def assert_untouched(results: Any, arguments: Any) -> None:
    """No plain result shares memory with a file: writing to it would write to the file."""
    files = [leaf.untyped_storage() for leaf in tree_leaves(arguments) if isinstance(leaf, OffloadedTensor)]
    ranges = [(storage.data_ptr(), storage.data_ptr() + storage.nbytes()) for storage in files if storage.nbytes()]
    for leaf in tree_leaves(results):
        if type(leaf) is torch.Tensor and storable(leaf) and leaf.untyped_storage().nbytes():
            at = leaf.untyped_storage().data_ptr()
            assert not any(start <= at < stop for start, stop in ranges), "a plain result shares memory with the file"


def assert_stored(tree: Any) -> None:
    """What the tensors say is what their files hold."""
    for leaf in tree_leaves(tree):
        if isinstance(leaf, OffloadedTensor) and leaf.numel():
            text = leaf.offload_path.read_bytes()
            data = torch.frombuffer(bytearray(text[8 + int.from_bytes(text[:8], "little") :]), dtype=leaf.dtype)
            stored = data.as_strided(leaf.shape, leaf.stride(), leaf.storage_offset())
            stored = stored.conj() if leaf.is_conj() else stored
            assert_same_bits(stored, leaf.materialize())


# Checks


def check_forward(op: Any, samples: Iterable[Sample]) -> Count:
    """The results are equal; views stay on disk, other results are plain; the arguments are as they were."""
    with torch.no_grad():
        return compare_results(op, samples)


def check_inference(op: Any, samples: Iterable[Sample]) -> Count:
    """As forward, for tensors that were offloaded in inference mode: autograd is not there to take ops apart."""
    with torch.inference_mode():
        return compare_results(op, samples)


def compare_results(op: Any, samples: Iterable[Sample]) -> Count:
    count = Count()
    for expected_of, actual_of in pairs(samples):
        expected, error = attempt(expected_of.passed_to, op)
        if error is not None:
            continue
        count = count.plus(compared=has_offloaded(actual_of))
        actual = succeed(actual_of.passed_to, op)
        assert_same(expected, actual, values=op.name not in ARBITRARY)
        assert_on_disk_if_view(expected, actual, expected_of)
        assert_untouched(actual, actual_of)
        assert_same(expected_of, actual_of)
    return count


def check_inplace(op: Any, samples: Iterable[Sample]) -> Count:
    """The arguments themselves come back; every alias, their files and versions have moved as plain tensors'."""
    count = Count()
    inplace = op.get_inplace()
    if inplace is None:
        return count
    for expected_of, actual_of in pairs(samples):
        targets, plain_targets = tree_leaves(actual_of.input), tree_leaves(expected_of.input)
        if not all(isinstance(target, OffloadedTensor) for target in targets):
            continue
        aliases, plain_aliases = (tree_map(torch.detach, tensors) for tensors in (targets, plain_targets))
        before, plain_before = versions(targets), versions(plain_targets)
        expected, error = attempt(expected_of.passed_to, inplace)
        if error is not None:
            continue
        count = count.plus(compared=True)
        actual = succeed(actual_of.passed_to, inplace)
        assert_same_arguments_back(expected, plain_targets, actual, targets)
        assert_same(expected_of, actual_of)
        assert_same(plain_aliases, aliases)
        assert_stored(targets)
        assert moves(plain_before, plain_targets) == moves(before, targets)
    return count


def assert_same_arguments_back(expected: Any, plain_targets: list[Any], actual: Any, targets: list[Any]) -> None:
    for one, other in zip(tree_leaves(expected), tree_leaves(actual), strict=True):
        for plain_target, target in zip(plain_targets, targets, strict=True):
            assert (one is plain_target) == (other is target)


def check_inference_inplace(op: Any, samples: Iterable[Sample]) -> Count:
    """As in place, in inference mode; the argument itself comes back below autograd too."""
    with torch.inference_mode(), ArgumentsComeBack():
        return check_inplace(op, samples)


class ArgumentsComeBack(TorchDispatchMode):
    """Sees what the rules return, where autograd does not put the argument in its place."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        returned = [value.alias_info for value in func._schema.returns]
        if len(returned) == 1 and returned[0] is not None and returned[0].is_write and isinstance(result, torch.Tensor):
            assert any(result is argument for argument in [*args, *(kwargs or {}).values()]), f"{func} gives another"
        return result


def versions(tree: Any) -> list[int]:
    """The versions of tensors; in inference mode torch does not count them."""
    return [0 if torch.is_inference_mode_enabled() else leaf._version for leaf in tree_leaves(tree)]


def moves(before: list[int], tree: Any) -> list[int]:
    """By how much the versions have moved."""
    return [now - then for then, now in zip(before, versions(tree), strict=True)]


def check_out(op: Any, samples: Iterable[Sample]) -> Count:
    """`out` comes back, holds the result, and its file too; whatever its size, strides and place were before."""
    count = Count()
    if not op.supports_out:
        return count
    for both in pairs(samples):
        result, error = attempt(pair(both[0])[0].passed_to, op)
        if error is not None or not all(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(result)):
            continue
        for turn in (both[0].place, both[0].place + 1):
            kind = OUTS[turn % len(OUTS)]
            if kind is not _transposed or op.name not in OUT_OF_BOUNDS:
                count = compare_out(op, both, tree_map(kind, result), count)
    return count


def compare_out(op: Any, both: tuple[Sample, Sample], outs: Any, count: Count) -> Count:
    expected_of, actual_of = both
    expected_outs = tree_map(lambda out: out.plain, outs, is_leaf=_is_pair)
    actual_outs = tree_map(lambda out: out.other, outs, is_leaf=_is_pair)
    before, plain_before = versions(actual_outs), versions(expected_outs)
    expected, error = attempt(expected_of.passed_to, op, out=expected_outs)
    if error is not None:
        return count
    actual = succeed(actual_of.passed_to, op, out=actual_outs)
    if expected is not None:
        for leaf, out in zip(tree_leaves(actual), tree_leaves(actual_outs), strict=True):
            assert leaf is out
    values = op.name not in ARBITRARY | GARBAGE_OUT
    assert_same(expected_outs, actual_outs, values=values)
    assert_same(expected, actual, values=values)
    assert_same(expected_of, actual_of)
    assert_stored(actual_outs)
    for plain_move, move in zip(moves(plain_before, expected_outs), moves(before, actual_outs), strict=True):
        assert move or not plain_move, "the version of `out` did not move"
    return count.plus(compared=has_offloaded((actual_of, actual_outs)))


class Pair(NamedTuple):
    """A plain tensor, and one that is offloaded or shall stay plain."""

    plain: torch.Tensor
    other: torch.Tensor


def _is_pair(x: Any) -> bool:
    return isinstance(x, Pair)


def _fitting(result: torch.Tensor) -> Pair:
    return Pair(*as_whole(torch.empty_like(result))) if storable(result) else _plain(result)


def _nothing(result: torch.Tensor) -> Pair:
    return Pair(*as_whole(result.new_empty(0))) if storable(result) else _plain(result)


def _transposed(result: torch.Tensor) -> Pair:
    if not storable(result) or result.dim() < 2:
        return _fitting(result)
    return Pair(*as_whole(torch.empty_like(result.transpose(0, -1).contiguous()).transpose(0, -1)))


def _part(result: torch.Tensor) -> Pair:
    return Pair(*as_part(result)) if storable(result) else _plain(result)


def _plain(result: torch.Tensor) -> Pair:
    like = torch.zeros_like if result.layout == torch.strided else torch.clone
    return Pair(like(result), like(result))


OUTS = (_fitting, _nothing, _transposed, _part, _plain)


Equal = Callable[[Any, Any], None]


def same_bits(expected: Any, actual: Any) -> None:
    assert_same(expected, actual, strides=False)  # autograd takes other formulas for some subclasses


def close(expected: Any, actual: Any) -> None:
    """Equal but for some roundings of the largest number among them; a gradient that is not there is zero."""
    largest = max((plain(one).abs().nan_to_num(0, 0).max().item() for one in expected if _rounds(one)), default=0)
    for one, other in zip(expected, actual, strict=True):
        if one is None and other is None:
            continue
        one, other = _zeros_if_none(one, other), _zeros_if_none(other, one)
        assert_same_tensor(one, other, strides=False, values=not _rounds(one))
        if _rounds(one):
            most = 64 * torch.finfo(one.dtype).eps * largest
            torch.testing.assert_close(plain(other), plain(one), rtol=0, atol=most, equal_nan=True)


def _zeros_if_none(x: Any, like: Any) -> Any:
    return torch.zeros_like(like) if x is None else x


def _rounds(x: Any) -> bool:
    return x is not None and x.numel() > 0 and (x.is_floating_point() or x.is_complex())


def check_trainable(op: Any, samples: Iterable[Sample], assert_equal: Equal = same_bits) -> Count:
    """Trainable offloaded tensors get the gradients of plain ones."""
    return check_gradients(op, pairs(samples), assert_equal)


def check_frozen(op: Any, samples: Iterable[Sample], assert_equal: Equal = same_bits) -> Count:
    """A plain trainable tensor beside frozen offloaded ones gets the gradient that it gets beside plain ones."""
    frozen = (frozen_but_one(sample) for sample in samples)
    return check_gradients(op, (both for both in frozen if both is not None), assert_equal)


def check_gradients(op: Any, samples: Iterable[tuple[Sample, Sample]], assert_equal: Equal) -> Count:
    count = Count()
    for expected_of, actual_of in samples:
        expected, error = attempt(backward, op, expected_of)
        if error is not None:
            continue
        count = count.plus(compared=has_offloaded(actual_of))
        actual = succeed(backward, op, actual_of)
        assert_equal(expected, actual)
        assert_same(expected_of, actual_of)
    return count


def backward(op: Any, sample: Sample) -> list[torch.Tensor | None]:
    """The results that autograd follows, and the gradients of all the tensors in `sample` that require one."""
    inputs = [leaf for leaf in tree_leaves(sample) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    result = sample.passed_to(op)
    outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    torch.default_generator.manual_seed(2)
    seeds = [torch.randn(leaf.shape, dtype=leaf.dtype) for leaf in outputs]
    gradients = torch.autograd.grad(outputs, inputs, seeds, allow_unused=True)
    return [*(output.detach() for output in outputs), *gradients]


def frozen_but_one(sample: Sample) -> tuple[Sample, Sample] | None:
    """The sample with one trainable tensor, plain in both, the others offloaded in the second; None without others."""
    leaves, spec = tree_flatten(sample)
    tensors = [leaf for leaf in leaves if storable(leaf)]
    trainable = [leaf for leaf in tensors if leaf.requires_grad]
    if not trainable or len(tensors) < 2:
        return None
    chosen = trainable[sample.place % len(trainable)]
    frozen = tree_unflatten([x.detach() if storable(x) and x is not chosen else x for x in leaves], spec)
    (expected_of, actual_of), (plain_of, _) = (pair(frozen, form_of(sample)) for _ in range(2))
    each = zip(leaves, tree_leaves(plain_of), tree_leaves(actual_of), strict=True)
    return expected_of, tree_unflatten([one if leaf is chosen else other for leaf, one, other in each], spec)


def check_tangents(op: Any, samples: Iterable[Sample], assert_equal: Equal = same_bits) -> Count:
    """Forward-mode differentiation carries the tangents that it carries through plain tensors."""
    return compare_tangents(op, op, samples, assert_equal) if op.supports_forward_ad else Count()


def check_inplace_tangents(op: Any, samples: Iterable[Sample], assert_equal: Equal = same_bits) -> Count:
    """As tangents, of an op in place: the arguments have the new ones."""
    inplace = op.get_inplace()
    if inplace is None or not op.supports_forward_ad:
        return Count()
    return compare_tangents(op, inplace, samples, assert_equal)


def compare_tangents(op: Any, function: Any, samples: Iterable[Sample], assert_equal: Equal) -> Count:
    count = Count()
    for expected_of, actual_of in pairs(samples):
        expected, error = attempt(pushed_forward, function, without_grad(expected_of))
        if error is not None:
            continue
        count = count.plus(compared=has_offloaded(actual_of))
        actual = succeed(pushed_forward, function, without_grad(actual_of))
        assert_equal(expected, actual)
    return count


def without_grad(sample: Sample) -> Sample:
    """The same tensors, followed by forward-mode differentiation alone."""
    return tree_map(lambda leaf: leaf.requires_grad_(False) if storable(leaf) or has_offloaded(leaf) else leaf, sample)


def pushed_forward(function: Any, sample: Sample) -> list[torch.Tensor | None]:
    """The results and their tangents, then those of the arguments, of which all that can have a tangent have one."""
    torch.default_generator.manual_seed(2)
    with forward_ad.dual_level():
        duals = tree_map(_dual, sample)
        torch.default_generator.manual_seed(1)
        result = duals.passed_to(function)
        tensors = [leaf for leaf in tree_leaves((result, duals)) if isinstance(leaf, torch.Tensor)]
        return [part for tensor in tensors for part in forward_ad.unpack_dual(tensor)]


def _dual(x: Any) -> Any:
    if not (storable(x) or has_offloaded(x)) or not (x.is_floating_point() or x.is_complex()):
        return x
    return forward_ad.make_dual(x, torch.randn(x.shape, dtype=x.dtype))


def check_second_order(op: Any, samples: Iterable[Sample], assert_equal: Equal = same_bits) -> Count:
    """Gradients of gradients are those of plain tensors."""
    if not op.supports_gradgrad:
        return Count()
    count = Count()
    for expected_of, actual_of in pairs(samples):
        expected, error = attempt(backward_twice, op, expected_of)
        if error is not None:
            continue
        count = count.plus(compared=has_offloaded(actual_of))
        assert_equal(expected, succeed(backward_twice, op, actual_of))
    return count


def backward_twice(op: Any, sample: Sample) -> list[torch.Tensor | None]:
    """The gradients, and those of a number that is made of them."""
    inputs = [leaf for leaf in tree_leaves(sample) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    result = sample.passed_to(op)
    outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    torch.default_generator.manual_seed(2)
    seeds = [torch.randn(leaf.shape, dtype=leaf.dtype, requires_grad=True) for leaf in outputs]
    first = torch.autograd.grad(outputs, inputs, seeds, allow_unused=True, create_graph=True)
    followed = [gradient for gradient in first if gradient is not None and gradient.requires_grad]
    weights = [torch.randn(gradient.shape, dtype=gradient.dtype) for gradient in followed]
    second = torch.autograd.grad(followed, [*inputs, *seeds], weights, allow_unused=True) if followed else ()
    return [None if gradient is None else gradient.detach() for gradient in (*first, *second)]


CALLS = {
    "forward": check_forward,
    "inference": check_inference,
    "inplace": check_inplace,
    "inference inplace": check_inference_inplace,
    "out": check_out,
}
GRADIENTS = {"trainable": check_trainable, "frozen": check_frozen, "second order": check_second_order}
TANGENTS = {"tangents": check_tangents, "inplace tangents": check_inplace_tangents}
DERIVATIVES = GRADIENTS | TANGENTS
