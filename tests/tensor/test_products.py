"""Products with packed weights, computed from the packed bytes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad
from torch.testing._internal.two_tensor import TwoTensor

import offload
from offload import OffloadedTensor
from offload.kernels import native
from offload.kernels.packed import NumberRows
from offload.storage.handle import Handle
from offload.storage.layout import contiguous
from offload.tensor import backends, picks, products
from offload.tensor.backends import most_rows_of, product_with
from offload.tensor.decoded import Decoded
from offload.tensor.recipes import Joined, Piece
from offload.tensor.runs import Decoder
from offload.tensor.views import handle_of, meta_of, view_spec_of
from offload.tensor.wrapper import wrap_handle
from tests.checkpoints.forms import FORMS, PROMPT, outcome
from tests.peak import Peak

pytestmark = [
    pytest.mark.fused,
    pytest.mark.skipif(native.library() is None, reason="the kernels were not built"),
    pytest.mark.filterwarnings("ignore:You passed `quantization_config`:UserWarning"),
]

TAKEN = [
    *("fp8-llama", "bnb-nf4", "bnb-int8", "ct-w4a16-asym", "ct-nvfp4a16", "gptq", "awq"),
    *("gguf-q8_0", "gguf-q4_k_m-bfloat16"),
]


@pytest.fixture(params=[name for name in TAKEN if name in FORMS])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> nn.Module:
    """A model whose linear weights are packed in a form."""
    form = FORMS[request.param]
    form.write(tmp_path)
    return offload.from_pretrained(tmp_path, **form.options)


def packed_layers(model: nn.Module) -> Iterator[tuple[nn.Linear, torch.Tensor]]:
    """Linear layers that the kernels take, with their weights in float32, as they were before they were rounded."""
    for module in model.modules():
        if isinstance(module, nn.Linear) and offload.is_offloaded(module.weight):
            weight = Piece(handle_of(module.weight), view_spec_of(module.weight))
            if products.runs_of(weight):
                yield module, unrounded(weight)


def most_rows(layer: nn.Linear) -> int:
    weight = Piece(handle_of(layer.weight), view_spec_of(layer.weight))
    return most_rows_of(products.runs_of(weight), layer.weight.dtype)


def unrounded(piece: Piece) -> torch.Tensor:
    return torch.cat([run.decoder.decode(*run.values()).float()[: run.count] for run in piece.runs()])


def activations(layer: nn.Linear, rows: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows)
    return torch.randn(rows, layer.in_features, generator=generator).to(layer.weight.dtype)


def test_the_error_of_a_product_is_at_most_that_with_the_dense_weight(model):
    layers = list(packed_layers(model))
    assert layers
    for layer, weight in layers:
        for rows in (1, 3, most_rows(layer)):
            x = activations(layer, rows)
            true = F.linear(x.double(), weight.double(), None if layer.bias is None else layer.bias.double())
            with torch.no_grad():
                fused = (layer(x).double() - true).abs()
                with offload.exact():
                    exact = (layer(x).double() - true).abs()

            unit = torch.finfo(x.dtype).eps * true.abs().max()  # of the last rounding, which both have
            assert fused.max() <= exact.max() + unit / 2
            assert fused.mean() <= exact.mean() + unit / 100


def test_a_row_of_a_product_does_not_depend_on_the_rows_beside_it(model):
    for layer, _ in packed_layers(model):
        x = activations(layer, most_rows(layer))
        with torch.no_grad():
            expected = torch.cat([layer(row[None]) for row in x])

            assert torch.equal(expected, layer(x))
            assert torch.equal(expected[:3].view(1, 3, -1), layer(x[:3].view(1, 3, -1)))


def test_exact_products_are_those_with_the_dense_weight_bit_for_bit(model):
    for layer, _ in packed_layers(model):
        dense = layer.weight.materialize()
        for rows in (1, most_rows(layer), most_rows(layer) + 1):
            x = activations(layer, rows)
            expected = F.linear(x, dense, layer.bias)

            with torch.no_grad(), offload.exact():
                assert torch.equal(expected, layer(x))
    with torch.no_grad():
        assert torch.equal(expected, layer(x))  # with more rows, the dense weight is used in any case


@pytest.mark.parametrize("name", ["bnb-nf4", "gguf-q4_k_m"])
def test_a_model_that_is_loaded_as_exact_is_so_in_every_thread(name, tmp_path):
    form = FORMS[name]
    form.write(tmp_path)
    expected = outcome(form.plain(tmp_path))

    model = offload.from_pretrained(tmp_path, exact=True, **form.options)
    found = list(offload.map_batches(lambda batch: model(batch).logits, [PROMPT, PROMPT], model))

    assert torch.equal(expected.logits, outcome(model).logits)
    assert all(torch.equal(expected.logits, logits) for logits in found)


def test_gradients_flow_through_fused_products(model):
    layer, weight = next(packed_layers(model))
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    x = activations(layer, 3).requires_grad_()

    layer(x).sum().backward()

    torch.testing.assert_close(
        weight.sum(0).expand(3, -1), x.grad.float(), rtol=0.02, atol=0.02 * float(weight.sum(0).abs().max())
    )


def test_rows_of_a_weight_are_multiplied_as_rows(model):
    for layer, weight in packed_layers(model):
        x, half = activations(layer, 2), len(weight) // 2
        with torch.no_grad():
            whole = F.linear(x, layer.weight, layer.bias)
            upper = F.linear(x, layer.weight[half:], None if layer.bias is None else layer.bias[half:])
            turned = x @ layer.weight.t()

        torch.testing.assert_close(whole[:, half:], upper, rtol=0.02, atol=0.02 * float(whole.abs().max()))
        torch.testing.assert_close(F.linear(x, layer.weight), turned, rtol=0.02, atol=0.02 * float(whole.abs().max()))


def test_rows_that_are_picked_are_decoded_alone_and_at_once(model, monkeypatch):
    """Those of the dense weight, bit for bit; of a weight and of a part of it."""
    picked: list[int] = []
    pick = native.pick
    monkeypatch.setattr(
        native, "pick", lambda matrix, rows, place: (picked.append(len(rows)), pick(matrix, rows, place))
    )
    layers = [layer for layer, _ in packed_layers(model)]
    for weight in [layer.weight.detach() for layer in layers]:
        dense, rows = weight.materialize(), torch.tensor([[7, 2], [2, 9]])

        assert torch.equal(dense[rows], F.embedding(rows, weight))
        assert torch.equal(dense[8:][rows], weight[8:][rows])
        assert torch.equal(dense[rows[0]], weight.index_select(0, rows[0]))
    assert [3, 3, 2] * len(layers) == picked
    assert layers


KINDS = {
    "a wrapper of two tensors": lambda x: TwoTensor(x, x.clone()),
    "a subclass": lambda x: x.as_subclass(type("Named", (torch.Tensor,), {})),
    "sparse": lambda x: x.to_sparse(),
    "of mkldnn": lambda x: x.to_mkldnn(),
    "nested": lambda x: torch.nested.nested_tensor([x, x[:1]]),
    "jagged": lambda x: torch.nested.nested_tensor([x, x[:1]], layout=torch.jagged),
}


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_activations_of_other_kinds_are_multiplied_by_torch(kind, tmp_path):
    """Their address is not that of numbers: it may be null."""
    FORMS["gguf-q8_0"].write(tmp_path)
    layer, _ = next(packed_layers(offload.from_pretrained(tmp_path, **FORMS["gguf-q8_0"].options)))
    dense = layer.weight.materialize()
    x, bias = KINDS[kind](activations(layer, 3)), torch.ones(len(dense))
    given = [(x, None), (x, bias)] if kind != "sparse" else [(x, None)]  # torch has no sum of both
    if kind == "a wrapper of two tensors":
        given.append((activations(layer, 3), KINDS[kind](bias)))

    for one, added in given:
        expected, found = F.linear(one, dense, added), F.linear(one, layer.weight, added)
        for ours, plain in zip(parts_of_kind(found), parts_of_kind(expected), strict=True):
            torch.testing.assert_close(plain, ours)


def parts_of_kind(x: torch.Tensor) -> list[torch.Tensor]:
    if isinstance(x, TwoTensor):
        return [x.a, x.b]
    return [*x.unbind()] if x.is_nested else [x.to_dense() if x.layout != torch.strided else x]


def backward_of_linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    x = x.clone().requires_grad_()
    out = F.linear(x, weight)
    out.backward(out.detach())
    assert x.grad is not None
    return x.grad


IN_PARTS = {
    "linear": F.linear,
    "linear, of a bias": lambda x, weight: F.linear(x, weight, x.new_ones(len(weight))),
    "matmul": lambda x, weight: x @ weight.t(),
    "addmm": lambda x, weight: torch.addmm(x.new_ones(len(weight)), x, weight.t()),
    "backward": backward_of_linear,
}


@pytest.mark.parametrize("name", IN_PARTS)
def test_a_dense_weight_that_is_larger_than_the_budget_is_not_in_memory_as_a_whole(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A table of a GGUF file, 41 MB dense in float32, in products with more rows than the kernels take."""
    monkeypatch.setattr(products, "_PART", 1 << 20)
    weight = packed_table(tmp_path, rows=40_000, columns=256)
    dense = weight.materialize()
    multiply, x = (
        IN_PARTS[name],
        torch.randn(native.most_rows(torch.float32) + 1, 256, generator=torch.Generator().manual_seed(0)),
    )
    expected = multiply(x, dense)

    with offload.set_max_memory("1MiB"):
        with Peak() as peak:
            found = multiply(x, weight)
        with offload.exact():
            exact = multiply(x, weight)

    assert peak.nbytes < 10 << 20
    assert torch.equal(expected, exact)
    torch.testing.assert_close(expected, found, rtol=1e-5, atol=1e-6 * float(expected.abs().max()))


