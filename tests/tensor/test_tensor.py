"""What a value means: reads, views, writes, replacement, moves, materializing, ownership, copies, training."""

from __future__ import annotations

import copy
import io
import operator
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import nn

import offload
import offload.tensor.ops
import offload.tensor.wrapper
from offload import OffloadedTensor
from offload.errors import DtypeMismatchError, NameInUseError, ShapeMismatchError, StaleViewError, UnsupportedOpError
from offload.memory import uncollected
from offload.tensor.registry import FUNCTIONS
from offload.tensor.wrapper import wrap
from tests.equal import assert_equal


def offloaded(tensor: torch.Tensor, name: str = "w", offload_dir: Path | None = None) -> OffloadedTensor:
    return OffloadedTensor.from_original_tensor(tensor, name, offload_dir)


def stored_in(w: OffloadedTensor) -> torch.Tensor:
    """The value as another program reads it from the file."""
    return safetensors.torch.load_file(w.offload_path)[w.name]


@pytest.fixture
def plain() -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(6, 8)


@pytest.fixture
def checkpoint(tmp_path: Path, plain: torch.Tensor) -> Path:
    """A file that offload did not write, with one tensor `w`."""
    path = tmp_path / "model.safetensors"
    safetensors.torch.save_file({"w": plain}, path)
    return path


# Creating


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.int8, torch.bool], ids=str)
@pytest.mark.parametrize("shape", [(), (0, 3), (4, 5)], ids=str)
def test_a_tensor_goes_to_disk_and_comes_back(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.testing.make_tensor(shape, dtype=dtype, device="cpu")
    w = offloaded(tensor)

    assert (tensor.shape, tensor.dtype, tensor.device) == (w.shape, w.dtype, w.device)
    assert type(w.materialize()) is torch.Tensor
    assert_equal(tensor, w)


def test_a_file_entry_is_referenced_in_place(checkpoint: Path, plain: torch.Tensor) -> None:
    before = checkpoint.stat()

    w = OffloadedTensor.from_file(checkpoint, "w")
    assert_equal(plain, w)
    assert checkpoint == w.offload_path
    assert before.st_mtime_ns == checkpoint.stat().st_mtime_ns


def test_the_key_may_be_left_out_where_there_is_one(checkpoint: Path) -> None:
    """With several, the error names some."""
    assert "w" == OffloadedTensor.from_file(checkpoint).name
    safetensors.torch.save_file({"a": torch.ones(1), "b": torch.ones(1)}, checkpoint)
    with pytest.raises(KeyError, match=r"a, b.*key="):
        OffloadedTensor.from_file(checkpoint)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (OffloadedTensor.empty, torch.zeros(2, 3, dtype=torch.int16)),
        (OffloadedTensor.zeros, torch.zeros(2, 3, dtype=torch.int16)),
        (lambda shape, **options: OffloadedTensor.full(shape, 7, **options), torch.full((2, 3), 7, dtype=torch.int16)),
    ],
    ids=["empty", "zeros", "full"],
)
def test_a_tensor_is_allocated_on_disk(make: Any, expected: torch.Tensor) -> None:
    assert_equal(expected, make((2, 3), dtype=torch.int16, name="w"))
    with pytest.raises(TypeError, match="dtype"):
        make((2, 3), dtype="int16", name="x")


@pytest.mark.parametrize("number", [True, 3, 2.5, 1j])
def test_full_takes_its_dtype_from_the_number(number: complex) -> None:
    assert_equal(torch.full((2,), number), OffloadedTensor.full((2,), number, name="w"))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.empty(2, device="meta"),
        torch.eye(2).to_sparse(),
        torch.quantize_per_tensor(torch.ones(2), 1, 0, torch.qint8),
    ],
    ids=["meta", "sparse", "quantized"],
)
def test_a_value_that_is_not_dense_is_refused_by_name(tensor: torch.Tensor) -> None:
    with pytest.raises(UnsupportedOpError, match="'lm_head'"):
        offloaded(tensor, "lm_head")


def test_an_unknown_device_is_an_error_that_names_the_available_ones() -> None:
    """At creation, not at the first op."""
    with pytest.raises(RuntimeError, match="finds no device 'floppy' here: use one of cpu"):
        OffloadedTensor.empty((2,), name="w", device="floppy")


# Properties, text, views


