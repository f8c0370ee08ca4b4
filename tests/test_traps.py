"""Known traps for tensors over files, numbered as in DESIGN 7. (18 to 23: `tests/storage`; 27: `test_tensor.py`.)"""

from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import offload
from offload import OffloadedTensor
from offload.errors import ArgumentTypeError, UnsupportedOpError
from tests.distributed.ranks import in_a_rank
from tests.equal import assert_equal
from tests.processes import run_script


def offloaded(tensor: torch.Tensor, name: str = "w") -> OffloadedTensor:
    return OffloadedTensor.from_original_tensor(tensor, name)


@pytest.fixture
def plain() -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(6, 8)


# Building the wrapper


def test_01_the_wrapper_has_strides_storage_and_target(plain):
    """Channels-last convolution uses the same kernel as for plain ones; `as_strided` sees the whole storage."""
    kernel = torch.randn(4, 3, 3, 3).to(memory_format=torch.channels_last)
    image = torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)
    result, expected = F.conv2d(image, offloaded(kernel)), F.conv2d(image, kernel)

    assert expected.stride() == result.stride()
    assert_equal(expected, result)
    assert_equal(plain.as_strided((3, 3), (1, 2), 40), offloaded(plain).as_strided((3, 3), (1, 2), 40))
    assert 6 * 8 * 4 == offloaded(plain).untyped_storage().nbytes()
    assert torch.device("cpu") == offloaded(plain).device


def test_02_requires_grad_grad_and_hooks_are_torchs(plain):
    """They live on the wrapper, and survive `.data =`."""
    w = offloaded(plain).requires_grad_()
    calls: list[Any] = []
    w.register_post_accumulate_grad_hook(calls.append)
    w.data = plain * 2
    (w * w).sum().backward()

    assert w.is_leaf
    assert_equal(plain * 4, w.grad)
    assert calls[0] is w


def test_04_a_parameter_can_be_rebuilt_from_its_class(plain):
    """accelerate calls `type(param)(tensor, requires_grad=...)`, with an offloaded or a plain tensor."""
    w = offloaded(plain)
    same, other = type(w)(w, requires_grad=True), type(w)(plain, requires_grad=False)

    assert w.offload_path == same.offload_path
    assert (True, False) == (same.requires_grad, other.requires_grad)
    assert_equal(plain, other)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ((torch.ones(2),), {}),
        ((torch.ones(2), True), {}),
        ((), {"requires_grad": True}),
        (([1.0, 2.0],), {"requires_grad": True}),
        ((torch.ones(2),), {"requires_grad": True, "name": "w"}),
    ],
)
def test_04_the_class_is_not_called_otherwise(given, named):
    with pytest.raises(ArgumentTypeError, match=r"use OffloadedTensor\.from_original_tensor\(tensor, name\)"):
        OffloadedTensor(*given, **named)


# Views and writes


def test_05_autograd_saves_the_view_on_disk(plain):
    """`F.linear` saves `w.t()` for backward: an offloaded view, not a copy."""
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        F.linear(torch.randn(2, 8, requires_grad=True), offloaded(plain))

    assert any(offload.is_offloaded(tensor) for tensor in saved)
    assert all(offload.is_offloaded(tensor) for tensor in saved if tensor.numel() == 48)


def test_06_a_mutating_op_gives_its_argument(plain):
    """According to the schema's aliases, at the aten level too, in a tuple too."""
    w, values, indices = map(offloaded, (plain, torch.empty(6), torch.empty(6, dtype=torch.int64)))

    assert w is torch.ops.aten.add_.Tensor(w, 1)
    assert w is torch.ops.aten.mul.out(w, 2, out=w)
    first, second = torch.ops.aten.sort.values(torch.arange(6.0), values=values, indices=indices)
    assert first is values
    assert second is indices


