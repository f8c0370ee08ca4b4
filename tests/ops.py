"""Torch's own op database: each op should give the same with tensors of a subclass as with plain ones.

Always true:
- the plain tensors that a subclass is compared with have the same strides, and are created in the same way
- a check counts the calls that succeed in plain torch, and those of them that involved a tensor of the subclass

The checks, each of which runs an op on plain tensors and on tensors of the subclass:

- `forward`, `inference`: results are equal, and the arguments are as they were
- `inplace`, `inference inplace`: the argument itself comes back, it and its aliases hold the new values, and the
  version counter moves
- `out`: the same of `out=`, whatever its size and strides were
- `trainable`, `frozen`: gradients, also beside tensors that require none
- `tangents`: forward-mode differentiation
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy
import torch
from torch.autograd import forward_ad
from torch.testing._internal.common_methods_invocations import OpInfo, op_db

from offload.annotations import Args, Kwargs, Op
from offload.torch_api import (
    TorchDispatchMode,
    op_schema,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_unflatten,
    version_of,
)
from tests.equal import assert_same, assert_same_tensor, difference_between, in_memory


def op_database() -> dict[str, OpInfo]:
    """Torch's descriptions of its ops, by name."""
    return {op.full_name: op for op in op_db if op.supported_dtypes("cpu")}


# Ops with arbitrary values: only shapes, strides and dtypes are compared.
ARBITRARY = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}

# Ops that plain torch computes from uninitialized memory: two plain calls differ unless it is filled.
FILL_MEMORY = {"linalg.lstsq": "driver gelsy starts from pivots that it leaves uninitialized (torch 2.13)"}

# torch itself writes out of bounds of a batched, non-contiguous `out` (2.13): such an `out` is not tried.
OUT_OF_BOUNDS = {"tril", "triu", "lu_unpack", "linalg.lu"}

# torch itself does not write the result to `out` in one dimension (2.13): the values are not compared.
GARBAGE_OUT = {"fft.ihfft2", "fft.ihfftn"}

Form: TypeAlias = "Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]"
Out: TypeAlias = "Callable[[Kind, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]"
Same: TypeAlias = "Callable[[Kind, Any, Any], None]"


def same_bits(kind: Kind, expected: object, actual: object) -> None:
    kind.assert_same(expected, actual, strides=False)  # autograd uses other formulas for some subclasses


@dataclasses.dataclass(frozen=True)
class Kind:
    """A tensor subclass under test.

    Attributes:
        unwrap: converts a tensor of the subclass to a plain one.
        forms: ways to make a pair of equal tensors, plain and subclass; samples use them in turn.
        see_results: called with the plain results, those of the subclass, and the arguments of each.
        see_written: called with tensors of the subclass that an op has written to.
        same: compares derivatives, given this object, those of plain tensors, and those of the subclass.
    """

    unwrap: Callable[[torch.Tensor], torch.Tensor]
    forms: list[Form]
    see_results: Callable[[Any, Any, Any, Any], None] = lambda *_: None
    see_written: Callable[[Any], None] = lambda _: None
    same: Same = same_bits

    def pair(self, sample: Sample, turn: int | None = None) -> tuple[Sample, Sample]:
        """A sample with plain tensors, and the same one with tensors of the subclass."""
        form = self.forms[(sample.place if turn is None else turn) % len(self.forms)]

        def both(leaf: Any) -> tuple[Any, Any]:
            pair = form(leaf) if is_plain(leaf) else (leaf, leaf)
            for tensor in pair if is_plain(leaf) else ():
                tensor.requires_grad_(leaf.requires_grad)
            return pair

        return doubled(sample, both)

    def pairs(self, samples: Iterable[Sample]) -> Iterator[tuple[Sample, Sample]]:
        return map(self.pair, samples)

    def in_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        return in_memory(self.unwrap(tensor) if is_other(tensor) else tensor)

    def assert_same(self, expected: object, actual: object, *, values: bool = True, strides: bool = True) -> None:
        """Same structure, shapes, strides, dtypes, and bits."""
        assert tree_flatten(expected)[1] == tree_flatten(actual)[1]
        difference = difference_between if values else None
        options = {"difference": difference, "strides": strides, "of_dense_alone": True, "held_by": self.in_memory}
        assert_same(expected, actual, partial(assert_same_tensor, **options))  # type: ignore[arg-type]