def test_text_is_that_of_the_plain_tensor_with_the_name(plain: torch.Tensor) -> None:
    assert "OffloadedTensor([1., 2.], name='w')" == repr(offloaded(torch.tensor([1.0, 2.0])))
    assert "requires_grad=True" in repr(nn.Parameter(offloaded(plain)))
    assert "OffloadedTensor(3, name='w')" == str(offloaded(torch.tensor(3)))


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (lambda path: path.unlink(), "(file missing)"),
        (lambda path: path.write_bytes(b"short"), "(not readable: CorruptFileError)"),
    ],
)
def test_the_text_of_a_tensor_says_that_its_file_is_gone(tmp_path: Path, harm: Any, words: str) -> None:
    """A debugger, a notebook and `print(model)` show tensors that can no longer be read."""
    layer = nn.Linear(3, 2)
    layer.weight = nn.Parameter(offloaded(layer.weight.detach(), "w", tmp_path))
    harm(tmp_path / "w.safetensors")

    text = repr(layer.weight)

    assert words in text
    for part in ("shape=(2, 3)", "dtype=torch.float32", "requires_grad=True", "name='w'", str(tmp_path)):
        assert part in text
    assert "Linear(in_features=3" in repr(layer)


def test_printing_a_large_tensor_reads_little() -> None:
    """Only the edges: few pages of the mapping become resident."""
    w = OffloadedTensor.empty((4096, 4096), name="w")
    before = psutil.Process().memory_info().shared  # of files

    assert "..." in repr(w)
    assert psutil.Process().memory_info().shared - before < 4 << 20


def test_numbers_are_formatted_as_of_a_plain_tensor() -> None:
    w = offloaded(torch.tensor([1.5, 2.0]))

    assert "1.50" == f"{w[0]:.2f}"
    assert (1.5, 2, True) == (float(w[0]), int(w[1]), bool(w[1]))
    assert "b" == "ab"[offloaded(torch.tensor(1), "i")]


@pytest.mark.parametrize(
    "make",
    [
        torch.empty_like,
        torch.zeros_like,
        torch.ones_like,
        torch.rand_like,
        torch.randn_like,
        lambda w: torch.full_like(w, 3.0),
        lambda w: torch.randint_like(w, 9),
        lambda w: torch.randint_like(w, 2, 9),
        lambda w: w.new_empty(2),
        lambda w: w.new_zeros(2, dtype=torch.int8),
        lambda w: w.new_ones((2, 2)),
        lambda w: w.new_full((2,), 5.0),
        lambda w: w.new_tensor([1.0]),
        lambda w: w.new_empty_strided((2,), (3,)),
        lambda w: torch.zeros_like(w, dtype=torch.int64),
        lambda w: torch.zeros_like(w.t()),
        lambda w: torch.empty_like(w, device="meta"),
    ],
)
def test_a_tensor_like_it_is_made_with_the_file_closed(make: Any, plain: torch.Tensor) -> None:
    """With the plain one's shape, strides, dtype and, if any, values; the file is gone."""
    w = offloaded(plain)
    os.unlink(w.offload_path)
    torch.manual_seed(1)
    expected = make(plain)
    torch.manual_seed(1)
    result = make(w)

    assert (type(expected), expected.shape, expected.stride()) == (type(result), result.shape, result.stride())
    assert (expected.dtype, expected.device) == (result.dtype, result.device)
    if "empty" not in make.__name__ and "<lambda>" != make.__name__:
        assert_equal(expected, result)


@pytest.mark.parametrize(
    "cut",
    [
        lambda w: w[2],
        lambda w: w[1:5:2],
        lambda w: w.t(),
        lambda w: w.view(4, 12),
        lambda w: w.chunk(2)[1],
        lambda w: w.unbind(1)[3],
        lambda w: w.unsqueeze(0).expand(3, 6, 8),
        lambda w: w.detach(),
        lambda w: w.diagonal(),
        lambda w: w.unfold(1, 3, 2),
        lambda w: w.as_strided((2, 2), (3, 1), 5),
        lambda w: w.view(torch.int32),
        lambda w: w.squeeze(),
        lambda w: w.reshape(48),
        lambda w: w[:0],
        lambda w: torch.tensor_split(w, 4)[3],
        lambda w: w[None, 1, None],
        lambda w: w.data,
    ],
)
def test_a_view_stays_on_disk_and_reads_nothing(cut: Any, plain: torch.Tensor) -> None:
    """It is created with the file gone, and has the plain view's metadata."""
    w = offloaded(plain)
    path, kept = w.offload_path, w.offload_path.with_suffix(".kept")
    path.rename(kept)
    view, expected = cut(w), cut(plain)

    assert offload.is_offloaded(view)
    assert (expected.shape, expected.stride(), expected.dtype) == (view.shape, view.stride(), view.dtype)
    assert expected.storage_offset() == view.storage_offset()
    kept.rename(path)
    torch.testing.assert_close(view.materialize(), expected, rtol=0, atol=0)


