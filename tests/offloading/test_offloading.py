"""Inside `offloading`, large results are on disk and equal to those in memory; nothing else changes."""

import contextlib
import copy
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

import offload
from offload import OffloadedTensor, is_offloaded, materialize
from offload.errors import ForeignFileError, WriteError
from tests.conftest import contents
from tests.processes import in_fork, run_script

SMALL = 1024  # size in bytes from which a result is large here
X = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))


def inside(act: Callable[[], Any]) -> Any:
    with offload.offloading(min_bytes=SMALL):
        return act()


def same(expected: torch.Tensor, found: torch.Tensor) -> bool:
    """Equal bit for bit, in values, dtype and strides."""
    plain = materialize(found)
    return (
        (expected.dtype, expected.shape, expected.stride()) == (found.dtype, found.shape, found.stride())
        and torch.equal(expected, plain)
        and type(plain) is not OffloadedTensor
    )


# Factories

GENERATOR = torch.Generator()
FACTORIES: dict[str, Callable[[], torch.Tensor]] = {
    "zeros": lambda: torch.zeros(64, 64, dtype=torch.complex64),
    "ones": lambda: torch.ones(64, 64, dtype=torch.bool),
    "full": lambda: torch.full((64, 64), 3),
    "rand": lambda: torch.rand(64, 64),
    "rand generator": lambda: torch.rand(64, 64, generator=GENERATOR.manual_seed(3)),
    "randn": lambda: torch.randn(64, 64, dtype=torch.bfloat16),
    "randn generator": lambda: torch.randn(64, 64, generator=GENERATOR.manual_seed(3)),
    "randint": lambda: torch.randint(5, (64, 64)),
    "randint low": lambda: torch.randint(2, 9, (64, 64), dtype=torch.int32),
    "randperm": lambda: torch.randperm(4096),
    "normal": lambda: torch.normal(1.0, 2.0, (64, 64)),
    "bernoulli": lambda: torch.bernoulli(torch.full((64, 64), 0.5)),
    "dropout": lambda: torch.dropout(X, 0.5, True),
    "multinomial": lambda: torch.multinomial(torch.ones(64, 64), 40, True),
    "arange": lambda: torch.arange(4096.0),
    "arange step": lambda: torch.arange(1, 8192, 2),
    "linspace": lambda: torch.linspace(0, 1, 4096),
    "logspace": lambda: torch.logspace(0, 1, 4096),
    "eye": lambda: torch.eye(64, 70),
    "tril_indices": lambda: torch.tril_indices(64, 64),
    "zeros_like": lambda: torch.zeros_like(X.t()),
    "ones_like": lambda: torch.ones_like(X, dtype=torch.int16),
    "full_like": lambda: torch.full_like(X, 3),
    "rand_like": lambda: torch.rand_like(X.t()),
    "randn_like": lambda: torch.randn_like(X),
    "randint_like": lambda: torch.randint_like(X, 9),
    "randint_like low": lambda: torch.randint_like(X, 3, 7),
    "new_zeros": lambda: X.new_zeros(64, 64),
    "new_ones": lambda: X.new_ones((64, 64)),
    "new_full": lambda: X.new_full((64, 64), 2.5),
    "tensor": lambda: torch.tensor(X.tolist()),
}


@pytest.mark.parametrize("name", FACTORIES)
def test_a_factory_gives_the_same_values_and_random_state_as_in_memory(name):
    torch.manual_seed(1)
    expected = FACTORIES[name]()
    state = torch.get_rng_state()
    torch.manual_seed(1)
    found = inside(FACTORIES[name])

    assert is_offloaded(found)
    assert same(expected, found)
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.empty(64, 64),
        lambda: torch.empty_strided((64, 64), (1, 64)),
        lambda: torch.empty_like(X.t()),
        lambda: X.new_empty(64, 64),
        lambda: torch.Tensor(64, 64),
    ],
)
def test_an_empty_tensor_has_its_shape_and_strides_on_disk(make):
    expected, found = make(), inside(make)

    assert is_offloaded(found)
    assert (expected.shape, expected.stride(), expected.dtype) == (found.shape, found.stride(), found.dtype)


