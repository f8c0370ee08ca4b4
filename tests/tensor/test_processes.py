"""Threads, forked and spawned processes: one file, visible to all."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

import offload
from offload import OffloadedTensor
from offload.errors import ChangedFileError, MissingFileError
from offload.tensor import processes
from offload.tensor.deferred import deferred
from offload.tensor.wrapper import set_by_others
from tests.equal import assert_equal
from tests.processes import run_script


def offloaded(tensor: torch.Tensor, name: str = "w", offload_dir: Path | None = None) -> OffloadedTensor:
    return OffloadedTensor.from_original_tensor(tensor, name, offload_dir)


CARRIERS: dict[str, Callable[[Any], bytes]] = {
    "to a process": lambda value: bytes(ForkingPickler.dumps(value)),
    "by reference": lambda value: pickle.dumps(offload.by_reference(value)),
}


COPIES: dict[str, Callable[[Any], Any]] = {
    "pickled": lambda value: pickle.loads(pickle.dumps(value)),
    "pickled as of old": lambda value: pickle.loads(pickle.dumps(value, protocol=2)),
    "saved": lambda value: _saved_and_loaded(value, weights_only=True),
    "saved, any class": lambda value: _saved_and_loaded(value, weights_only=False),
    "copied": copy.copy,
    "deep-copied": copy.deepcopy,
}


def _saved_and_loaded(value: Any, **options: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    return torch.load(io.BytesIO(file.getvalue()), **options)


def _noted(value: Any, **noted: object) -> Any:
    vars(value).update(noted)
    return value


CARRYING: dict[str, Callable[[], torch.Tensor]] = {
    "a tensor": lambda: torch.arange(4.0),
    "a parameter": lambda: nn.Parameter(torch.arange(4.0)),
    "a frozen parameter": lambda: nn.Parameter(torch.arange(4.0), requires_grad=False),
}


@pytest.mark.parametrize("carrying", CARRYING)
@pytest.mark.parametrize("way", COPIES)
def test_attributes_go_along_as_those_of_plain_tensors(way: str, carrying: str) -> None:
    """Of a tensor, its view, and a module's `state_dict(keep_vars=True)`."""
    noted = {"tag": "a", "shards": {"rank": [1, 2]}}
    plain = _noted(CARRYING[carrying](), **noted)
    stored = _noted(offloaded(CARRYING[carrying]()), **noted)

    copies = [COPIES[way](one) for one in (plain, stored, _noted(stored.detach()[1:], **noted))]
    kept = [COPIES[way](nn.ParameterDict({"w": one}).state_dict(keep_vars=True))["w"] for one in (plain, stored)]

    expected, found, of_view = (set_by_others(one) for one in copies)
    assert expected == found
    assert noted == of_view
    assert vars(kept[0]) == set_by_others(kept[1])
    assert_equal(copies[0], copies[1])


@pytest.fixture(params=CARRIERS)
def dumps(request: pytest.FixtureRequest) -> Callable[[Any], bytes]:
    """How a value is sent to another process."""
    return CARRIERS[request.param]


def context_of(way: str) -> Any:
    """A context of `multiprocessing`; the processes of a fork server inherit nothing but imports."""
    torch.multiprocessing.set_forkserver_preload([__name__])
    return torch.multiprocessing.get_context(way)


def run_in_process(way: str, target: Callable[..., None], *args: Any) -> None:
    """Run in a process that gets `args` through a pickle (even if it is forked)."""
    context = context_of(way)
    queue = context.Queue()
    process = context.Process(target=_take_and_run, args=(queue,))
    process.start()
    queue.put((target, args))
    process.join(120)

    assert 0 == process.exitcode


def _take_and_run(queue: Any) -> None:
    torch.set_num_threads(1)
    target, args = queue.get()
    target(*args)


@pytest.fixture
def plain() -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(64, 32)


# Threads


def in_threads(act: Callable[[int], None], count: int = 8) -> None:
    """Run `act(0)`, `act(1)`... at the same moment; an error in one is raised here."""
    start = threading.Barrier(count)
    with ThreadPoolExecutor(count) as pool:
        list(pool.map(lambda number: (start.wait(), act(number)), range(count)))


def test_threads_read_shared_tensors(plain: torch.Tensor) -> None:
    weights = [offloaded(plain + i, f"w{i}") for i in range(4)]
    x = torch.randn(3, 32)

    def read(number: int) -> None:
        for turn in range(50):
            i = (number + turn) % 4
            w, expected = weights[i], plain + i
            assert torch.equal(F.linear(x, expected), F.linear(x, w))
            assert torch.equal(expected[number], w[number].materialize())
            assert torch.equal(expected.t().contiguous(), w.t().contiguous())
            y = x.clone().requires_grad_()
            F.linear(y, w).sum().backward()
            assert torch.equal(torch.ones(3, 64) @ expected, y.grad)

    in_threads(read)


