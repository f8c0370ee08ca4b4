"""What is kept of a value is never stale: a small one that was computed, a product or a pick that was made ready."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode

import offload
from offload import OffloadedTensor, budget
from offload.errors import ChangedFileError, MissingFileError
from offload.kernels import native
from offload.storage.file import TensorFile
from offload.storage.handle import Handle
from offload.storage.layout import contiguous
from offload.tensor import bound, products, recipes, small
from offload.tensor.bound import BoundWeight
from offload.tensor.products import compute_exactly
from offload.tensor.recipes import Joined, Piece, stored_in
from offload.tensor.views import handle_of
from offload.tensor.wrapper import wrap_handle
from tests.checkpoints.forms import FORMS
from tests.engines import Clock
from tests.processes import in_fork

pytestmark = [
    pytest.mark.fused,
    pytest.mark.usefixtures("still_clock"),
    pytest.mark.skipif(native.library() is None, reason="the kernels were not built"),
    pytest.mark.filterwarnings("ignore:You passed `quantization_config`:UserWarning"),
]

BOUND = ("fp8-llama", "bnb-int8", "ct-w4a16", "gptq", "gguf-q8_0", "gguf-q4_k_m-bfloat16")


def loaded(form: str, folder: Path) -> nn.Module:
    FORMS[form].write(folder)
    return offload.from_pretrained(folder, **FORMS[form].options)


def multiplied_layers(model: nn.Module) -> Iterator[nn.Linear]:
    for module in model.modules():
        if isinstance(module, nn.Linear) and offload.is_offloaded(module.weight):
            with torch.no_grad():
                module(activations(module))
            if getattr(module.weight._bound, "product", None) is not None:
                yield module


def activations(layer: nn.Linear, rows: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows)
    return torch.randn(rows, layer.in_features, generator=generator).to(layer.weight.dtype)


@pytest.fixture
def layer(tmp_path: Path) -> Iterator[nn.Linear]:
    """One whose product is ready."""
    with torch.no_grad():
        yield next(multiplied_layers(loaded("gguf-q8_0", tmp_path)))


@pytest.fixture
def weight(layer: nn.Linear) -> OffloadedTensor:
    return layer.weight  # type: ignore[return-value]


@pytest.fixture
def x(layer: nn.Linear) -> torch.Tensor:
    return activations(layer)


def unbound(x: torch.Tensor, weight: OffloadedTensor, bias: Any = None) -> torch.Tensor:
    """The product, made anew."""
    weight._bound = None
    return F.linear(x, weight, bias)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The ways that products take from now on."""
    ways: list[str] = []
    multiply, other = BoundWeight.multiply, products._product_with_rows

    def way(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = multiply(self, *args, **kwargs)
        ways.extend(["bound"] if found is not None else [])
        return found

    monkeypatch.setattr(BoundWeight, "multiply", way)
    monkeypatch.setattr(products, "_product_with_rows", lambda *args: (ways.append("anew"), other(*args))[1])
    return ways


@pytest.mark.parametrize("form", [name for name in BOUND if name in FORMS])
def test_a_bound_product_has_the_bits_of_another_one(form: str, tmp_path: Path, calls: list[str]) -> None:
    """And all that its weight is made of is watched, also scales that are computed, and kept."""
    layers = list(multiplied_layers(loaded(form, tmp_path)))
    assert len(layers) > 3

    for layer in layers:
        assert {*stored_in([handle_of(layer.weight)])} == {handle for handle, *_ in layer.weight._bound._watched}
        bias = activations(nn.Linear(layer.out_features, 1))[0].to(layer.weight.dtype)
        for given in (activations(layer), activations(layer, 3), activations(layer, 4).view(2, 2, -1)):
            for added in (None, bias):
                calls.clear()
                with torch.no_grad():
                    found = F.linear(given, layer.weight, added)
                    assert calls == ["bound"]
                    expected = unbound(given, layer.weight, added)
                    F.linear(given, layer.weight)
                assert torch.equal(expected, found)


@pytest.mark.parametrize("grad", [True, False])
def test_a_bias_of_another_kind_is_treated_as_without_a_bound_product(
    weight: OffloadedTensor, x: torch.Tensor, calls: list[str], grad: bool
) -> None:
    weight.requires_grad_(False)
    bias = TwoTensor(torch.ones(len(weight)), torch.ones(len(weight)))
    with torch.set_grad_enabled(grad):
        assert torch.equal(F.linear(x, weight.materialize(), bias).a, F.linear(x, weight, bias).a)
        for wrong in ([1.0], 3):
            with pytest.raises(TypeError):
                F.linear(x, weight, wrong)
        with pytest.raises(TypeError):
            F.linear(x, weight, None, None)

    assert "bound" not in calls


def test_a_piece_that_has_another_source_is_noticed(weight: OffloadedTensor, x: torch.Tensor) -> None:
    """As after a write to the tensor that it is, which switches that one to a file of its own."""
    F.linear(x, weight)
    known = weight._bound
    assert known is not None
    assert known.multiply(x, weight) is not None
    handle = next(stored_in([handle_of(weight)]))
    handle.set_source(copy.copy(handle.source))

    assert known.multiply(x, weight) is None


def test_exact_products_are_those_with_the_dense_weight(weight: OffloadedTensor, x: torch.Tensor) -> None:
    with offload.exact():
        found = F.linear(x, weight)

    assert torch.equal(F.linear(x, weight.materialize()), found)


class Seen(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [Seen, lambda: torch.autocast("cpu", torch.float16)])
def test_modes_see_the_ops_that_they_see_without_a_bound_product(
    weight: OffloadedTensor, x: torch.Tensor, calls: list[str], mode: Callable[[], Any]
) -> None:
    with mode():
        expected = F.linear(x, weight.materialize())
        found = F.linear(x, weight)

    assert "bound" not in calls
    assert expected.dtype == found.dtype
    torch.testing.assert_close(expected, found, atol=1e-2, rtol=1e-2)


def test_fake_tensors_have_fake_products(weight: OffloadedTensor, x: torch.Tensor) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        found = F.linear(mode.from_tensor(x), weight)

    assert (1, len(weight)) == found.shape


def test_products_that_autograd_and_transforms_follow_are_not_bound(
    weight: OffloadedTensor, x: torch.Tensor, calls: list[str]
) -> None:
    dense = weight.materialize()
    with torch.enable_grad():
        given = x.clone().requires_grad_()
        F.linear(given, weight).sum().backward()
    assert torch.equal(torch.ones(1, len(dense)) @ dense, given.grad)
    with forward_ad.dual_level():
        found = forward_ad.unpack_dual(F.linear(forward_ad.make_dual(x, x), weight))
        assert torch.equal(F.linear(x, dense), found.tangent)
    torch.func.vmap(lambda row: F.linear(row, weight))(x)

    assert "bound" not in calls


def test_a_frozen_weight_is_bound_where_gradients_are_enabled(layer: nn.Linear, x: torch.Tensor, calls: Any) -> None:
    layer.requires_grad_(False)
    with torch.enable_grad():
        assert not layer(x).requires_grad
        assert ["bound"] == calls
        layer.requires_grad_(True)
        assert layer(x).requires_grad


@pytest.mark.parametrize(
    "other",
    [
        lambda x: x.double(),
        lambda x: x[:, :-1],
        lambda x: x.expand(native.MOST_ROWS + 1, -1),
        lambda x: x.to_sparse(),
        lambda x: x[:0],
    ],
    ids=["another dtype", "another width", "too many rows", "sparse", "no rows"],
)
def test_other_activations_are_treated_as_without_a_bound_product(
    weight: OffloadedTensor, x: torch.Tensor, other: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    def outcome(with_weight: torch.Tensor) -> Any:
        try:
            return F.linear(other(x), with_weight)
        except RuntimeError as error:
            return str(error)

    expected, found = outcome(weight.materialize()), outcome(weight)

    assert expected == found if isinstance(expected, str) else torch.equal(expected, found)


@pytest.mark.parametrize("other", [lambda x: x.t().contiguous().t(), lambda x: x.neg()._neg_view(), lambda x: x[::2]])
def test_activations_that_lie_otherwise_have_the_same_products(
    weight: OffloadedTensor, layer: nn.Linear, other: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    given = other(activations(layer, 4))

    assert torch.equal(F.linear(given.resolve_neg().contiguous(), weight), F.linear(given, weight))


def test_swapped_tensors_have_the_products_of_their_values(weight: OffloadedTensor, x: torch.Tensor) -> None:
    expected, other = F.linear(x, weight), torch.ones(weight.shape)
    torch.utils.swap_tensors(weight, other)

    assert torch.equal(expected, F.linear(x, other))
    assert torch.equal(F.linear(x, torch.ones(weight.shape)), F.linear(x, weight))


# Rows that are picked from a bound table


@pytest.fixture
def table(tmp_path: Path) -> Iterator[OffloadedTensor]:
    """An embedding that is bound."""
    with torch.no_grad():
        table = loaded("gguf-q8_0", tmp_path).get_input_embeddings().weight  # type: ignore[operator]
        F.embedding(torch.tensor([0]), table)
        assert table._bound.product is not None
        yield table


@pytest.mark.parametrize("rows", [torch.tensor([[3]]), torch.tensor([5, 1, 5]), torch.tensor(2), torch.empty(0).long()])
def test_rows_of_a_bound_table_are_those_of_the_value(table: OffloadedTensor, rows: torch.Tensor) -> None:
    expected = F.embedding(rows, table.materialize())

    assert torch.equal(expected, table._bound.pick(rows, table))
    assert torch.equal(expected, F.embedding(rows, table))
    with torch.inference_mode():
        assert F.embedding(rows, table).is_inference()


@pytest.mark.parametrize(
    ("rows", "options"),
    [
        (torch.tensor([10_000_000]), {}),
        (torch.tensor([-1]), {}),
        (torch.tensor([1]), {"padding_idx": 10_000_000}),
        (torch.tensor([1, 0]), {"padding_idx": 1}),
        (torch.tensor([1], dtype=torch.int32), {}),
        (torch.tensor([1.0]), {}),
        (torch.arange(native.MOST_ROWS + 1) % 7, {}),
        (torch.tensor([[1, 2], [3, 4]]).t(), {}),
        (torch.tensor([1], device="meta"), {}),
    ],
)
def test_other_picks_end_as_with_the_dense_table(table: OffloadedTensor, rows: torch.Tensor, options: Any) -> None:
    def outcome(of: torch.Tensor) -> Any:
        try:
            return F.embedding(rows, of, **options)
        except (RuntimeError, IndexError, AssertionError) as error:
            return type(error)

    expected, found = outcome(table.materialize()), outcome(table)

    assert expected is found if isinstance(expected, type) else torch.equal(expected, found) or rows.is_meta


def test_a_pick_reads_no_other_rows(table: OffloadedTensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table is neither read as a whole nor counted as such."""
    asked: list[list[int]] = []
    prefetch = bound.prefetch_rows
    monkeypatch.setattr(bound, "has_rows_here", lambda handle: False)
    monkeypatch.setattr(bound, "prefetch_rows", lambda *given: (asked.append(given[2].tolist()), prefetch(*given)))
    monkeypatch.setattr(bound, "ensure_resident", lambda *given: pytest.fail("all of it is read"))

    F.embedding(torch.tensor([3, 1]), table)

    assert [[3, 1]] == asked


def test_modes_and_graphs_see_a_pick(table: OffloadedTensor, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, expected = torch.tensor([3]), table.materialize()[[3]]
    monkeypatch.setattr(bound, "pick", lambda *_: pytest.fail("it is picked past them"))
    with Seen():
        assert torch.equal(expected, F.embedding(rows, table))
    with torch.enable_grad():
        table.requires_grad_()
        F.embedding(rows, table).sum().backward()

    assert 1 == table.grad[3, 0]
    assert not table.grad[2].any()


# Small values that are computed from others


WIDTH = 48


class Scaled(nn.Module):
    """A norm and a scale, which are stored in another dtype than they are wanted in."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.Parameter(torch.empty(WIDTH, dtype=torch.bfloat16), requires_grad=False)
        self.scale = nn.Parameter(torch.empty(2, WIDTH, dtype=torch.bfloat16), requires_grad=False)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    path = tmp_path / "model.safetensors"
    save_file({"norm": torch.randn(WIDTH), "scale": torch.randn(2, WIDTH)}, path)
    return path


def scaled_of(file: Path, dtype: torch.dtype = torch.bfloat16) -> Scaled:
    return offload.load_checkpoint_and_dispatch(Scaled().to(dtype), file, device_map="disk", dtype=dtype)


@pytest.fixture
def scaled(file: Path) -> Scaled:
    return scaled_of(file)


@pytest.fixture
def norm(scaled: Scaled) -> OffloadedTensor:
    assert handle_of(scaled.norm).composed is not None
    return scaled.norm  # type: ignore[return-value]


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of pieces that values are computed from, each time."""
    names, put = [], Piece.put
    monkeypatch.setattr(Piece, "put", lambda piece, *given: (names.append(piece.handle.name), put(piece, *given)))
    return names


def test_a_small_value_is_computed_once_for_all_its_ops_and_views(scaled: Scaled, computed: list[str]) -> None:
    expected = scaled.scale.materialize()  # type: ignore[operator]

    for _ in range(3):
        assert torch.equal(expected * 2, scaled.scale * 2)
        assert torch.equal(expected[1] + expected[0], scaled.scale[1] + scaled.scale[0])
        assert torch.equal(expected.t().contiguous(), scaled.scale.t().contiguous())

    assert ["scale"] == computed


def test_a_large_value_is_computed_at_each_use(scaled: Scaled, computed: list[str], monkeypatch: Any) -> None:
    monkeypatch.setattr(recipes, "SMALL", WIDTH)
    again = recipes.Joined(handle_of(scaled.norm).layout, handle_of(scaled.norm).composed.pieces, [(0,)])  # type: ignore

    assert again.small is None
    assert torch.equal(again.value(), again.value())
    assert ["norm", "norm"] == computed


@pytest.mark.parametrize("is_owned", [True, False])
def test_a_write_to_a_source_is_seen(file: Path, is_owned: bool) -> None:
    """Recipes of checkpoints have sources of their own; of others, this one's are not kept, or followed."""
    w = OffloadedTensor.from_file(file, "norm")
    if is_owned:
        w = OffloadedTensor.from_original_tensor(w.materialize(), "w")
    recipe = Handle.compose(Joined(contiguous(torch.float16, (WIDTH,)), [Piece(handle_of(w))], [(0,)]), "w")
    cast = wrap_handle(recipe, torch.device("cpu"))
    assert all(torch.equal(w.materialize().half() + 1, cast + 1) for _ in range(2))  # its file was looked at

    w.mul_(3)

    assert torch.equal(w.materialize().half() + 1, cast + 1)


def test_an_array_of_a_small_value_can_not_be_written_to(file: Path) -> None:
    array = scaled_of(file, torch.float16).norm.numpy()

    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1


def test_the_next_op_does_not_see_a_write_to_a_guest(norm: OffloadedTensor) -> None:
    """As compiled code does, which is given the memory itself."""
    expected = norm.materialize()
    norm._guest.zero_()

    assert torch.equal(expected, norm.materialize())


def test_results_do_not_share_the_memory_of_a_small_value(norm: OffloadedTensor) -> None:
    expected = norm.materialize()
    for result in (norm.materialize(), norm.clone(), norm.contiguous(), norm.to(torch.bfloat16), norm.reshape(-1)):
        result.detach().zero_() if type(result) is torch.Tensor else None

    assert torch.equal(expected, norm.materialize())


def test_small_values_take_a_bounded_amount_of_memory(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small.SMALL_VALUES.release()
    monkeypatch.setattr(small, "_ALL", 10 * 2 * WIDTH)
    layers: list[Scaled] = []
    for _ in range(30):
        layers.append(scaled_of(file))
        _ = layers[-1].norm + 1

        assert small.SMALL_VALUES.nbytes() <= 10 * 2 * WIDTH

    assert all(torch.equal(layers[0].norm + 1, scaled.norm + 1) for scaled in layers)


def test_memory_of_a_small_value_goes_with_its_tensor(file: Path) -> None:
    small.SMALL_VALUES.release()
    scaled = scaled_of(file)
    _ = scaled.norm + 1
    assert 2 * WIDTH == small.SMALL_VALUES.nbytes()
    del scaled

    assert 0 == small.SMALL_VALUES.nbytes()


def test_a_value_that_inference_mode_computed_can_be_used_by_autograd(norm: OffloadedTensor) -> None:
    with torch.inference_mode():
        _ = norm + 1
    x = torch.ones(WIDTH, dtype=torch.bfloat16, requires_grad=True)
    (x * norm).sum().backward()

    assert torch.equal(norm.materialize(), x.grad)  # type: ignore[arg-type]


# What all that is kept has in common


class Kept(NamedTuple):
    """A tensor of which something is kept, and what it is kept for."""

    tensor: OffloadedTensor
    use: Callable[[torch.Tensor], torch.Tensor]


@pytest.fixture(params=["a small value", "a product", "picked rows"])
def kept(request: pytest.FixtureRequest) -> Iterator[Kept]:
    """One that was used twice."""
    if request.param == "a small value":
        made = Kept(request.getfixturevalue("norm"), lambda one: one + 1)
    elif request.param == "a product":
        weight, x = request.getfixturevalue("weight"), request.getfixturevalue("x")
        made = Kept(weight, lambda one: F.linear(x, one))
    else:
        made = Kept(request.getfixturevalue("table"), lambda one: F.embedding(torch.tensor([3, 1]), one))
    with torch.no_grad():
        made.use(made.tensor), made.use(made.tensor)
        yield made


CHANGES: dict[str, Callable[[OffloadedTensor], object]] = {
    "another value": lambda one: one.update_values(torch.ones_like(one)),
    "written": lambda one: one.mul_(2),
    "a part written": lambda one: one.view(-1)[0].fill_(3),
    "other data": lambda one: setattr(one, "data", torch.zeros_like(one)),
    "other packed data": lambda one: setattr(one, "data", one.t()),
    "turned": torch.Tensor.t_,
    "exact": lambda one: compute_exactly(handle_of(one)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_another_value_is_seen_by_the_next_use(kept: Kept, change: str) -> None:
    CHANGES[change](kept.tensor)

    assert torch.equal(kept.use(kept.tensor.materialize()), kept.use(kept.tensor))


@pytest.mark.parametrize("is_there", [True, False])
def test_another_file_is_noticed_after_a_tenth_of_a_second(kept: Kept, still_clock: Clock, is_there: bool) -> None:
    expected, file = kept.use(kept.tensor), kept.tensor.offload_path
    text = file.read_bytes()
    file.unlink()
    if is_there:
        file.write_bytes(text[:-1] + bytes([text[-1] ^ 1]))
        os.utime(file, ns=(1, 1))

    assert torch.equal(expected, kept.use(kept.tensor))
    still_clock.time += 0.11
    with pytest.raises(ChangedFileError if is_there else MissingFileError, match=file.name):
        kept.use(kept.tensor)


def test_a_file_is_looked_at_ten_times_a_second_at_most(
    kept: Kept, still_clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[Path] = []
    check = TensorFile.check
    monkeypatch.setattr(TensorFile, "check", lambda file: (looks.append(file.path), check(file)))

    for _ in range(100):
        still_clock.time += 0.01
        kept.use(kept.tensor)

    assert 9 <= len(looks) <= 10


@pytest.mark.parametrize("ask", [budget.evict, lambda _: offload.set_max_memory(0)])
def test_kept_memory_goes_when_it_is_asked_back(kept: Kept, ask: Callable[[Any], Any]) -> None:
    expected, product = kept.use(kept.tensor), kept.tensor._bound
    undo = ask(kept.tensor)

    assert 0 == offload.memory_summary().computed
    assert all(torch.equal(expected, kept.use(kept.tensor)) for _ in range(2))
    assert product is None or product is not kept.tensor._bound  # it refers to such memory
    if undo is not None:
        undo.close()


def test_copies_and_other_processes_keep_for_themselves(kept: Kept) -> None:
    tensor, use, expected = *kept, kept.use(kept.tensor)

    for other in (copy.deepcopy(tensor), ForkingPickler.loads(ForkingPickler.dumps(tensor)), tensor.detach()):
        assert torch.equal(expected, use(other))
        other.data = torch.zeros_like(tensor)
        assert torch.equal(use(torch.zeros(tensor.shape, dtype=tensor.dtype)), use(other))
    ones = torch.ones(tensor.shape, dtype=tensor.dtype)
    assert in_fork(lambda: torch.equal(expected, use(tensor)))
    assert torch.equal(expected, use(tensor))
    tensor.update_values(ones)
    assert in_fork(lambda: torch.equal(use(ones), use(tensor)))


def test_threads_see_the_old_value_or_the_new_one(kept: Kept) -> None:
    tensor, use = kept
    news = [torch.full(tensor.shape, number, dtype=tensor.dtype) for number in (1.0, 0.0)]
    values, wrong = [use(tensor), *map(use, news)], []

    def act() -> None:
        with torch.no_grad():
            for _ in range(200):
                found = use(tensor)
                wrong.extend([] if any(torch.equal(found, one) for one in values) else [found])

    with ThreadPoolExecutor(3) as pool:
        running = [pool.submit(act) for _ in range(3)]
        for new in news:
            small.SMALL_VALUES.release()
            tensor.update_values(new)
        assert all(one.result() is None for one in running)

    assert not wrong
    assert torch.equal(values[-1], use(tensor))