class Sample(NamedTuple):
    """The arguments of one call, and its position among an op's samples."""

    place: int
    input: Any
    args: list[Any]
    kwargs: Kwargs

    def passed_to(self, function: Op, **more: object) -> Any:
        return function(self.input, *self.args, **self.kwargs, **more)


class Count(NamedTuple):
    """How many calls succeed in plain torch, and how many of them were compared."""

    plain: int = 0
    compared: int = 0


def doubled(tree: object, make: Callable[[Any], tuple[object, object]]) -> tuple[Any, Any]:
    """Two trees from one: each leaf becomes a pair, one element per tree."""
    leaves, spec = tree_flatten(tree)
    pairs = list(map(make, leaves))
    return tree_unflatten([one for one, _ in pairs], spec), tree_unflatten([other for _, other in pairs], spec)


# Samples


def samples_of(op: OpInfo, dtype: torch.dtype, *, requires_grad: bool) -> list[Sample]:
    """All samples in the database, the same each time.

    Not by `op.sample_inputs`, which looks through all frames and modules for a test that it is called by.
    """
    seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = op.sample_inputs_func(op, "cpu", dtype, requires_grad)
        return [
            Sample(place, sample.input, list(sample.args), dict(sample.kwargs)) for place, sample in enumerate(found)
        ]


def seed(number: int) -> None:
    """Much faster than `torch.manual_seed`, which formats a traceback per device type (torch 2.13)."""
    torch.default_generator.manual_seed(number)
    numpy.random.seed(number)
    random.seed(number)


def spread(samples: list[Sample], key: str, *, most: int) -> list[Sample]:
    """At most `most` samples from all over the list; the choice depends on the key."""
    if len(samples) <= most:
        return samples
    return [samples[place] for place in sorted(random.Random(key).sample(range(len(samples)), most))]


def is_plain(x: Any) -> bool:
    """Whether it is one of torch's own dense tensors, which can be made into one of the subclass."""
    return (
        type(x) in (torch.Tensor, torch.nn.Parameter)
        and x.layout == torch.strided
        and not x.is_quantized
        and not x.is_nested
        and not x.is_meta
    )