def test_threads_write_to_their_rows() -> None:
    """No update of one row is lost by another's load-modify-store."""
    w = offloaded(torch.zeros(64, 32))

    def write(number: int) -> None:
        for _ in range(100):
            w[number * 8 : number * 8 + 8].add_(1)

    in_threads(write)
    assert_equal(torch.full((64, 32), 100.0), w)
    assert_equal(torch.full((64, 32), 100.0), safetensors.torch.load_file(w.offload_path)["w"])


def test_threads_see_whole_values() -> None:
    """While four replace the value, four see one of the values, never a mix."""
    w = offloaded(torch.zeros(256, 32))

    def act(number: int) -> None:
        for turn in range(30):
            if number % 2:
                w.update_values(torch.full((256, 32), float(number * 100 + turn)))
            else:
                seen = w.materialize()
                assert torch.equal(seen, torch.full_like(seen, seen[0, 0].item()))

    in_threads(act)


def test_threads_write_a_checkpoint_once(tmp_path: Path, plain: torch.Tensor) -> None:
    """The first writes of eight threads make one copy, which contains them all."""
    path = tmp_path / "checkpoint.safetensors"
    safetensors.torch.save_file({"w": plain}, path)
    before = path.read_bytes()
    w = OffloadedTensor.from_file(path, "w", offload_dir=tmp_path / "ours")
    in_threads(lambda number: w[number].zero_())
    plain[:8] = 0

    assert_equal(plain, w)
    assert before == path.read_bytes()


# Passing tensors


def test_a_reference_is_passed_and_no_data(dumps: Callable[[Any], bytes]) -> None:
    """A few hundred bytes for any size."""
    small, large = offloaded(torch.ones(2)), OffloadedTensor.empty((1024, 1024), name="w")

    assert abs(len(dumps(large)) - len(dumps(small))) < 64
    assert len(dumps(large)) < 2048


def test_attributes_of_a_tensor_are_passed_with_it(dumps: Callable[[Any], bytes], plain: torch.Tensor) -> None:
    sent = [
        nn.Parameter(offloaded(plain)),
        offloaded(plain).t()[1:, ::2],
        offloaded(torch.randn(3, dtype=torch.complex64)).conj(),
        nn.Parameter(offloaded(plain, "layer.weight"), requires_grad=False),
    ]
    parameter, view, lazy, frozen = (pickle.loads(dumps(one)) for one in sent)

    assert isinstance(parameter, nn.Parameter)
    assert parameter.requires_grad
    assert offload.is_offloaded(view)
    assert (plain.t()[1:, ::2].shape, plain.t()[1:, ::2].stride()) == (view.shape, view.stride())
    assert lazy.is_conj()
    assert ("layer.weight", False) == (frozen.name, frozen.requires_grad)


def test_tensors_over_one_value_share_it_after_they_were_passed(
    dumps: Callable[[Any], bytes], plain: torch.Tensor
) -> None:
    """Passed together or separately; and a tensor that comes back is over the original value."""
    w = offloaded(plain)
    first, row = pickle.loads(dumps([w, w[0]]))
    again = pickle.loads(dumps(w))
    row.zero_()

    assert first._handle is row._handle is again._handle is w._handle
    assert 0 == w[0].abs().sum()


def test_a_non_leaf_is_not_passed(dumps: Callable[[Any], bytes], plain: torch.Tensor) -> None:
    """As in torch: its graph can't be sent."""
    w = nn.Parameter(offloaded(plain))

    with pytest.raises(RuntimeError, match="detach"):
        dumps(w[0])


HARMS: dict[str, tuple[Callable[[list[OffloadedTensor]], object], type[Exception], str]] = {
    "removed": (lambda held: held.clear(), MissingFileError, r"w\.safetensors"),
    "changed": (
        lambda held: safetensors.torch.save_file({"w": torch.ones(64, 32)}, held.pop().offload_path),
        ChangedFileError,
        r"'w'.*w\.safetensors",
    ),
    "reshaped": (
        lambda held: held[0].update_values(torch.ones(3), strict_shape=False),
        ChangedFileError,
        "pass it again",
    ),
}


def test_a_value_that_moved_is_not_the_one_that_was_sent(tmp_path: Path, plain: torch.Tensor) -> None:
    safetensors.torch.save_file({"w": plain}, tmp_path / "w.safetensors")
    tensor = OffloadedTensor.from_file(tmp_path / "w.safetensors", offload_dir=tmp_path / "own")
    data = ForkingPickler.dumps(tensor)
    tensor.update_values(torch.zeros_like(plain))

    assert_equal(plain, pickle.loads(data))


@pytest.mark.parametrize("harm", HARMS)
def test_a_file_that_is_not_as_it_was_sent_is_an_error(
    harm: str, dumps: Callable[[Any], bytes], tmp_path: Path, plain: torch.Tensor
) -> None:
    """Not other numbers. A temporary tensor has to be kept, and a view that was sent belongs to the old value."""
    path = tmp_path / "w.safetensors"
    safetensors.torch.save_file({"w": plain}, path)
    held = [OffloadedTensor.from_file(path) if harm == "changed" else offloaded(plain)]
    act, error, words = HARMS[harm]
    data = dumps(held[0][0])
    assert_equal(plain[0], pickle.loads(data))
    act(held)

    with pytest.raises(error, match=words):
        pickle.loads(data)