def packed_table(folder: Path, rows: int, columns: int) -> Any:
    """A matrix in blocks of a GGUF file."""
    import gguf
    import numpy as np

    kind = gguf.GGMLQuantizationType.Q8_0
    values = np.random.default_rng(0).standard_normal((rows, columns), dtype=np.float32)
    writer = gguf.GGUFWriter(folder / "table.gguf", "llama")
    writer.add_tensor("table", gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return offload.load_file(folder / "table.gguf")["table"]


def test_c_does_what_it_supports_and_torch_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoded and picked rows have the bits of torch's chain."""
    found, taken = [], []
    choose = backends.choose
    for module in (backends, products, picks):
        monkeypatch.setattr(module, "choose", lambda *asked: taken.append((asked[0], choose(*asked))) or choose(*asked))
    for backend in (backends.COMPILED, backends.CHAIN):
        table = packed_table(tmp_path, rows=40, columns=1024)
        monkeypatch.setattr(native, "library", native.library if backend is backends.COMPILED else lambda: None)
        taken.clear()
        found.append([table.materialize(), table[[3, 39, 3]]])
        F.linear(torch.ones(1, 1024), table)

        assert {("decode", backend), ("pick", backend), ("multiply", backend)} <= set(taken)
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("is_inference", [False, True], ids=["with gradients", "without"])
def test_forward_derivatives_through_packed_weights_are_those_of_the_dense_weight(model, is_inference):
    """A weight that requires no grad is no part of any graph: its product has a tangent all the same."""
    layer = next(packed_layers(model))[0]
    layer.weight.requires_grad_(not is_inference)
    dense, x, along = layer.weight.materialize(), activations(layer, 2), activations(layer, 3)[:2]

    def product(one):
        return F.linear(one, layer.weight)

    expected = F.linear(along, dense)
    with torch.set_grad_enabled(not is_inference):
        assert torch.equal(expected, torch.func.jvp(product, (x,), (along,))[1])
        assert torch.equal(dense, torch.func.jacfwd(product)(x[0]))
        with forward_ad.dual_level():
            found = product(forward_ad.make_dual(x, along))

            assert torch.equal(F.linear(x, dense), found)
            assert torch.equal(expected, forward_ad.unpack_dual(found).tangent)


def stacks(model: nn.Module) -> Iterator[torch.Tensor]:
    """The experts of a model: (experts, inputs, outputs) each."""
    for module in model.modules():
        for name, stack in module.named_parameters(recurse=False):
            if stack.dim() == 3 and offload.is_offloaded(stack):
                yield stack if module.is_transposed else stack.transpose(-2, -1)
                assert name.endswith("_proj")


@pytest.mark.parametrize("name", ["fp8-qwen3_moe", "mxfp4-gpt_oss", "gguf-qwen3_moe"])
def test_experts_are_multiplied_where_their_pieces_lie(name, tmp_path, monkeypatch):
    form = FORMS[name]
    form.write(tmp_path)
    model = offload.from_pretrained(tmp_path, **form.options)
    found = 0
    for stack in stacks(model):
        found += 1
        dtype, dense = stack.dtype, stack.materialize()
        counts = torch.tensor([2, 0, native.most_rows(dtype), 1])
        ends = counts.cumsum(0, dtype=torch.int32)
        x = torch.randn(int(ends[-1]), stack.shape[1], generator=torch.Generator().manual_seed(found)).to(dtype)
        with torch.no_grad(), offload.exact():
            exact = F.grouped_mm(x, stack, offs=ends)
        assert torch.equal(F.grouped_mm(x, dense, offs=ends), exact)
        with monkeypatch.context() as patch, torch.no_grad():
            patch.setattr(backends.Compiled, "decode", lambda *_: pytest.fail("decoded"))
            fused = F.grouped_mm(x, stack, offs=ends)
            alone = F.grouped_mm(x[-1:], stack, offs=torch.tensor([0, 0, 0, 1], dtype=torch.int32))

        assert torch.equal(alone, fused[-1:])
        true = [some.double() @ matrix.double() for some, matrix in zip(x.split(counts.tolist()), dense, strict=True)]
        size = x.double().abs() @ dense.double().abs().amax(0)
        error = (fused.double() - torch.cat(true)).abs() / size
        assert error.max() <= torch.finfo(dtype).eps
    assert found


def scaled(numbers: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return numbers.float() * scales


@pytest.mark.parametrize("dense_too", [False, True])
def test_rows_that_alternate_are_multiplied_in_their_order(dense_too, tmp_path):
    """Rows 0, 2, 4... come first: the cut of the stored value that has them can't be flattened."""
    offloaded = OffloadedTensor.from_original_tensor
    dense = torch.randn(64, 32)
    if dense_too:
        stored = handle_of(offloaded(dense, "dense", tmp_path))
    else:
        numbers, scales = dense.to(torch.float8_e4m3fn), torch.rand(64, 1)
        dense = scaled(numbers, scales)
        pieces = [Piece(handle_of(offloaded(one, name, tmp_path))) for name, one in (("n", numbers), ("s", scales))]
        decoder = Decoder(scaled, (1, 1), packed=NumberRows("e4m3"))
        recipe = Decoded(contiguous(torch.float32, (64, 32)), decoder, pieces)
        stored = Handle.compose(recipe, "packed")
    alternate = Piece(stored, meta_of(stored).view(32, 2, 32).transpose(0, 1))
    handle = Handle.compose(Joined(contiguous(torch.float32, (2, 32, 32)), [alternate], [(0, 0, 0)]), "stack")

    runs = products.runs_of(Piece(handle, meta_of(handle).view(64, 32)), dense_too=dense_too)

    x, wanted = torch.randn(1, 32), torch.cat([dense[0::2], dense[1::2]])
    if not runs:  # packed rows are not taken apart
        assert not dense_too
        found = F.linear(x, wrap_handle(handle, torch.device("cpu")).view(64, 32))
    else:
        assert [32, 32] == [run.count for run in runs]
        found = torch.empty(1, 64)
        product_with(runs, [run.values() for run in runs]).into(x, None, found)
    torch.testing.assert_close(F.linear(x, wanted), found)