def is_inexact(x: torch.Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


def is_other(x: object) -> bool:
    """Whether it is a tensor of some subclass."""
    return isinstance(x, torch.Tensor) and type(x) not in (torch.Tensor, torch.nn.Parameter)


def takes_part(tree: object) -> bool:
    return any(map(is_other, tree_leaves(tree)))


# Calls


def attempt(function: Op, *args: object, **kwargs: object) -> tuple[Any, Exception | None]:
    """The result of a call, and what it raised."""
    torch.default_generator.manual_seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return function(*args, **kwargs), None
        except Exception as error:
            return None, error


def succeed(function: Op, *args: object, **kwargs: object) -> Any:
    result, error = attempt(function, *args, **kwargs)
    if error is not None:
        raise error
    return result


@contextlib.contextmanager
def memory_filled(op: OpInfo) -> Iterator[None]:
    """For ops that read uninitialized memory."""
    if op.name not in FILL_MEMORY:
        yield
        return
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


# Checks


def compared(call: Callable[[Any], object], pairs: Iterable[tuple[object, object]], same: Callable[..., None]) -> Count:
    """Run a call on both elements of each pair; if plain torch succeeds, `same` gets the results and the pair."""
    plain_calls = compared_calls = 0
    for expected_of, actual_of in pairs:
        expected, error = attempt(call, expected_of)
        if error is None:
            plain_calls += 1
            compared_calls += takes_part(actual_of)
            same(expected, succeed(call, actual_of), expected_of, actual_of)
    return Count(plain_calls, compared_calls)


def check_forward(kind: Kind, op: OpInfo, samples: Iterable[Sample]) -> Count:
    """Results are equal, and arguments are unchanged."""

    def same(expected: object, actual: object, expected_of: Sample, actual_of: Sample) -> None:
        kind.assert_same(expected, actual, values=op.name not in ARBITRARY)
        kind.see_results(expected, actual, expected_of, actual_of)
        kind.assert_same(expected_of, actual_of)

    with torch.no_grad():
        return compared(lambda sample: sample.passed_to(op), kind.pairs(samples), same)


def check_inference(kind: Kind, op: OpInfo, samples: Iterable[Sample]) -> Count:
    """Like forward, for inference tensors: autograd does not decompose ops then."""
    with torch.inference_mode():
        return check_forward(kind, op, samples)


def check_inplace(kind: Kind, op: OpInfo, samples: Iterable[Sample]) -> Count:
    """The arguments themselves are returned; aliases and versions have changed as with plain tensors."""
    inplace = op.get_inplace()
    if inplace is None:
        return Count()

    def call(sample: Sample) -> Any:
        targets = tree_leaves(sample.input)
        aliases, before = tree_map(torch.detach, targets), versions(targets)
        results = tree_leaves(sample.passed_to(inplace))
        return aliases, moves(before, targets), [[one is target for target in targets] for one in results]

    def same(expected: Args, actual: Args, expected_of: Sample, actual_of: Sample) -> None:
        kind.assert_same((expected_of, *expected), (actual_of, *actual))
        kind.see_written(tree_leaves(actual_of.input))

    pairs = (both for both in kind.pairs(samples) if all(map(is_other, tree_leaves(both[1].input))))
    return compared(call, pairs, same)


def check_inference_inplace(kind: Kind, op: OpInfo, samples: Iterable[Sample]) -> Count:
    """Like in place, in inference mode; the argument itself is returned below autograd, too."""
    with torch.inference_mode(), ArgumentsComeBack():  # type: ignore[no-untyped-call]
        return check_inplace(kind, op, samples)


class ArgumentsComeBack(TorchDispatchMode):
    """Checks what the rules return, where autograd does not replace it by the argument."""

    def __torch_dispatch__(self, func: Op, types: object, args: Args = (), kwargs: Kwargs | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        returned = [value.alias_info for value in op_schema(func).returns]
        if len(returned) == 1 and returned[0] is not None and returned[0].is_write and isinstance(result, torch.Tensor):
            assert any(result is argument for argument in [*args, *(kwargs or {}).values()]), f"{func} gives another"
        return result


def versions(tree: object) -> list[int]:
    """The versions of tensors; not counted in inference mode."""
    return [0 if torch.is_inference_mode_enabled() else version_of(leaf) for leaf in tree_leaves(tree)]


def moves(before: list[int], tree: object) -> list[int]:
    """By how much the versions have increased."""
    return [now - then for then, now in zip(before, versions(tree), strict=True)]


def check_out(kind: Kind, op: OpInfo, samples: Iterable[Sample]) -> Count:
    """`out` is returned with the result, whatever its size, strides and offset were."""
    values = op.name not in ARBITRARY | GARBAGE_OUT

    def call(sample_and_out: Any) -> Any:
        sample, out = sample_and_out
        before = versions(out)
        return sample.passed_to(op, out=out), moves(before, out)

    def same(expected: Any, actual: Any, expected_of: Any, actual_of: Any) -> None:
        (plain_result, plain_moves), (result, its_moves) = expected, actual
        (plain_sample, plain_out), (sample, out) = expected_of, actual_of
        if plain_result is not None:
            assert all(leaf is one for leaf, one in zip(tree_leaves(result), tree_leaves(out), strict=True))
        kind.assert_same((plain_out, plain_result), (out, result), values=values)
        kind.assert_same(plain_sample, sample)
        kind.see_written(out)
        for plain_move, move in zip(plain_moves, its_moves, strict=True):
            assert move or not plain_move, "the version of `out` did not move"

    return compared(call, with_outs(kind, op, samples), same) if op.supports_out else Count()


def with_outs(kind: Kind, op: OpInfo, samples: Iterable[Sample]) -> Iterator[tuple[Any, Any]]:
    """Each sample, plain and subclass, with two of the `OUTS` in turn."""
    for both in kind.pairs(samples):
        result, error = attempt(kind.pair(both[0], 0)[0].passed_to, op)
        if error is not None or not all(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(result)):
            continue
        for turn in (both[0].place, both[0].place + 1):
            make = OUTS[turn % len(OUTS)]
            if make is not transposed or op.name not in OUT_OF_BOUNDS:
                outs = doubled(result, partial(out_for, kind, make))
                yield (both[0], outs[0]), (both[1], outs[1])


def out_for(kind: Kind, make: Out, result: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return make(kind, result) if is_plain(result) else plain(kind, result)


def fitting(kind: Kind, result: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return kind.forms[0](torch.empty_like(result))


def nothing(kind: Kind, result: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return kind.forms[0](result.new_empty(0))


def transposed(kind: Kind, result: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if result.dim() < 2:
        return fitting(kind, result)
    return kind.forms[0](torch.empty_like(result.transpose(0, -1).contiguous()).transpose(0, -1))


def part(kind: Kind, result: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return kind.forms[1 % len(kind.forms)](result)


def plain(_: Kind, result: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    like = torch.zeros_like if result.layout == torch.strided else torch.clone
    return like(result), like(result)


OUTS: tuple[Out, ...] = (fitting, nothing, transposed, part, plain)


def check_trainable(kind: Kind, op: OpInfo, samples: Iterable[Sample]) -> Count:
    """Trainable tensors get the same gradients as plain ones."""
    return check_gradients(kind, op, kind.pairs(samples))


def check_frozen(kind: Kind, op: OpInfo, samples: Iterable[Sample]) -> Count:
    """A plain trainable tensor gets the same gradient beside frozen subclass tensors as beside plain ones."""
    frozen = (frozen_but_one(kind, sample) for sample in samples)
    return check_gradients(kind, op, (both for both in frozen if both is not None))


def check_gradients(kind: Kind, op: OpInfo, pairs: Iterable[tuple[Sample, Sample]]) -> Count:
    def same(expected: object, actual: object, expected_of: Sample, actual_of: Sample) -> None:
        kind.same(kind, expected, actual)
        kind.assert_same(expected_of, actual_of)

    return compared(partial(backward, op), pairs, same)


def backward(op: OpInfo, sample: Sample) -> list[torch.Tensor | None]:
    """The differentiable results, and the gradients of all tensors in `sample` that require them."""
    inputs, outputs = requiring_grad(sample), requiring_grad(sample.passed_to(op))
    torch.default_generator.manual_seed(2)
    seeds = [torch.randn(leaf.shape, dtype=leaf.dtype) for leaf in outputs]
    gradients = torch.autograd.grad(outputs, inputs, seeds, allow_unused=True)
    return [*(output.detach() for output in outputs), *gradients]


def requiring_grad(tree: object) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]


def frozen_but_one(kind: Kind, sample: Sample) -> tuple[Sample, Sample] | None:
    """The sample with one trainable tensor, plain in both, and otherwise subclass tensors; None without others."""
    leaves, spec = tree_flatten(sample)
    tensors = [leaf for leaf in leaves if is_plain(leaf)]
    trainable = [leaf for leaf in tensors if leaf.requires_grad]
    if not trainable or len(tensors) < 2:
        return None
    chosen = trainable[sample.place % len(trainable)]
    frozen = tree_unflatten([x.detach() if is_plain(x) and x is not chosen else x for x in leaves], spec)
    (expected_of, actual_of), (plain_of, _) = (kind.pair(frozen, sample.place) for _ in range(2))
    each = zip(leaves, tree_leaves(plain_of), tree_leaves(actual_of), strict=True)
    return expected_of, tree_unflatten([one if leaf is chosen else other for leaf, one, other in each], spec)


def check_tangents(kind: Kind, op: OpInfo, samples: Iterable[Sample]) -> Count:
    """Forward-mode differentiation gives the same tangents as with plain tensors."""
    if not op.supports_forward_ad:
        return Count()
    call = partial(pushed_forward, op)
    return compared(call, kind.pairs(samples), lambda expected, actual, *_: kind.same(kind, expected, actual))


def pushed_forward(function: Op, sample: Sample) -> list[torch.Tensor | None]:
    """The results and their tangents, then those of the arguments; every argument that can have a tangent has one."""
    torch.default_generator.manual_seed(2)
    with forward_ad.dual_level():
        duals = tree_map(_dual, sample)
        torch.default_generator.manual_seed(1)
        result = duals.passed_to(function)
        tensors = [leaf for leaf in tree_leaves((result, duals)) if isinstance(leaf, torch.Tensor)]
        return [part for tensor in tensors for part in forward_ad.unpack_dual(tensor)]


def _dual(x: Any) -> Any:
    """The same tensor, tracked by forward-mode differentiation only."""
    if not (is_plain(x) or is_other(x)):
        return x
    x.requires_grad_(False)
    return forward_ad.make_dual(x, torch.randn(x.shape, dtype=x.dtype)) if is_inexact(x) else x


DERIVATIVES: dict[str, Callable[..., Count]] = {
    "trainable": check_trainable,
    "frozen": check_frozen,
    "tangents": check_tangents,
}
CHECKS: dict[str, Callable[..., Count]] = {
    "forward": check_forward,
    "inference": check_inference,
    "inplace": check_inplace,
    "inference inplace": check_inference_inplace,
    "out": check_out,
    **DERIVATIVES,
}