# Writes


@pytest.mark.parametrize(
    "change",
    [
        lambda w: w[1:3, ::2].fill_(5),
        lambda w: w.__setitem__(0, 7.0),
        lambda w: w.t()[2].zero_(),
        lambda w: w.__setitem__(w > 0, -1.0),
        lambda w: w.__setitem__(([0, 1], [2, 3]), torch.tensor([8.0, 9.0])),
        lambda w: w.__setitem__((..., 3), torch.arange(6.0)),
        lambda w: nn.init.constant_(w, 2.0),
        lambda w: operator.iadd(w, 1),
        lambda w: torch.sum(torch.ones(2, 8), 0, out=w[0]),
        lambda w: w[1:].sub_(w[0]),
    ],
)
def test_a_write_goes_through_to_the_file(change: Any, plain: torch.Tensor) -> None:
    """By the tensor, a view of it, or `out=`; aliases created before see it, and the version counter moves."""
    w = offloaded(plain.clone())
    alias, row, version = w.detach(), w[0], w._version
    result, expected = change(w), change(plain)

    assert_equal(plain, w)
    assert_equal(plain, alias)
    assert_equal(plain[0], row)
    assert_equal(plain, stored_in(w))
    assert (expected is plain) == (result is w)
    assert version < w._version


def test_a_checkpoint_is_copied_at_the_first_write(checkpoint: Path, tmp_path: Path, plain: torch.Tensor) -> None:
    """The file that offload did not create is never written to; the copy goes to `offload_dir`."""
    before = checkpoint.read_bytes()
    w = OffloadedTensor.from_file(checkpoint, "w", offload_dir=tmp_path / "ours")
    alias = w[0]
    w[0].add_(1)

    assert before == checkpoint.read_bytes()
    assert tmp_path / "ours" / "w.safetensors" == w.offload_path
    plain[0] += 1
    assert_equal(plain, w)
    assert_equal(plain[0], alias)


def test_backward_through_a_changed_weight_raises(plain: torch.Tensor) -> None:
    w, x = offloaded(plain), torch.randn(2, 8, requires_grad=True)
    for change in (lambda: w.add_(1), lambda: w.update_values(plain), lambda: torch.add(plain, 1, out=w)):
        loss = F.linear(x, w).sum()
        change()

        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_set_stores_a_plain_value_and_makes_an_alias_of_an_offloaded_one(plain: torch.Tensor) -> None:
    """With the new shape; of an alias nothing is copied, and writes to one are visible in the other."""
    w, other = offloaded(torch.zeros(2)), offloaded(plain, "other")
    assert w is w.set_(plain)
    assert_equal(plain, w)
    assert_equal(plain, stored_in(w))

    w.set_(other)
    w.zero_()

    assert "other" == w.name
    assert 0 == other.abs().sum()


REFUSED: dict[str, tuple[Callable[[Any], object], str]] = {
    "a part grows": (lambda w: w[5].resize_(100), r"'w'.*resize the tensor itself"),
    "a part is replaced": (lambda w: w[:2].update_values(torch.ones(2, 8)), r"'w'.*copy_"),
    "a transpose is replaced": (lambda _: offloaded(torch.eye(4)).t().update_values(torch.ones(4, 4)), r"'w'.*copy_"),
    "a plain tensor is set to the file": (lambda w: torch.empty(0).set_(w), r"'w'.*copy_"),
    "set_data": (lambda w: torch.ops.aten.set_data(w, torch.ones(2)), r"set_data.*'w'.*\.data"),
    "set_data.default": (lambda w: torch.ops.aten.set_data.default(w, torch.ones(2)), r"set_data.*'w'.*\.data"),
    "a meta value": (lambda w: w.update_values(torch.empty(6, 8, device="meta")), "'w' is on the meta device"),
    "meta data": (lambda w: setattr(w, "data", torch.empty(6, 8, device="meta")), "'w' is on the meta device"),
}