@pytest.mark.parametrize("has_cloudpickle", [True, False])
def test_a_model_goes_by_reference_to_a_process_of_any_origin(
    has_cloudpickle: bool, plain: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its ties, over the same files; what is in memory is sent along, and a plain pickle stays plain."""
    monkeypatch.setitem(sys.modules, "cloudpickle", sys.modules.get("cloudpickle") if has_cloudpickle else None)
    processes._pickler.cache_clear()
    safetensors.torch.save_file({"0.weight": plain}, tmp_path / "checkpoint.safetensors")
    model = nn.Sequential(nn.Linear(32, 64, bias=False, device="meta"), nn.Linear(64, 2))
    devices = {"0": "disk", "1": "cpu"}
    offload.load_checkpoint_in_model(model, tmp_path / "checkpoint.safetensors", devices, strict=False)
    model.append(model[0])
    (tmp_path / "model").write_bytes(pickle.dumps(offload.by_reference(model)))
    code = """
        import pathlib, pickle, sys, torch, offload
        model = pickle.loads(pathlib.Path(sys.argv[1], "model").read_bytes())
        print(model[0] is model[2], [offload.is_offloaded(p) for p in model.parameters()], model[0].weight.offload_path)
        torch.save({"sums": [p.sum() for p in model.parameters()]}, sys.argv[1] + "/sums")
    """

    said = run_script(code, tmp_path)

    processes._pickler.cache_clear()
    assert f"True [True, False, False] {tmp_path / 'checkpoint.safetensors'}\n" == said
    sums = torch.load(tmp_path / "sums")["sums"]
    assert all(torch.equal(p.sum(), found) for p, found in zip(model.parameters(), sums, strict=True))
    assert not offload.is_offloaded(pickle.loads(pickle.dumps(model))[0].weight)


# Processes and data loaders


def _check_values(w: OffloadedTensor, expected: torch.Tensor) -> None:
    assert offload.is_offloaded(w)
    assert_equal(expected, w)
    assert_equal(expected[3:5], w[3:5])


def test_a_spawned_process_reads_what_it_gets(plain: torch.Tensor) -> None:
    """Through a queue; from a private folder. It imports all of torch: other tests fork."""
    run_in_process("spawn", _check_values, offloaded(plain), plain)


def _change(w: OffloadedTensor) -> None:
    w[0].fill_(7)
    w.add_(1)
    gc.collect()


def _replace(w: OffloadedTensor) -> None:
    w.update_values(w + 1)
    gc.collect()


@pytest.mark.parametrize(("way", "named"), [("fork", True), ("forkserver", False)])
def test_the_parent_sees_the_writes_of_a_process(way: str, named: bool, plain: torch.Tensor, tmp_path: Path) -> None:
    """In-place and atomic ones; the file stays when the process ends."""
    w = offloaded(plain, "w", tmp_path if named else None)
    row = w[0]
    run_in_process(way, _change, w)
    plain[0] = 7
    plain += 1
    assert_equal(plain, w)
    assert_equal(plain[0], row)

    run_in_process(way, _replace, w)
    assert_equal(plain + 1, w)
    assert_equal(plain[0] + 1, row)
    assert w.offload_path.exists()


class Rows(Dataset):  # type: ignore[type-arg]
    """The rows of an offloaded table."""

    def __init__(self, table: OffloadedTensor) -> None:
        self.table = table

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, row: int) -> torch.Tensor:
        assert offload.is_offloaded(self.table)
        return self.table[row]


@pytest.mark.parametrize("way", [None, "fork", "forkserver"])
def test_a_data_loader_reads_rows(way: str | None, plain: torch.Tensor) -> None:
    workers = {"num_workers": 2, "multiprocessing_context": context_of(way)} if way else {}
    batches = list(DataLoader(Rows(offloaded(plain)), batch_size=16, **workers))

    assert all(type(batch) is torch.Tensor for batch in batches)
    assert_equal(plain, torch.cat(batches))


@pytest.mark.parametrize("is_recipe", [False, True])
def test_a_worker_may_send_offloaded_tensors_on(plain: torch.Tensor, is_recipe: bool) -> None:
    """Views of a table of this process come back as views of it."""
    stored, expected = offloaded(plain), plain.double() if is_recipe else plain
    w: Any = deferred(stored).double().stored("w") if is_recipe else stored  # type: ignore[attr-defined]
    loader = DataLoader(Rows(w), batch_size=None, num_workers=1, multiprocessing_context=context_of("forkserver"))

    rows = list(loader)

    assert all(row._handle is w._handle for row in rows)
    assert_equal(expected, torch.stack(rows))