@pytest.mark.parametrize(
    "change", [lambda w: w.update_values(torch.ones(6, 8)), lambda w: torch.ones(6, 8, out=w), lambda w: w.t_()]
)
def test_07_version_counters_move(change, plain):
    """For the tensor and its views, even where the dispatcher does not do it."""
    w = offloaded(plain)
    view = w.view(48)
    before = view._version
    change(w)

    assert before < view._version == w._version


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.t_(),
        lambda t: t.unsqueeze_(0),
        lambda t: t.set_(torch.ones(3)),
        lambda t: t.resize_(20),
        lambda t: t.transpose_(0, 1),
        lambda t: t.swapaxes_(0, 1),
        lambda t: t.as_strided_((2, 3), (1, 2), 4),
        lambda t: t.squeeze_(),
        lambda t: torch.add(torch.ones(2), 1, out=t.resize_(0)),
        lambda t: torch.linalg.inv(torch.eye(3) * 2, out=t.resize_(0)),
        lambda t: torch.linalg.multi_dot([torch.ones(2, 2)] * 3, out=t.resize_(0)),
        lambda t: torch.nonzero(torch.ones(2)).float().add_(0),
    ],
)
def test_08_size_and_stride_that_change_inside_an_op_are_seen(change, plain):
    w = offloaded(plain.clone())
    change(w)
    change(plain)

    assert (plain.shape, plain.stride()) == (w.shape, w.stride())
    known = min(48, plain.numel())
    assert plain.flatten()[:known].tolist() == w.flatten()[:known].tolist()


@pytest.mark.parametrize(
    "op",
    [torch.linalg.pinv, lambda m: torch.sin(m.conj()), lambda m: m.conj() @ m.mH, lambda m: torch.neg(m.conj().imag)],
)
def test_11_lazy_conjugation_and_negation_are_understood(op):
    matrix = torch.randn(4, 4, dtype=torch.complex64)

    assert_equal(op(matrix), op(offloaded(matrix)))


def test_12_tensor_split_takes_an_offloaded_tensor(plain):
    """It reads the indices from memory, below every dispatcher."""
    where = torch.tensor([1, 4])
    pieces = torch.tensor_split(offloaded(plain), offloaded(where, "where"))

    for expected, piece in zip(torch.tensor_split(plain, where), pieces, strict=True):
        assert_equal(expected, piece)


@pytest.mark.parametrize("reduce", ["sum", "mean", "amax", "amin"])
def test_12_sparse_mm_reduces_offloaded_tensors(reduce):
    """It reads the dense factor from memory, below every dispatcher; so does its gradient."""
    sparse, dense = torch.randn(5, 6).relu().to_sparse_csr(), torch.randn(6, 3)
    w, p = offloaded(dense).requires_grad_(), dense.clone().requires_grad_()

    assert_equal(torch.sparse.mm(sparse, dense, reduce), torch.sparse.mm(sparse, offloaded(dense), reduce))
    for factor in (w, p):
        torch.sparse.mm(sparse, factor, reduce).sum().backward()
    assert_equal(p.grad, w.grad)


def test_12_methods_work_when_called_through_torch_tensor(plain):
    w = offloaded(plain)

    assert plain.tolist() == torch.Tensor.tolist(w)
    assert (plain.numpy() == torch.Tensor.numpy(w)).all()
    assert w.data_ptr() == torch.Tensor.data_ptr(w)
    assert w.untyped_storage().data_ptr() == torch.Tensor.untyped_storage(w).data_ptr()