def test_a_linear_layer_has_its_weight_on_disk_with_the_values_of_one_in_memory():
    torch.manual_seed(0)
    expected = nn.Linear(64, 64)
    torch.manual_seed(0)
    found = inside(lambda: nn.Linear(64, 64))
    numbers = inside(lambda: torch.tensor(X.tolist(), requires_grad=True))

    assert isinstance(found.weight, nn.Parameter)
    assert not is_offloaded(found.bias)
    assert torch.equal(expected.weight, found.weight.materialize())
    assert torch.equal(expected(X), found(X))
    assert all(is_offloaded(one) and one.requires_grad and one.is_leaf for one in (found.weight, numbers))


# Ops

OPS: dict[str, Callable[[torch.Tensor], Any]] = {
    "add": lambda x: x + x,
    "add number": lambda x: x + 1,
    "integers by a float": lambda x: x.to(torch.int32) * 2.5,
    "bfloat16 by a float": lambda x: x.bfloat16() * 2.5,
    "compare": lambda x: x.double() < 0,
    "matmul": lambda x: x @ x.t(),
    "addmm": lambda x: torch.addmm(x, x, x, beta=0.5),
    "bmm": lambda x: torch.bmm(x[None], x[None]),
    "linear": lambda x: nn.functional.linear(x, x),
    "cast": lambda x: x.double(),
    "cast back": lambda x: x.t().bfloat16().float(),
    "clone": lambda x: x.t().clone(),
    "contiguous": lambda x: x.t().contiguous(),
    "cat": lambda x: torch.cat([x, x], 1),
    "stack": lambda x: torch.stack([x, x]),
    "where": lambda x: torch.where(x > 0, x, 0.0),
    "softmax": lambda x: x.softmax(-1),
    "sort": lambda x: x.sort(-1),
    "topk": lambda x: x.topk(40, 0),
    "svd": lambda x: torch.linalg.svd(x),
    "split copies": lambda x: [part.exp() for part in x.split(32)],
    "fancy index": lambda x: x[torch.arange(0, 64, 2)],
    "masked": lambda x: x.masked_select(x > 0),
    "conv": lambda x: nn.functional.conv2d(x[None, None], x[:3, :3][None, None]),
    "channels last": lambda x: x.view(2, 8, 16, 16).contiguous(memory_format=torch.channels_last) + 1,
    "eigenvalues": lambda x: torch.linalg.eigvalsh(x),
    "nuclear norm": lambda x: torch.linalg.norm(x, "nuc"),
}


@pytest.mark.parametrize("where", ["memory", "disk"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, contextlib.nullcontext], ids=str)
@pytest.mark.parametrize("name", OPS)
def test_an_op_gives_the_same_result_as_in_memory(name, mode, where):
    x = X if where == "memory" else OffloadedTensor.from_original_tensor(X, "x")
    with mode():
        expected = OPS[name](X)
        with offload.offloading(min_bytes=SMALL):
            found = OPS[name](x)

    pairs = [(expected, found)] if isinstance(expected, torch.Tensor) else list(zip(expected, found, strict=True))
    assert all(same(one, other) for one, other in pairs)
    assert all(is_offloaded(other) for one, other in pairs if one.numel() * one.itemsize >= SMALL)
    assert not any(is_offloaded(other) for one, other in pairs if one.numel() * one.itemsize < SMALL)


def test_views_of_tensors_in_memory_share_their_memory():
    x = X.clone()
    with offload.offloading(min_bytes=SMALL):
        views = [x[:32], x.t(), x.view(-1), x.reshape(32, 128), x.detach(), torch.from_numpy(x.numpy()), *x.chunk(2)]
        x.zero_()

    assert not any(is_offloaded(view) for view in views)
    assert not any(view.any() for view in views)


def test_results_of_in_place_ops_are_their_arguments_and_stay_in_memory(tmp_path):
    x, out = X.clone(), torch.empty(64, 64)
    with offload.offloading(tmp_path, min_bytes=SMALL):
        written = [x.add_(1), torch.add(x, 1, out=out), x.t_(), x.resize_(32, 128), out.set_(x)]

    assert [id(one) for one in (x, out, x, x, out)] == [id(one) for one in written]
    assert type(x) is type(out) is torch.Tensor
    assert [] == list(tmp_path.iterdir())


def test_a_result_that_is_an_argument_is_left_alone_and_one_of_a_value_on_disk_is_another():
    w = OffloadedTensor.from_original_tensor(X, "w")
    with offload.offloading(min_bytes=SMALL):
        found = [X.to(torch.float32), X.contiguous(), X.float(), torch.asarray(X), nn.Identity()(X)]
        copies = [w.materialize(), materialize({"w": w})["w"]]
        cast = w.to(torch.float64)
        cast.zero_()

    assert all(one is X for one in found)
    assert all(type(one) is torch.Tensor and torch.equal(X, one) for one in copies)
    assert torch.equal(X, w.materialize())
    assert torch.equal(torch.zeros(64, 64, dtype=torch.float64), cast.materialize())