@pytest.mark.parametrize("act", REFUSED)
def test_a_write_that_the_file_can_not_follow_is_refused_with_the_way_out(act: str, plain: torch.Tensor) -> None:
    """torch would change metadata, or nothing, and leave the file alone."""
    w, (write, words) = offloaded(plain), REFUSED[act]

    with pytest.raises(UnsupportedOpError, match=words):
        write(w)

    assert not w.is_meta
    assert_equal(plain, w)


# update_values


def test_update_values_replaces_the_file(plain: torch.Tensor) -> None:
    """Every alias and view sees the new value; a mapping being read keeps the old one."""
    w = offloaded(plain)
    alias, row, array = w.detach(), w[0], w.numpy()
    inode = w.offload_path.stat().st_ino
    w.update_values(plain + 1)

    assert_equal(plain + 1, w)
    assert_equal(plain + 1, alias)
    assert_equal(plain[0] + 1, row)
    assert_equal(plain + 1, stored_in(w))
    assert (plain.numpy() == array).all()
    assert inode != w.offload_path.stat().st_ino


@pytest.mark.parametrize(
    ("change", "error", "words", "flag"),
    [
        (lambda one: one[0], ShapeMismatchError, r"\(6, 8\).*\(8,\)", "strict_shape"),
        (torch.Tensor.half, DtypeMismatchError, "float32.*float16", "strict_dtype"),
    ],
)
def test_update_values_refuses_another_shape_or_dtype(
    plain: torch.Tensor, change: Any, error: type[Exception], words: str, flag: str
) -> None:
    """Names the tensor, both shapes or dtypes, and the flag, with which it changes."""
    w, new = offloaded(plain), change(plain)
    with pytest.raises(error, match=rf"'w'.*{words}.*{flag}=False"):
        w.update_values(new)
    assert_equal(plain, w)

    w.update_values(new, **{flag: False})
    assert_equal(new, w)


def test_update_values_takes_an_offloaded_value_even_its_own_view() -> None:
    square = torch.randn(5, 5)
    w = offloaded(square)
    w.update_values(w.t())

    assert_equal(square.t().contiguous(), w)


@pytest.mark.parametrize(
    "replace", [lambda w, new: w.update_values(new, strict_dtype=False), lambda w, new: setattr(w, "data", new)]
)
def test_integers_are_refused_for_what_requires_grad(plain: torch.Tensor, replace: Any) -> None:
    """With torch's own words, and the way out; the file keeps its value."""
    w = nn.Parameter(offloaded(plain))
    with pytest.raises(RuntimeError, match=r"'w'.* data set to .* must be floating point .*: call requires_grad_\("):
        replace(w, torch.ones(6, 8, dtype=torch.int8))

    assert_equal(plain, w.detach())


def test_an_old_view_of_a_new_layout_is_an_error(plain: torch.Tensor) -> None:
    """It would show other numbers."""
    w = offloaded(plain)
    row, alias = w[0], w.detach()
    w.update_values(torch.ones(3), strict_shape=False)

    for stale in (row, alias):
        with pytest.raises(StaleViewError, match=r"'w'.*cut the view again"):
            stale.sum()
        with pytest.raises(StaleViewError):
            stale[0]
        with pytest.raises(StaleViewError):
            torch.zeros_like(stale)
    assert [1.0] == w[:1].tolist()


# Moves, casts, and other data


def test_a_moved_tensor_shares_the_version(plain: torch.Tensor) -> None:
    """So that autograd notices writes through the other one. (torch can exchange the CPU for some devices only.)"""
    w = offloaded(plain)
    gpu = torch.device("cuda", 0)
    moved = offload.tensor.ops.move_with_version(lambda t: wrap(t._handle, t._view_spec, gpu), (w,), {})
    w.add_(1)

    assert gpu == moved.device
    assert 1 == w._version == moved._version
    torch.autograd.graph.increment_version(moved)
    assert 2 == w._version
    for move in (torch.Tensor.to, torch.Tensor.cpu, torch.Tensor.cuda):
        assert offload.tensor.ops.move_with_version is FUNCTIONS[move]


def test_to_where_it_is_gives_the_tensor_itself(plain: torch.Tensor) -> None:
    w = offloaded(plain)

    assert w is w.to("cpu")
    assert w is w.cpu()
    assert w is w.to(torch.float32)
    assert type(w.to("cpu", copy=True)) is torch.Tensor