@in_a_rank
def test_12_collectives_take_offloaded_tensors_in_lists():
    """As inputs and as outputs; what is received is in the file."""
    one, two = torch.arange(3.0), torch.arange(3.0) + 5
    w = offloaded(one)
    calls = {
        "all_gather": lambda out: dist.all_gather([out], two),
        "all_gather_into_tensor": lambda out: dist.all_gather_into_tensor(out, two),
        "reduce_scatter": lambda out: dist.reduce_scatter(out, [two]),
        "scatter": lambda out: dist.scatter(out, [two]),
        "gather": lambda out: dist.gather(two, [out]),
    }
    for name, call in calls.items():
        out = offloaded(torch.zeros(3), name)
        call(out)
        assert out._version > 0
        assert_equal(two, safetensors.torch.load_file(out.offload_path)[name])

    received = [torch.zeros(3)]
    dist.all_gather(received, w)
    dist.all_reduce(w)
    dist.broadcast(w, 0)
    assert_equal(one, received[0])
    assert_equal(one, w)


@in_a_rank
def test_12_a_collective_never_writes_to_a_checkpoint(tmp_path):
    """The schemas don't say what is written: the tensor is copied to its own file anyway."""
    path = tmp_path / "checkpoint.safetensors"
    safetensors.torch.save_file({"w": torch.zeros(3)}, path)
    before = path.read_bytes()
    w = OffloadedTensor.from_file(path, "w")
    dist.all_gather([w], torch.ones(3))

    assert path != w.offload_path  # before it is read
    assert before == path.read_bytes()
    assert_equal(torch.ones(3), w)
    assert_equal(torch.ones(3), safetensors.torch.load_file(w.offload_path)["w"])


# Pointers, modes, pickles


def test_13_every_value_has_a_pointer_of_its_own(plain):
    """Views share a storage and have their offset in it; other values have other pointers; it lives with the handle."""
    w, other = offloaded(plain), offloaded(plain, "other")
    pointer = w.untyped_storage().data_ptr()
    w.sum()

    assert 5 == len({0, *(one.data_ptr() for one in (w, other, offloaded(_quantized(0)), offloaded(_quantized(0))))})
    assert pointer == w.untyped_storage().data_ptr() == nn.Parameter(w).untyped_storage().data_ptr()
    assert pointer != other.untyped_storage().data_ptr()
    assert w[1].data_ptr() == w.data_ptr() + 8 * 4
    assert w.untyped_storage()._cdata != w._guest.untyped_storage()._cdata


def test_13_transformers_and_safetensors_see_ties(plain):
    from transformers.pytorch_utils import id_tensor_storage

    w = offloaded(plain)

    assert id_tensor_storage(w) == id_tensor_storage(nn.Parameter(w))
    assert id_tensor_storage(w) != id_tensor_storage(offloaded(plain))
    tied = safetensors.torch._find_shared_tensors({"a": w, "b": w.detach(), "c": offloaded(plain)})
    assert [{"a", "b"}] == [names for names in tied if len(names) > 1]


def test_14_a_default_device_changes_no_values(plain):
    with torch.device("meta"):
        w = offloaded(plain)
        results = [w.sin(), F.linear(torch.ones(2, 8, device="cpu"), w), w.materialize(), w[0].add_(0).materialize()]

    assert_equal(plain.sin(), results[0])
    assert_equal(F.linear(torch.ones(2, 8), plain), results[1])
    assert_equal(plain, results[2])
    assert_equal(plain[0], results[3])


def test_14_under_a_fake_mode_results_are_fake_and_views_are_not(plain):
    """The value is mapped outside of the mode; a view created there is valid afterwards."""
    w = offloaded(plain)
    with FakeTensorMode(allow_non_fake_inputs=True):
        result, view, numbers = w.t().sin(), w.t(), (w[0].tolist(), w[1].numpy().tolist(), repr(w[0]))

    assert isinstance(result, FakeTensor)
    assert (plain[0].tolist(), plain[1].tolist(), repr(offloaded(plain)[0])) == numbers
    assert offload.is_offloaded(view)
    assert_equal(plain.t(), view)
    assert not isinstance(view._view_spec, FakeTensor)