def test_out_and_in_place_ops_write_to_a_tensor_on_disk_and_its_views_share_the_file():
    with offload.offloading(min_bytes=SMALL):
        out = torch.zeros(64, 64)
        row, turned = out[3], out.t()
        torch.mm(X, X, out=out)
        out += X
        out[3:5] *= 2

    expected = X @ X + X
    expected[3:5] *= 2
    for one, found in ((expected, out), (expected[3], row), (expected.t(), turned)):
        assert torch.equal(one, found.materialize())


def test_gradients_equal_those_in_memory():
    def gradients(x: torch.Tensor, layers: nn.Module) -> list[torch.Tensor]:
        x = x.clone().requires_grad_()
        layers.zero_grad()
        layers(x).pow(2).mean().backward()
        layers(x).tanh().sum().backward()  # adds to existing gradients
        return [x.grad, *(parameter.grad for parameter in layers.parameters())]

    layers = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 64))
    expected = gradients(X, layers)
    stored = offload.disk_offload(copy.deepcopy(layers))

    for model in (copy.deepcopy(layers), stored):
        found = inside(lambda model=model: gradients(X, model))

        assert all(torch.equal(one, materialize(other)) for one, other in zip(expected, found, strict=True))
        assert sum(map(is_offloaded, found)) == 3  # x and the two weights


def test_functions_that_torch_computes_in_another_way_under_a_mode_have_gradients():
    x, other = (X.clone().requires_grad_() for _ in range(2))
    inside(lambda: torch.linalg.pinv(x).sum().backward())
    torch.linalg.pinv(other).sum().backward()

    torch.testing.assert_close(other.grad, materialize(x.grad))


# The context


def test_only_large_results_go_to_disk():
    with offload.offloading(min_bytes="4KiB"):
        found = [torch.ones(1023), torch.ones(1024), torch.ones(0)]
    with offload.offloading(min_bytes=0):
        found += [torch.ones(1), torch.ones(())]

    assert [False, True, False, True, True] == [is_offloaded(one) for one in found]


def test_the_log_says_how_each_large_result_was_made(tmp_path, caplog):
    x = torch.ones(64)
    with caplog.at_level("DEBUG", "offload.offloading"), offload.offloading(tmp_path / "results", min_bytes=64):
        x + 1, x.cumsum(0), torch.ones(8, 8).triu().to_sparse(), x.expand(2, 64) is x, torch.ones(2)

    said = [record.getMessage() for record in caplog.records]
    for words in ("add: computed in ", "cumsum: written to ", "_to_sparse: a result stays in memory, since it is"):
        assert any(line.startswith(words) for line in said), (words, said)


def test_leaving_the_context_restores_everything_even_inside_itself():
    @offload.offloading(min_bytes=SMALL)
    def nested(depth: int) -> torch.Tensor:
        made = torch.ones(64, 64)
        return made + nested(depth - 1) if depth else made

    with pytest.raises(ZeroDivisionError), offload.offloading(min_bytes=SMALL):
        torch.ones(64, 64).div_(0 // 0)
    assert type(torch.ones(64, 64)) is torch.Tensor
    assert torch.equal(torch.full((64, 64), 4.0), nested(3).materialize())
    assert type(torch.ones(64, 64)) is torch.Tensor
    assert 0 == torch._C._len_torch_dispatch_stack()


def test_an_inner_context_replaces_the_outer_one(tmp_path):
    with offload.offloading(tmp_path / "outer", min_bytes=SMALL):
        with offload.offloading(tmp_path / "inner", min_bytes="1MiB"):
            between, large = torch.ones(64, 64), torch.ones(512, 512)
        with pytest.raises(KeyError), offload.offloading(min_bytes="1MiB"):
            raise KeyError
        after = torch.ones(64, 64)

    assert not is_offloaded(between)
    assert tmp_path / "inner" == large.offload_dir
    assert tmp_path / "outer" == after.offload_dir


def test_other_threads_are_not_affected_and_may_have_their_own_context(tmp_path):
    found: dict[str, torch.Tensor] = {}
    meet = threading.Barrier(3, timeout=20)

    def act(name: str, context: contextlib.AbstractContextManager[None]) -> None:
        with context:
            meet.wait()
            found[name] = torch.ones(64, 64) + 1
            meet.wait()  # all are inside until here

    contexts = {
        "a": offload.offloading(tmp_path / "a", min_bytes=SMALL),
        "b": offload.offloading(tmp_path / "b", min_bytes=SMALL),
        "none": contextlib.nullcontext(),
    }
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(act, *zip(*contexts.items(), strict=True)))

    assert [tmp_path / "a", tmp_path / "b"] == [found[name].offload_dir for name in "ab"]
    assert type(found["none"]) is torch.Tensor


