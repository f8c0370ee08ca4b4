"""Values computed from others when they are read are bit-identical to plain tensors, and so are ops on them."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import contents
from safetensors.torch import load_file, save_file
from torch import nn
from torch._subclasses import FakeTensorMode

import offload
from offload import OffloadedTensor, memory
from offload.errors import ChangedFileError, MissingFileError
from offload.prefetch import scratch
from offload.prefetch.engine import track
from offload.storage.handle import Access, Handle
from offload.storage.layout import contiguous
from offload.tensor import backends
from offload.tensor.decoded import Decoded
from offload.tensor.deferred import DeferredTensor, deferred
from offload.tensor.guests import CPU
from offload.tensor.recipes import Piece, Plain, Recipe
from offload.tensor.runs import Decoder
from offload.tensor.views import handle_of, meta_of
from offload.tensor.wrapper import wrap_handle

MIB = 1 << 20

EXPERTS, INNER, WIDTH = 4, 12, 20
ROWS, GRANULE = 65, 10


def decode(packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Ten rows share a scale per column."""
    return packed.float() * scales.repeat_interleave(GRANULE, 0)[: len(packed)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    random.seed(0)
    (tmp_path / "checkpoint").mkdir()
    save_file(
        {
            **{f"{name}{expert}": torch.randn(INNER, WIDTH) for expert in range(EXPERTS) for name in ("gate", "up")},
            "packed": torch.randint(-128, 127, (ROWS, 16), dtype=torch.int8),
            "scales": torch.rand(-(-ROWS // GRANULE), 16),
        },
        tmp_path / "checkpoint" / "model.safetensors",
    )
    return tmp_path / "checkpoint"


@pytest.fixture(autouse=True)
def is_kept(request: pytest.FixtureRequest) -> None:
    """Whether small values, which these are, are kept."""
    if not getattr(request, "param", False):
        request.getfixturevalue("nothing_small")


@pytest.fixture(params=["joined", "uneven", "cast", "decoded", "decoded, joined, cast", "turned"])
def both(request: pytest.FixtureRequest, folder: Path, is_kept: None) -> tuple[OffloadedTensor, torch.Tensor]:
    """A recipe, and the equivalent plain tensor."""
    return made(request.param, folder)


@pytest.fixture
def recipe(both: tuple[OffloadedTensor, torch.Tensor]) -> OffloadedTensor:
    return both[0]


@pytest.fixture
def plain(both: tuple[OffloadedTensor, torch.Tensor]) -> torch.Tensor:
    return both[1]


def made(kind: str, folder: Path) -> tuple[OffloadedTensor, torch.Tensor]:
    stored, numbers = offload.load_file(folder), load_file(folder / "model.safetensors")
    if "decoded" in kind:
        value, expected = decoded(stored["packed"], stored["scales"]), decode(numbers["packed"], numbers["scales"])
        if kind != "decoded":
            value = torch.cat([deferred(value), deferred(value)[7:40]]).bfloat16().stored("w")  # type: ignore[attr-defined]
            expected = torch.cat([expected, expected[7:40]]).bfloat16()
        return value, expected
    join = uneven if kind == "uneven" else fused
    waiting, expected = (join(some) for some in ({name: deferred(one) for name, one in stored.items()}, numbers))
    if kind == "cast":
        waiting, expected = waiting.half(), expected.half()
    if kind == "turned":
        waiting, expected = (one.transpose(0, 2).contiguous() for one in (waiting, expected))
    return waiting.stored("w"), expected  # type: ignore[attr-defined]


def decoded(packed: OffloadedTensor, scales: OffloadedTensor) -> OffloadedTensor:
    pieces = [Piece(handle_of(packed)), Piece(handle_of(scales))]
    layout = contiguous(torch.float32, tuple(packed.shape))
    return wrap_handle(Handle.compose(Decoded(layout, Decoder(decode, (GRANULE, 1), GRANULE), pieces), "w"), CPU)


def fused(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    gate, up = (torch.stack([tensors[f"{name}{expert}"] for expert in range(EXPERTS)]) for name in ("gate", "up"))
    return torch.cat([gate, up], dim=1)  # (experts, 2 * inner, width)


def uneven(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensors["gate0"], torch.cat([tensors["up0"][:5], tensors["up1"][5:]])], dim=1)


def is_recipe(tensor: torch.Tensor) -> bool:
    return handle_of(tensor).composed is not None  # type: ignore[arg-type]


def random_cut(dim: int, shape: torch.Size) -> Callable[[torch.Tensor], torch.Tensor]:
    at = random.randrange(dim)
    size = shape[at]
    start = random.randrange(size) if size else 0
    length = random.randint(0, size - start)
    step = random.choice([1, 1, 2, 3])
    cuts: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda one: one.narrow(at, start, length),
        lambda one: one[(slice(None),) * at + (slice(start, None, step),)],
        lambda one: one.transpose(0, at),
        lambda one: one.unsqueeze(at),
        lambda one: one.unsqueeze(0).expand(2, *shape),
    ]
    if size:
        cuts += [lambda one: one.select(at, start)] * 2
    if size > 2:
        cuts += [lambda one: one.unfold(at, 3, 1)]  # windows overlap
    return random.choice(cuts)


# Reading


@pytest.mark.parametrize(
    ("is_kept", "block"), [(True, 500), *((False, size) for size in (backends.BLOCK, 1, 64, 500))], indirect=["is_kept"]
)
def test_random_cuts_are_those_of_the_plain_tensor(
    recipe: OffloadedTensor, plain: torch.Tensor, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    monkeypatch.setattr(backends, "BLOCK", block)

    for _ in range(150 if block == backends.BLOCK else 40):
        ours, theirs = recipe, plain
        for _ in range(random.randint(1, 4)):
            if theirs.dim():
                change = random_cut(theirs.dim(), theirs.shape)
                ours, theirs = change(ours), change(theirs)

        assert (theirs.shape, theirs.stride()) == (ours.shape, ours.stride())
        assert torch.equal(theirs, ours.materialize())  # type: ignore[attr-defined]
        assert torch.equal(theirs.clone(), ours.clone())
    assert is_recipe(recipe)


DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.bool, torch.complex64, torch.complex128),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_is_joined_and_cut(tmp_path: Path, dtype: torch.dtype) -> None:
    values = [torch.randint(0, 2, (3, 8)).to(dtype) for _ in range(2)]
    for at, value in enumerate(values):
        OffloadedTensor.from_original_tensor(value, f"{at}", tmp_path)
    stored, expected = offload.load_file(tmp_path), torch.stack(values)

    value = torch.stack([deferred(stored["0"]), deferred(stored["1"])]).stored("joined")  # type: ignore[attr-defined]

    assert is_recipe(value)
    for cut in (lambda one: one, lambda one: one[1], lambda one: one[:, 1:, 2:5], lambda one: one.transpose(0, 2)):
        assert torch.equal(cut(expected).contiguous().view(torch.uint8), cut(value).contiguous().view(torch.uint8))


def test_recipes_may_be_empty_or_scalar() -> None:
    stored = OffloadedTensor.from_original_tensor(torch.arange(6.0).view(2, 3), "w")

    number = deferred(stored[1, 2]).double().stored("number")  # type: ignore[attr-defined]
    nothing = torch.cat([deferred(stored)[:0], deferred(stored)[:0]]).stored("nothing")  # type: ignore[attr-defined]

    assert (5.0, torch.float64, ()) == (number.item(), number.dtype, number.shape)
    assert torch.equal(torch.empty(0, 3), nothing.materialize())
    assert torch.equal(torch.empty(3, 0), nothing.t() + 0)

    whole = handle_of(torch.cat([deferred(stored), deferred(stored)]).stored("whole"))  # type: ignore[attr-defined]
    assert 2 == len(list(whole.composed.reads(meta_of(whole))))
    assert [] == list(whole.composed.reads(meta_of(whole)[:, :0]))


def test_views_may_have_another_dtype(recipe: OffloadedTensor, plain: torch.Tensor) -> None:
    for dtype in (torch.uint8, torch.int16):
        ours, theirs = recipe.view(dtype), plain.view(dtype)
        assert torch.equal(theirs, ours + 0)
        assert torch.equal(theirs[2, ..., 3:8], ours[2, ..., 3:8] + 0)
        assert torch.equal(theirs[..., 1], ours[..., 1] + 0)


def test_conjugated_views_compute_as_plain_ones() -> None:
    values = [torch.randn(3, 4, dtype=torch.complex64) for _ in range(2)]
    stored = [OffloadedTensor.from_original_tensor(value, f"{at}") for at, value in enumerate(values)]
    expected = torch.cat(values)

    value = torch.cat([deferred(one) for one in stored]).stored("w")  # type: ignore[attr-defined]

    for cut in (torch.conj, lambda one: one.conj()[2:5], lambda one: one.mH[1:], lambda one: one.conj().imag[1]):
        assert torch.equal(cut(expected).resolve_conj().resolve_neg(), cut(value) + 0)


def test_a_recipe_is_computed_under_modes(recipe: OffloadedTensor, plain: torch.Tensor) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = recipe + 1
        value = recipe.materialize()
    results = []
    for mode in (torch.device("meta"), torch.inference_mode()):
        with mode:
            results += [recipe + 1, recipe[1].materialize()]

    assert (plain.shape, plain.dtype) == (fake.shape, fake.dtype)
    assert torch.equal(plain, value)
    assert all(map(torch.equal, [plain + 1, plain[1]] * 2, results))


# Writing


@torch.no_grad()
@pytest.mark.parametrize(
    "write",
    [
        lambda one: one[1].mul_(3),
        lambda one: one.zero_(),
        lambda one: one.t().fill_(2) if one.dim() == 2 else one.transpose(0, 1).fill_(2),
        lambda one: one.__setitem__((slice(None), 2), 5),
        lambda one: torch.neg(one.clone(), out=one),
        lambda one: nn.init.constant_(one, 4),
    ],
    ids=["row", "all", "turned", "column", "out", "init"],
)
def test_a_write_goes_to_a_new_file_and_is_invisible_to_others(
    recipe: OffloadedTensor, plain: torch.Tensor, folder: Path, write: Callable[[torch.Tensor], object]
) -> None:
    before, expected, old = contents(folder), plain.clone(), plain.clone()
    other, view = wrap_handle(handle_of(recipe).elsewhere(None), CPU), recipe[1]

    write(recipe)
    write(expected)

    assert torch.equal(expected, recipe + 0)
    assert torch.equal(expected[1], view + 0)
    assert handle_of(recipe).owned
    assert recipe.offload_path.parent != folder
    assert is_recipe(other)
    assert torch.equal(old, other + 0)
    assert before == contents(folder)


def test_a_recipe_takes_a_new_value_and_new_data(recipe: OffloadedTensor, plain: torch.Tensor, folder: Path) -> None:
    before, parameter = contents(folder), nn.Parameter(copy.deepcopy(recipe))

    recipe.update_values(plain + 1)
    parameter.data = plain.double()

    assert torch.equal(plain + 1, recipe.materialize())
    assert torch.equal(plain.double(), parameter.materialize())  # type: ignore[attr-defined]
    assert torch.float64 == parameter.dtype
    assert before == contents(folder)


def test_gradients_go_through_a_recipe_and_steps_write_its_value(recipe: OffloadedTensor, plain: torch.Tensor) -> None:
    ours, theirs = nn.Parameter(recipe), nn.Parameter(plain.clone())

    for one in (ours, theirs):
        (one * 2).sum().backward()
        torch.optim.SGD([one], lr=0.5).step()

    assert torch.equal(theirs.grad, ours.grad)  # type: ignore[arg-type]
    assert torch.equal(theirs, ours.materialize())  # type: ignore[attr-defined]


# Copies, files, addresses


def test_a_deep_copy_is_independent_and_writes_nothing(
    recipe: OffloadedTensor, plain: torch.Tensor, folder: Path
) -> None:
    before = contents(folder)

    copied = copy.deepcopy(recipe)

    assert is_recipe(copied)
    copied.zero_()
    assert torch.equal(plain, recipe.materialize())
    assert not copied.any()
    assert before == contents(folder)


def test_a_saved_recipe_is_plain(recipe: OffloadedTensor, plain: torch.Tensor, tmp_path: Path) -> None:
    save_file({"w": recipe}, tmp_path / "saved.safetensors")
    torch.save({"w": recipe, "view": recipe[1]}, tmp_path / "saved.pt")
    offload.save_checkpoint({"w": recipe, "view": recipe[1]}, tmp_path / "saved")

    for found in (
        load_file(tmp_path / "saved.safetensors"),
        torch.load(tmp_path / "saved.pt", weights_only=True),
        load_file(tmp_path / "saved" / "model.safetensors"),
    ):
        assert type(found["w"]) is torch.Tensor
        assert torch.equal(plain, found["w"])
        assert torch.equal(plain[1], found.get("view", plain[1]))


def test_recipes_give_arrays_and_capsules(folder: Path) -> None:
    recipe, plain = made("joined", folder)

    array, capsule = recipe.numpy(), torch.from_dlpack(recipe)
    for _ in range(5):  # values computed meanwhile are elsewhere
        assert torch.equal(plain * 2, recipe * 2)

    assert (plain.numpy() == array).all()
    assert not array.flags.writeable
    assert torch.equal(plain, capsule)


def test_ties_are_found_by_addresses_which_write_nothing(folder: Path) -> None:
    recipe, other = made("joined", folder)[0], made("joined", folder)[0]

    addresses = [one.untyped_storage().data_ptr() for one in (recipe, recipe[1], recipe.detach(), other)]

    assert addresses[0] == addresses[1] == addresses[2] != addresses[3]
    assert 0 not in addresses
    assert is_recipe(recipe)


# Threads, compilers, changed files


def test_threads_that_compute_a_recipe_do_not_share_memory(folder: Path) -> None:
    values = [made(kind, folder) for kind in ("joined", "cast", "decoded", "decoded, joined, cast")] * 2
    wrong: list[int] = []

    def work(number: int) -> None:
        recipe, plain = values[number]
        composed: Any = handle_of(recipe).composed
        for _ in range(60):
            found = [composed.value(), composed.value(), recipe + 0]
            wrong.extend(number for one in found if not torch.equal(plain, one))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))

    assert [] == wrong