def test_to_meta_gives_a_meta_tensor_without_reading(plain: torch.Tensor) -> None:
    w = offloaded(plain)
    os.unlink(w.offload_path)
    for move in (lambda t: t.to("meta"), lambda t: t.t().to("meta"), lambda t: t.to("meta", torch.float16)):
        expected, result = move(plain), move(w)

        assert result.is_meta
        assert (type(expected), expected.shape, expected.stride()) == (type(result), result.shape, result.stride())
        assert expected.dtype == result.dtype


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a device that is not there")
def test_an_absent_device_raises_the_error_of_torch(plain: torch.Tensor) -> None:
    """At the move, not later. A CUDA build's error differs from others'."""
    with pytest.raises((AssertionError, RuntimeError)) as expected:
        plain.to("cuda")
    with pytest.raises((AssertionError, RuntimeError)) as raised:
        offloaded(plain).to("cuda")

    assert (expected.type, str(expected.value)) == (raised.type, str(raised.value))


def other_data(p: Any, x: torch.Tensor, store: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
    """Of another dtype and shape."""
    p.grad = torch.ones(6, 8)
    p.data = x[:2].half()
    return [p, p.grad]


def kept_data(p: Any, x: torch.Tensor, store: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
    """A value that others have stays theirs, and can be put back."""
    kept = p.data
    p.data = x * 2
    then = p.detach().clone()
    p.data = kept
    return [kept, then, p]


def own_view(p: Any, x: torch.Tensor, store: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
    kept = p.data
    p.data = p.data.t()
    return [p, kept]


def shared_data(p: Any, x: torch.Tensor, store: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
    """From then on both share one value."""
    other = store(x[:3] + 1)
    p.data = other
    other[0].zero_()
    return [p, other]


def data_of_a_part(p: Any, x: torch.Tensor, store: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
    """The part gets its own value."""
    part = p.detach()[1:]
    part.data = torch.ones(3)
    return [part, p]


@pytest.mark.parametrize("assign", [other_data, kept_data, own_view, shared_data, data_of_a_part])
def test_assigning_data_has_the_effect_that_it_has_in_memory(assign: Any, plain: torch.Tensor) -> None:
    """The tensor stays a trainable leaf, on disk."""
    w, p = nn.Parameter(offloaded(plain)), nn.Parameter(plain.clone())

    expected = assign(p, plain.clone(), torch.clone)
    found = assign(w, plain.clone(), lambda one: offloaded(one, "other"))

    for one, other in zip(expected, found, strict=True):
        assert (one.shape, one.stride()) == (other.shape, other.stride())
        assert_equal(one.detach(), other.detach())
    assert isinstance(w, nn.Parameter)
    assert offload.is_offloaded(w)
    assert (True, True) == (w.requires_grad, w.is_leaf)
    assert_equal(w.detach().materialize(), stored_in(w).t() if assign is own_view else stored_in(w))


def test_assigning_data_in_a_named_folder_makes_old_views_an_error(tmp_path: Path, plain: torch.Tensor) -> None:
    """There is only one file per name there: what can't be kept is not shown wrong."""
    w = offloaded(plain, "w", tmp_path)
    kept = w.data
    w.data = plain * 2

    assert_equal(plain * 2, stored_in(w))
    assert_equal(plain * 2, w)
    with pytest.raises(StaleViewError):
        kept.sum()


# Memory, ownership, copies


def test_materialize_is_independent(plain: torch.Tensor) -> None:
    w = offloaded(plain)
    result = w.materialize()
    result.zero_()

    assert_equal(plain, w)
    assert not result.requires_grad


def test_materialize_takes_nests(plain: torch.Tensor) -> None:
    """Lists, tuples and dicts are rebuilt; the rest is unchanged; equal views become one tensor."""
    w = offloaded(plain)
    result = offload.materialize({"a": [w, 1], "b": (w.detach(), "x", w[0]), "c": plain})

    assert_equal(plain, result["a"][0])
    assert result["a"][0] is result["b"][0]
    assert_equal(plain[0], result["b"][2])
    assert (1, "x") == (result["a"][1], result["b"][1])
    assert plain is result["c"]
    assert not any(offload.is_offloaded(leaf) for leaf in torch.utils._pytree.tree_leaves(result))


def test_materialize_brings_a_module_back_into_memory(plain: torch.Tensor) -> None:
    """In place, with ties, grads and buffers."""
    module = nn.Sequential(nn.Linear(8, 6), nn.Linear(8, 6))
    module[0].weight = module[1].weight = nn.Parameter(offloaded(plain), requires_grad=False)
    module[0].register_buffer("steps", offloaded(torch.tensor(3), "steps"))
    module[0].weight.grad = grad = torch.ones(6, 8)

    assert module is offload.materialize(module)
    assert grad is module[0].weight.grad
    assert module[0].weight is module[1].weight
    assert type(module[0].weight) is nn.Parameter
    assert not module[0].weight.requires_grad
    assert_equal(plain, module[0].weight.detach())
    assert_equal(torch.tensor(3), module[0].steps)


def test_numpy_shares_the_file(plain: torch.Tensor) -> None:
    """For a file of ours; writing to the array writes to the tensor."""
    w = offloaded(plain)
    array = w.numpy()
    array[0, 0] = 7

    assert 7 == w[0, 0].item()
    assert array.flags.writeable
    assert np.asarray(w).base is not None
    assert np.array_equal(np.asarray(w, dtype=np.float64), w.double().numpy())


def test_numpy_over_a_checkpoint_is_read_only(checkpoint: Path, plain: torch.Tensor) -> None:
    array = OffloadedTensor.from_file(checkpoint, "w").numpy()

    with pytest.raises(ValueError, match="read-only"):
        array[0, 0] = 1
    assert (plain.numpy() == array).all()


def test_numpy_of_a_trainable_tensor_is_torchs_own_error(plain: torch.Tensor) -> None:
    w = offloaded(plain).requires_grad_()
    with pytest.raises(RuntimeError, match="requires grad"):
        w.numpy()

    assert (plain.numpy() == w.numpy(force=True)).all()


def test_dlpack_shares_an_own_file_and_copies_a_checkpoint(checkpoint: Path, plain: torch.Tensor) -> None:
    """`from_dlpack` of torch and numpy; `to_dlpack` can't be overridden; a trainable tensor is refused as in torch."""
    w, referenced = offloaded(plain), OffloadedTensor.from_file(checkpoint, "w")

    assert_equal(plain, torch.from_dlpack(w))
    assert (plain.numpy() == np.from_dlpack(w)).all()
    torch.from_dlpack(w)[0, 0] = 7
    assert 7 == w[0, 0].item()
    torch.from_dlpack(referenced).zero_()
    assert_equal(plain, referenced)
    with pytest.raises(RuntimeError, match="data pointer"):
        torch.utils.dlpack.to_dlpack(w)
    with pytest.raises(BufferError, match="require gradient"):
        torch.from_dlpack(w.requires_grad_())


def test_a_private_file_goes_with_its_last_tensor(plain: torch.Tensor) -> None:
    """Views and parameters keep it alive; no cycle keeps it longer: the collector is off."""
    with uncollected():
        w = offloaded(plain)
        path = w.offload_path
        view, parameter = w[0], nn.Parameter(w)
        F.linear(torch.ones(2, 8), parameter).sum().backward()
        del w
        assert path.exists()
        del parameter
        assert_equal(plain[0], view)
        del view
        assert not path.exists()


def test_a_file_in_a_named_folder_stays(tmp_path: Path, plain: torch.Tensor) -> None:
    w = offloaded(plain, "a/b", tmp_path)
    w.add_(1)
    w.flush()
    path = w.offload_path
    del w

    assert_equal(plain + 1, OffloadedTensor.from_file(path))
    assert "a/b" == OffloadedTensor.from_file(path).name


def test_two_live_tensors_do_not_share_a_name(tmp_path: Path, plain: torch.Tensor) -> None:
    """In one folder, whatever is allowed; dropping one frees the name, and leaves its file."""
    w = offloaded(plain, "w", tmp_path)
    with pytest.raises(NameInUseError, match=r"'w'.*a live tensor"):
        OffloadedTensor.from_original_tensor(plain, "w", tmp_path, exist_ok=True)
    del w

    assert_equal(plain, OffloadedTensor.from_original_tensor(plain, "w", tmp_path, exist_ok=True))


def test_a_clone_and_a_deepcopy_are_copies_and_others_aliases(plain: torch.Tensor) -> None:
    """`detach` gives one without a graph, `.data` one without the version."""
    w = offloaded(plain).requires_grad_()
    every = w, w.clone(), copy.deepcopy(w), w.detach(), w.data
    cloned, copied, detached, data = every[1:]
    detached.add_(1)

    assert 5 == len(set(map(id, every)))
    assert [True, True, True, False, False] == [one.requires_grad for one in every]
    assert OffloadedTensor is type(copied) is type(detached) is type(torch.ops.aten.alias(w))
    assert type(cloned) is torch.Tensor
    assert w.offload_path != copied.offload_path
    for one in (cloned, copied):
        assert_equal(plain, one.detach())
    assert_equal(plain + 1, data)
    assert (1, 0) == (w._version, data._version)


@pytest.mark.parametrize("kind", [nn.Parameter, torch.Tensor.requires_grad_])
def test_deepcopy_keeps_parameter_and_grad_as_torch_does(kind: Any, plain: torch.Tensor) -> None:
    """A leaf keeps its gradient, as a copy; a parameter is copied without."""
    expected, w = (kind(tensor) for tensor in (plain.clone(), offloaded(plain)))
    for tensor in (expected, w):
        tensor.grad = torch.ones(6, 8)
    expected, copied = copy.deepcopy(expected), copy.deepcopy(w)

    assert isinstance(expected, nn.Parameter) == isinstance(copied, nn.Parameter)
    assert (expected.grad is None) == (copied.grad is None)
    if expected.grad is not None:
        assert_equal(expected.grad, copied.grad)
        assert w.grad is not copied.grad


def test_deepcopy_keeps_the_cut(plain: torch.Tensor) -> None:
    """For a leaf; for other tensors it raises, as in torch."""
    w = nn.Parameter(offloaded(plain))
    view = copy.deepcopy(w.detach().t())

    assert_equal(plain.t(), view)
    with pytest.raises(RuntimeError, match="deepcopy"):
        copy.deepcopy(w[0])


def test_deepcopy_keeps_ties(plain: torch.Tensor) -> None:
    """One object stays one; two tensors over one file stay over one."""
    w = offloaded(plain)
    first, second, row = copy.deepcopy([w, w, w[0]])

    assert first is second
    assert first.offload_path == row.offload_path
    row.zero_()
    assert 0 == first[0].abs().sum()
    assert_equal(plain, w)


def test_copy_is_an_alias(plain: torch.Tensor) -> None:
    w = nn.Parameter(offloaded(plain), requires_grad=False)
    alias = copy.copy(w)
    alias.zero_()

    assert isinstance(alias, nn.Parameter)
    assert not alias.requires_grad
    assert 0 == w.abs().sum()


@pytest.mark.parametrize("dump", [pickle.dumps, lambda value: _saved(value)], ids=["pickle", "torch.save"])
def test_pickles_hold_plain_values(dump: Callable[[Any], bytes], plain: torch.Tensor) -> None:
    """Parameters stay parameters, and what reads them needs no `offload`."""
    data = dump({"w": offloaded(plain), "p": nn.Parameter(offloaded(plain)), "row": offloaded(plain)[0]})
    loaded = torch.load(io.BytesIO(data), weights_only=True) if dump is not pickle.dumps else pickle.loads(data)

    assert b"offload" not in data
    assert type(loaded["w"]) is torch.Tensor
    assert type(loaded["p"]) is nn.Parameter
    assert_equal(plain, loaded["w"])
    assert_equal(plain[0], loaded["row"])


def _saved(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def test_torch_save_keeps_ties(plain: torch.Tensor) -> None:
    w = offloaded(plain)
    loaded = torch.load(io.BytesIO(_saved([w, w[0]])), weights_only=True)
    loaded[1].zero_()

    assert 0 == loaded[0][0].abs().sum()


def test_hash_and_eq_are_those_of_tensors(plain: torch.Tensor) -> None:
    w, other = offloaded(plain), offloaded(plain)

    assert "here" == {w: "here", other: "there"}[w]
    assert 2 == len({w, other, w})
    assert (w == other).all()
    assert type(w == other) is torch.Tensor


def test_values_of_dtypes_that_torch_can_not_copy_come_back() -> None:
    """torch has no copy kernel for these: their bytes are copied."""
    bits = torch.arange(4, dtype=torch.uint8)

    back = OffloadedTensor.from_original_tensor(bits.view(torch.uint4), "bits").materialize()

    assert torch.uint4 == back.dtype
    assert torch.equal(bits, back.view(torch.uint8))