def test_compiling_works_after_threads_leave_in_any_order():
    first_left, second_in = threading.Event(), threading.Event()

    def second() -> None:
        with offload.offloading():
            second_in.set()
            first_left.wait(20)

    with offload.offloading():
        thread = threading.Thread(target=second)
        thread.start()
        second_in.wait(20)
    first_left.set()
    thread.join()

    assert not _python_dispatch.is_in_any_mode_without_ignore_compile_internals()
    assert not _python_dispatch.is_in_torch_dispatch_mode()


# Files


def test_files_in_a_named_folder_stay_and_are_not_overwritten(tmp_path):
    first = []
    for _ in range(2):
        with offload.offloading(tmp_path, min_bytes=SMALL):
            first.append(sorted(path.name for path in tmp_path.iterdir()))
            torch.ones(64, 64)
            torch.ones(64, 64) + 1

    files = sorted(tmp_path.iterdir())
    assert 6 == len(files)
    assert set(first[1]) < {path.name for path in files}
    assert [1, 1, 1, 1, 2, 2] == sorted(OffloadedTensor.from_file(path).mean().item() for path in files)


def test_another_process_adds_to_a_folder_and_overwrites_nothing(tmp_path):
    """Inside of the context of its parent, and in one of its own."""

    def act() -> None:
        assert torch.equal(torch.full((64, 64), 7.0), torch.full((64, 64), 7.0).materialize())

    def enter() -> None:
        with offload.offloading(tmp_path, min_bytes=SMALL):
            torch.ones(64, 64)

    with offload.offloading(tmp_path, min_bytes=SMALL):
        torch.ones(64, 64)
        assert in_fork(act)
        ours = torch.full((64, 64), 3.0)
        before = contents(tmp_path)
        assert in_fork(act)
    assert in_fork(enter)

    assert [3] == ours.unique().tolist()
    assert before.items() < contents(tmp_path).items()
    assert len(before) + 3 == len(contents(tmp_path))


def test_a_failing_op_leaves_no_file(tmp_path):
    with offload.offloading(tmp_path, min_bytes=SMALL), pytest.raises((RuntimeError, IndexError)):
        torch.index_select(X, 0, torch.full((64,), 99))

    assert [] == list(tmp_path.iterdir())


def test_a_file_in_place_of_the_folder_or_an_invalid_size_is_an_error_before_anything_runs(tmp_path):
    (tmp_path / "file").write_text("mine")

    with pytest.raises(WriteError, match="offload_dir"), offload.offloading(tmp_path / "file"):
        raise AssertionError
    for amount in ("lots", -1):
        with pytest.raises(ValueError, match="amount of memory"), offload.offloading(min_bytes=amount):
            raise AssertionError
    assert "mine" == (tmp_path / "file").read_text()


# Left alone


def test_fake_and_meta_tensors_are_left_alone():
    with offload.offloading(min_bytes=SMALL), FakeTensorMode():
        fake = torch.ones(64, 64) + 1
    with FakeTensorMode(), offload.offloading(min_bytes=SMALL):
        fake_too = torch.ones(64, 64) + 1
    with offload.offloading(min_bytes=SMALL):
        meta = torch.ones(64, 64, device="meta") + 1
        with torch.device("meta"):
            layer = nn.Linear(64, 64)

    assert ["FakeTensor", "FakeTensor"] == [type(fake).__name__, type(fake_too).__name__]
    assert meta.is_meta
    assert layer.weight.is_meta