def test_scratch_memory_is_reused_once_it_is_free(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scratch, "_SCRATCH", scratch._Scratch())
    recipe, plain = made("cast", folder)
    composed: Any = handle_of(recipe).composed

    held, view = composed.value(), composed.value()[1]
    addresses = {composed.value().untyped_storage().data_ptr() for _ in range(10)}

    assert 1 == len(addresses)
    assert addresses.isdisjoint({held.untyped_storage().data_ptr(), view.untyped_storage().data_ptr()})
    assert torch.equal(plain, held)
    assert torch.equal(plain[1], view)


def test_scratch_memory_is_the_smallest_that_fits_and_not_much_larger(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is kept of it keeps all of it."""
    monkeypatch.setattr(scratch, "_SCRATCH", scratch._Scratch())
    made = {size: scratch_of(size) for size in (8, 4, 3)}
    del made
    held = scratch_of(1)

    assert 1 * MIB == held.untyped_storage().nbytes()
    assert 3 * MIB == scratch_of(2).untyped_storage().nbytes()
    assert 8 * MIB == scratch_of(5).untyped_storage().nbytes()


def scratch_of(size: int) -> torch.Tensor:
    return scratch.scratch_for(contiguous(torch.uint8, (size * MIB,)), torch.device("cpu"))


def test_memory_freed_by_decoding_is_returned(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An eighth of what is decoded counts as freed: here it is returned after every 80 reads."""
    value, returned = made("decoded", folder)[0], []
    monkeypatch.setattr(memory, "_malloc_trim", returned.append)
    monkeypatch.setattr(memory, "_MUCH", 10 * value.nbytes)
    monkeypatch.setattr(memory, "_freed", 0)

    for _ in range(240):
        value.materialize()

    assert 3 == len(returned)


def test_experts_that_are_packed_apart_are_decoded_straight_to_their_place(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of them make up an expert's matrix, in another dtype: no decoded copy is held as well."""
    stored, numbers = offload.load_file(folder), load_file(folder / "model.safetensors")
    expected = decode(numbers["packed"], numbers["scales"])
    pieces = [deferred(decoded(stored["packed"], stored["scales"])) for _ in range(4)]
    stacks = [torch.stack([one.bfloat16() for one in pieces[:2]]), torch.stack([one.bfloat16() for one in pieces[2:]])]
    experts = torch.cat(stacks, dim=1).stored("experts")  # type: ignore[attr-defined]
    monkeypatch.setattr(Decoded, "value", None)

    found = experts[1].clone()

    assert torch.equal(torch.cat([expected, expected]).bfloat16(), found)


def test_a_view_of_a_recipe_is_compiled(recipe: OffloadedTensor, plain: torch.Tensor) -> None:
    torch._dynamo.reset()
    double = torch.compile(lambda one: one * 2, backend="aot_eager", dynamic=False)

    for cut in (lambda one: one[1], lambda one: one[2:, 3:], lambda one: one[3:].t() if one.dim() == 2 else one.mT):
        assert torch.equal(cut(plain) * 2, double(cut(recipe)))


def test_a_missing_or_changed_file_of_a_piece_is_an_error(recipe: OffloadedTensor, folder: Path) -> None:
    path = folder / "model.safetensors"
    data = path.read_bytes()

    path.unlink()
    with pytest.raises(MissingFileError, match=r"model\.safetensors"):
        recipe + 0
    path.write_bytes(data)
    with pytest.raises(ChangedFileError, match=r"model\.safetensors"):
        recipe + 0
    with pytest.raises(ChangedFileError), torch.no_grad():
        recipe.zero_()


# Ops on recipes: only picked rows are computed


E, N, K = 8, 48, 64


@pytest.fixture
def matrices(tmp_path: Path) -> tuple[OffloadedTensor, torch.Tensor]:
    """Eight matrices in a file, joined; and the same in memory."""
    plain = [torch.randn(N, K) for _ in range(E)]
    save_file({f"{number}": matrix for number, matrix in enumerate(plain)}, tmp_path / "experts.safetensors")
    stored = offload.load_file(tmp_path / "experts.safetensors")
    return _stored(torch.stack([deferred(stored[f"{number}"]) for number in range(E)])), torch.stack(plain)


def _stored(tensor: torch.Tensor) -> OffloadedTensor:
    assert isinstance(tensor, DeferredTensor)
    stored = tensor.stored("joined")
    assert handle_of(stored).composed is not None
    return stored


@pytest.fixture
def carried_out(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many elements are computed at each read."""
    seen: list[int] = []
    value = Plain.value

    def look(self: Plain, *args: Any, **kwargs: Any) -> torch.Tensor:
        found = value(self, *args, **kwargs)
        seen.append(found.numel())
        return found

    monkeypatch.setattr(Plain, "value", look)
    return seen


@pytest.mark.parametrize(
    "pick",
    [
        lambda one: one[torch.tensor([[1, 5], [5, 1]])],
        lambda one: one[torch.tensor([-1, 2]), torch.tensor([3, 4])],
        lambda one: one[torch.tensor([3]), :, torch.tensor([5])],
        lambda one: torch.index_select(one, 0, torch.tensor([6, 6, 0])),
        lambda one: torch.index_select(one, 1, torch.tensor([6, 6, 0])),
        lambda one: one.gather(0, torch.tensor([[[1, 2]]])),
        lambda one: one[torch.tensor([True, False] * 4)],
        lambda one: F.embedding(torch.tensor([[7, 0], [0, 7]]), one[2]),
        lambda one: F.embedding(torch.tensor([7, 5]), one[2], padding_idx=5),
        lambda one: F.embedding(torch.tensor([7, 5], dtype=torch.int32), one.flatten(0, 1)),
        lambda one: one[torch.tensor([], dtype=torch.int64)],
    ],
)
def test_picked_rows_are_those_of_plain_tensors(
    matrices: tuple[OffloadedTensor, torch.Tensor], pick: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    stored, plain = matrices
    assert torch.equal(pick(stored), pick(plain))


def test_picked_rows_are_taken_from_the_pieces(matrices: tuple[Any, torch.Tensor], carried_out: list[int]) -> None:
    F.embedding(torch.tensor([3, 300, 301, 3]), matrices[0].flatten(0, 1))

    assert [] == carried_out


def test_an_unknown_row_raises_the_error_of_torch(matrices: tuple[OffloadedTensor, torch.Tensor]) -> None:
    with pytest.raises(IndexError, match="out of range"):
        F.embedding(torch.tensor([N]), matrices[0][1])


def test_the_gradient_of_an_embedding_is_of_the_whole_table(matrices: tuple[OffloadedTensor, torch.Tensor]) -> None:
    grads = []
    for one in matrices:
        table = torch.nn.Parameter(one[2])
        F.embedding(torch.tensor([[1, 5], [5, 1]]), table, padding_idx=1).pow(2).sum().backward()  # type: ignore[no-untyped-call]
        grads.append(table.grad)
    assert torch.equal(*grads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_groups_are_multiplied_with_their_matrices_alone(
    matrices: tuple[OffloadedTensor, torch.Tensor], dtype: torch.dtype, carried_out: list[int]
) -> None:
    stored, plain = matrices
    stored = _stored(deferred(stored).to(dtype))
    rows, ends = torch.randn(15, K).to(dtype), torch.tensor([0, 3, 3, 3, 9, 9, 15, 15], dtype=torch.int32)
    result = torch._grouped_mm(rows, stored.transpose(1, 2), offs=ends)
    assert torch.equal(result, torch._grouped_mm(rows, plain.to(dtype).transpose(1, 2), offs=ends))
    assert max(carried_out) == N * K


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 3, 9])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_joined_weight_multiplies_as_the_whole_one(
    tmp_path: Path, dtype: torch.dtype, rows: int, has_bias: bool
) -> None:
    gate, up = torch.randn(512, 256).to(dtype), torch.randn(520, 256).to(dtype)
    save_file({"gate": gate, "up": up}, tmp_path / "w.safetensors")
    stored = offload.load_file(tmp_path / "w.safetensors")
    weight = _stored(torch.cat([deferred(stored["gate"]), deferred(stored["up"])]))
    x, bias = torch.randn(rows, 256).to(dtype), torch.randn(1032).to(dtype) if has_bias else None
    wanted = F.linear(x, torch.cat([gate, up]), bias)
    assert all(torch.equal(F.linear(x, weight, bias), wanted) for _ in range(3))


def test_an_expert_is_read_without_its_neighbours(matrices: tuple[OffloadedTensor, torch.Tensor]) -> None:
    recipe: Any = handle_of(matrices[0]).composed
    assert all(handle.access is Access.PICKED for handle in recipe.handles())
    assert all(track(handle, *handle.extent).is_part for handle in recipe.handles())
    [handle] = _whole(matrices[0]).handles()
    assert handle.access is not Access.PICKED


def _whole(tensor: OffloadedTensor) -> Recipe:
    """A cast of a whole value that has a file."""
    wide = OffloadedTensor.from_original_tensor(offload.materialize(tensor).double(), "wide")
    return handle_of(_stored(deferred(wide).float())).composed  # type: ignore[return-value]