def test_14_inference_mode_gives_normal_views_of_normal_tensors(plain):
    """They can be trained afterwards; results are inference tensors, as with a plain one."""
    w, p = offloaded(plain).requires_grad_(), plain.clone().requires_grad_()
    with torch.inference_mode():
        view, result = w.t(), w.sin()

    assert not view.is_inference()
    assert result.is_inference()
    for tensor, transposed in ((w, view), (p, p.t())):
        F.linear(torch.ones(2, 6), transposed).sum().backward()
        assert tensor.grad is None or tensor.grad.shape == tensor.shape
    assert_equal(torch.sin(plain), result)


def test_15_a_wrapper_flattens_to_its_mapping(plain):
    """And is rebuilt from it: compile and export use this (`test_compile`)."""
    w = offloaded(plain)
    names, context = w.__tensor_flatten__()
    inner = {name: getattr(w, name) for name in names}
    again = OffloadedTensor.__tensor_unflatten__(inner, context, w.shape, w.stride())

    assert {torch.nn.Parameter} == {type(tensor) for tensor in inner.values()}
    assert type(again) is OffloadedTensor
    assert_equal(plain + 1, again + 1)
    with pytest.raises(UnsupportedOpError, match="traced"):
        again.name


# 17: values of other subclasses


@pytest.fixture(scope="module")
def int8() -> torch.Tensor:
    return _quantized(0)


def _quantized(seed: int) -> torch.Tensor:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    torch.manual_seed(seed)
    layer = nn.Linear(32, 16, bias=False)
    quantize_(layer, Int8WeightOnlyConfig())
    return layer.weight.detach()


def test_17_a_quantized_weight_computes_as_in_memory(int8):
    """With a bias and an input on disk, too."""
    w, x, bias = offloaded(int8), torch.randn(3, 32), torch.randn(16)
    expected = F.linear(x, int8, bias)

    assert_equal(expected, F.linear(x, w, offloaded(bias, "bias")))
    assert_equal(expected, F.linear(offloaded(x, "x"), nn.Parameter(w, requires_grad=False), bias))


def test_17_gradients_flow_past_a_quantized_weight(int8):
    """To the input and to a trainable bias, plain or on disk."""
    grads = []
    for weight, wrap in ((int8, nn.Parameter), (offloaded(int8), lambda t: nn.Parameter(offloaded(t, "b")))):
        x = torch.ones(3, 32, requires_grad=True)
        bias = wrap(torch.zeros(16))
        F.linear(x, weight, bias).square().sum().backward()
        grads.append((x.grad, bias.grad))

    for expected, actual in zip(*grads, strict=True):
        assert_equal(expected, actual)


@pytest.mark.parametrize("replace", [OffloadedTensor.update_values, OffloadedTensor.copy_])
def test_17_another_quantized_weight_takes_its_place(int8, replace):
    """Aliases see it, and the version increases; a plain value may follow, too."""
    w, other = offloaded(int8), _quantized(1)
    alias, before = w.detach(), w._version
    result = replace(w, other)

    assert result in (None, w)
    assert before < w._version
    for one in (w, alias, OffloadedTensor.from_file(w.offload_path)):
        assert torch.equal(other.dequantize(), one.dequantize())
    w.update_values(other.dequantize())
    assert type(w.materialize()) is torch.Tensor
    w.update_values(int8)
    assert type(int8) is type(w.materialize())


def test_17_metadata_and_moves_ask_the_tensor(int8):
    """Not the value: the file is gone."""
    w = offloaded(int8)
    w.offload_path.unlink()

    assert ((16, 32), int8.dtype, 2, 512) == (tuple(w.shape), w.dtype, w.dim(), w.numel())
    assert (False, True) == (w.requires_grad, w.is_leaf)
    assert isinstance(nn.Parameter(w, requires_grad=False), nn.Parameter)
    assert offload.is_offloaded(w.detach())
    assert w is w.to("cpu")
    assert w.to("meta").is_meta