def test_function_transforms_and_traced_functions_give_the_same_results_as_in_memory():
    def transformed() -> list[torch.Tensor]:
        return [
            torch.func.vmap(lambda row: row * 2)(X),
            torch.func.grad(lambda x: (x @ x).sum())(X),
            torch.func.jvp(torch.exp, (X,), (X,))[1],
            make_fx(lambda x: (x @ x).relu())(X)(X),
        ]

    expected, found = transformed(), inside(transformed)

    assert all(torch.equal(one, materialize(other)) for one, other in zip(expected, found, strict=True))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_function_gives_the_same_result_inside_and_compiles_outside(backend):
    calls: list[int] = []

    def counted(graph: Any, _: Any) -> Any:
        calls.append(1)
        return graph.forward

    compiled = torch.compile(lambda x: (x @ x).relu() + 1, backend=counted if backend == "eager" else backend)
    expected = (X @ X).relu() + 1
    first = inside(lambda: compiled(X))
    assert [] == calls

    outside, again = compiled(X), inside(lambda: compiled(X))

    assert is_offloaded(first)
    assert type(outside) is torch.Tensor
    assert all(torch.equal(expected, materialize(one)) for one in (first, outside, again))


def test_modes_of_others_see_the_ops():
    class Seen(TorchDispatchMode):
        names: list[str] = []  # noqa: RUF012

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.names.append(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    with Seen() as seen, offload.offloading(min_bytes=SMALL):
        found = torch.mm(X, X)

    assert "mm" in seen.names
    assert is_offloaded(found)
    assert torch.equal(X @ X, found.materialize())


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_sparse_quantized_and_nested_results_stay_in_memory():
    with offload.offloading(min_bytes=SMALL):
        found = [
            X.to_sparse(),
            torch.quantize_per_tensor(X, 0.1, 0, torch.qint8),
            torch.nested.nested_tensor([X, X], layout=torch.jagged),
            torch.sparse.mm(X.to_sparse(), X).to_sparse_csr(),
        ]

    assert not any(map(is_offloaded, found))


# Loading, and memory


@pytest.mark.parametrize("mapped", [False, True])
def test_torch_load_and_safetensors_load_plain_tensors_inside(mapped, tmp_path):
    state = {"w": X, "tied": X, "row": X[3], "half": X.bfloat16()}
    torch.save(state, tmp_path / "a.pt")
    save_file({"w": X}, tmp_path / "a.safetensors")
    with offload.offloading(min_bytes=SMALL):
        found = torch.load(tmp_path / "a.pt", mmap=mapped)
        weight = load_file(tmp_path / "a.safetensors")["w"]

    assert all(type(value) is torch.Tensor and torch.equal(state[key], value) for key, value in found.items())
    assert found["w"].data_ptr() == found["tied"].data_ptr()
    assert type(weight) is torch.Tensor
    assert torch.equal(X, weight)


def test_a_file_that_is_not_of_offload_is_never_replaced(tmp_path, monkeypatch):
    monkeypatch.setattr("secrets.token_hex", lambda _: "0")  # every context generates the same names
    (tmp_path / "ones.1.0.safetensors").write_text("mine")

    with offload.offloading(tmp_path, min_bytes=SMALL), pytest.raises(ForeignFileError):
        torch.ones(64, 64)

    assert "mine" == (tmp_path / "ones.1.0.safetensors").read_text()


MEMORY = """
    import json, torch, offload
    from tests.peak import Peak
    n = 2000  # 16 MB a tensor
    torch.set_num_threads(1)

    def peak(act):
        with Peak() as seen:
            kept = act()
        return seen.nbytes

    x, small = torch.randn(64, n), torch.randn(8, 8)
    with offload.offloading(min_bytes=64):
        a, b = torch.randn(n, n), torch.randn(n, n)
        small @ small, small + small, small.double()  # what is allocated once
        acts = dict(
            randn=lambda: torch.randn(n, n), add=lambda: a + b, product=lambda: x.T @ x, cast=lambda: a.bfloat16(),
            clone=lambda: a.clone(), linear=lambda: torch.nn.Linear(n, n), plus=lambda: a.__iadd__(b),
            addmm=lambda: a.addmm_(x.T, x), rows=lambda: a[9:999].add_(b[9:999]), softmax=lambda: a.softmax(-1),
        )
        found = {name: peak(act) for name, act in acts.items()}
    print(json.dumps(found))
"""


def test_results_are_computed_into_their_files():
    """Peaks of anonymous memory; softmax, which can't be computed into a file, is the counter-check."""
    found = json.loads(run_script(MEMORY))

    assert 16e6 <= found.pop("softmax")
    assert [] == [(name, taken) for name, taken in found.items() if taken > 6e6]


@pytest.fixture(autouse=True)
def _nothing_is_left_on() -> Iterator[None]:
    yield
    assert 0 == torch._C._len_torch_dispatch_stack()
    assert 0 == torch._C._len_torch_function_stack()