@pytest.mark.parametrize("taken", [lambda w: w[:4], lambda w: w.materialize()])
def test_17_results_do_not_share_memory_with_the_file(int8, taken):
    """A part of a quantized weight is a separate value of its class; changing it leaves the file alone."""
    w = offloaded(int8)
    part = taken(w)
    part.qdata.zero_()

    assert type(int8) is type(part)
    assert torch.equal(int8.dequantize(), w.dequantize())


def test_17_a_registered_subclass_computes_and_trains():
    """Autograd tracks a trainable value of another class."""
    code = """
        import contextlib, io, torch, offload
        from torch.testing._internal.two_tensor import TwoTensor
        offload.register_subclass(TwoTensor)
        two = TwoTensor(torch.ones(3), torch.full((3,), 2.0))
        w = torch.nn.Parameter(offload.OffloadedTensor.from_original_tensor(two, "w"))
        p = torch.nn.Parameter(two)
        x = w.detach().requires_grad_()
        torch.save(x, io.BytesIO())
        with contextlib.suppress(RuntimeError):  # a class without numpy
            x.numpy()
        assert not x._handle.base().requires_grad  # who looks at the value has one of his own
        for parameter in (w, p):
            (parameter * parameter).sum().backward()
        assert w.grad.a.tolist() == p.grad.a.tolist() == [2.0] * 3, w.grad
        assert w.grad.b.tolist() == p.grad.b.tolist() == [4.0] * 3, w.grad
        with torch.no_grad():
            assert w.add_(1) is w
        assert (w.materialize().a.tolist(), w.materialize().b.tolist()) == ([2.0] * 3, [3.0] * 3)
    """
    run_script(code)


# Memory and numbers


def test_24_our_files_are_aligned(tmp_path, plain):
    """To 4096; an unaligned entry of a checkpoint equals a plain tensor with the same alignment."""
    path = tmp_path / "shard.safetensors"
    safetensors.torch.save_file({"a": torch.ones(3, dtype=torch.int8), "w": torch.randn(33, 65)}, path)
    w = OffloadedTensor.from_file(path, "w")
    mapped = safetensors.torch.safe_open(path, "pt").get_tensor("w")
    x = torch.randn(5, 65)

    assert 0 == offloaded(plain).data_ptr() % 4096
    assert mapped.data_ptr() % 64 == w.data_ptr() % 64
    assert_equal(F.linear(x, mapped), F.linear(x, w))


def test_25_reading_leaves_no_copies_in_memory():
    """Ops on 64 MB of weights, each under 32 MB, used again and again."""
    code = """
        import torch, torch.nn.functional as F
        from offload import OffloadedTensor
        from offload.memory import anonymous_bytes
        weights = [OffloadedTensor.zeros((1024, 1024), name=f"w{i}") for i in range(16)]
        x = torch.ones(1, 1024)
        F.linear(x, weights[0]), weights[0].sum()  # torch's own first imports
        before = anonymous_bytes()
        for _ in range(3):
            for w in weights:
                F.linear(x, w).sum(), w.sum(), w[0] + 1
        print(anonymous_bytes() - before >> 20)
    """

    assert int(run_script(code)) <= 8


def test_26_a_graph_keeps_no_materialized_weights():
    """Eight layers of 8 MB, trained without `no_grad`: anonymous memory grows by less than one of them."""
    code = """
        import torch, torch.nn.functional as F
        from offload import OffloadedTensor
        from offload.memory import anonymous_bytes
        weights = [OffloadedTensor.zeros((1448, 1448), name=f"w{i}") for i in range(8)]
        x = torch.ones(1, 1448, requires_grad=True)
        F.linear(x, weights[0]).sum().backward()
        before = anonymous_bytes()
        y = x
        for w in weights:
            y = F.linear(y, w)
        held = anonymous_bytes() - before
        y.sum().backward()
        print(max(held, anonymous_bytes() - before) >> 20)
    """

    assert int(run_script(code)) < 8
