"""Batches in lockstep, beside others' tensors, processes, warnings, and the compiler."""

from __future__ import annotations

import copy
import gc
import multiprocessing
import pickle
import sys
import threading
import warnings
import weakref
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offload
from offload.batches import waiting
from offload.batches.mapping import map_batches
from offload.batches.waiting import tensors_in, waiting_bytes
from offload.prefetch.plan import Pool
from offload.storage.mapping import swapped_in, swapped_out

WIDTH, ROWS = 64, 512


class Positions(nn.Module):
    """Returns tensors that it holds: a buffer, a part of a parameter, and one created by its first call."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.randn(ROWS, WIDTH))
        self.learned = nn.Parameter(torch.randn(2 * ROWS, WIDTH))
        self.cached: dict[int, torch.Tensor] = {}

    def forward(self, x: torch.Tensor) -> tuple[Any, ...]:
        if len(x) not in self.cached:
            self.cached[len(x)] = torch.ones(len(x), WIDTH)
        return self.table, self.learned[: len(x)], self.cached[len(x)]


class Layer(nn.Module):
    """Passes on its input, beside its result."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, *others: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (self.linear(x) + sum(others), *others)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.positions = Positions()
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        others = self.positions(x)
        for layer in self.layers:
            x, *others = layer(x, *others)
        return x


def equal(expected: Any, found: Any) -> bool:
    expected, found = list(expected), list(found)
    return len(expected) == len(found) and all(map(torch.equal, expected, found))


def layers(depth: int = 3, width: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)))


@torch.no_grad()
def test_tensors_that_a_module_holds_and_returns_are_not_spilled():
    """Other batches use it at the same time."""
    model = Model()
    batches = [torch.randn(ROWS, WIDTH) for _ in range(4)]

    assert equal(map(model, batches), map_batches(model, batches, model, in_flight=4, spill=True))


@torch.no_grad()
def test_tensors_that_batches_share_are_not_spilled_when_a_module_returns_them():
    model = Model()
    shared = torch.randn(ROWS, WIDTH)
    batches = [torch.randn(ROWS, WIDTH) for _ in range(4)]

    def fn(x: torch.Tensor) -> torch.Tensor:
        mask = shared
        for layer in model.layers:
            x, mask = layer(x, mask)
        return x

    assert equal(map(fn, batches), map_batches(fn, batches, model, in_flight=4, spill=True))


@torch.no_grad()
def test_tensors_that_pass_through_a_module_are_spilled(monkeypatch):
    """In-place layers pass on what the first of them was given."""
    on_disk: set[int] = set()

    def out(address: int, *rest: int) -> None:
        swapped_out(address, *rest)
        on_disk.add(address)

    def back(address: int, nbytes: int) -> None:
        swapped_in(address, nbytes)
        on_disk.remove(address)

    monkeypatch.setattr(waiting, "swapped_out", out)
    monkeypatch.setattr(waiting, "swapped_in", back)

    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.randn(WIDTH))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(len(on_disk))
            return x.add_(self.bias)

    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), *(InPlace() for _ in range(3)))
    batches = [torch.randn(ROWS, WIDTH) for _ in range(3)]
    seen: list[int] = []
    expected = [model(batch) for batch in batches]
    seen.clear()

    found = list(map_batches(model, batches, model, in_flight=3, spill=True))

    assert equal(expected, found)
    assert sum(count > 0 for count in seen) > 2 * len(batches)
    assert not on_disk


@torch.no_grad()
def test_a_process_that_a_batch_forks_can_call_the_model():
    model = layers()
    context = multiprocessing.get_context("fork")

    def fn(x: torch.Tensor) -> int | None:
        model(x)
        child = context.Process(target=model, args=(x,))
        child.start()
        child.join(10)
        child.kill()
        return child.exitcode

    assert [0] == list(map_batches(fn, [torch.ones(1, 4)], model, in_flight=2))


@torch.no_grad()
def test_each_batch_catches_its_own_warnings_and_streams():
    model = layers()
    before, stream = list(warnings.filters), sys.stdout

    def fn(at: int) -> str:
        with warnings.catch_warnings(record=True) as caught, redirect_stdout(StringIO()) as said:
            warnings.simplefilter("always")
            model(torch.ones(1, 4))
            warnings.warn(f"warning {at}", stacklevel=1)
            print(f"line {at}")
        return f"{caught[0].message}, {said.getvalue()}"

    found = list(map_batches(fn, range(4), model, in_flight=4))

    assert [f"warning {at}, line {at}\n" for at in range(4)] == found
    assert before == list(warnings.filters)
    assert stream is sys.stdout


@torch.no_grad()
def test_a_compiled_model_does_not_compile_the_waiting():
    model = layers()
    compiled = torch.compile(model, backend="eager")
    batches = [torch.full((1, 4), float(at)) for at in range(4)]

    found = list(map_batches(compiled, batches, compiled, in_flight=3))

    assert equal(map(model, batches), found)
    files = [one.co_filename for one in torch._dynamo.utils.get_compilation_metrics()]
    assert files
    assert {"delegated_call.py"} >= {Path(file).name for file in files if "offload/batches" in str(file)}


@torch.no_grad()
def test_batches_pass_a_scripted_model_one_after_the_other():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = torch.jit.script(layers())

    assert 3 == len(list(map_batches(model, [torch.ones(1, 4)] * 3, model, in_flight=2)))


@torch.no_grad()
@pytest.mark.parametrize("ways", ["close", "error", "finish"])
def test_nothing_is_held_if_a_batch_calls_the_model_while_it_is_stopped(ways):
    model = offload.disk_offload(layers(width=256))

    def fn(at: int) -> int:
        try:
            model(torch.ones(1, 256))
            if ways == "error" and at == 1:
                raise ValueError
            model(torch.ones(1, 256))
        finally:
            try:
                model(torch.ones(1, 256))
            except BaseException:
                model[0](torch.ones(1, 256))
        return at

    results = map_batches(fn, range(6), model, in_flight=3)
    next(results)
    if ways == "close":
        results.close()
    try:
        list(results)
    except ValueError:
        assert ways == "error"

    assert not [value for pool in Pool.all() for value in pool.values() if value.is_held]
    assert not [pool for pool in Pool.all() if pool.reserved]


@torch.no_grad()
def test_an_error_keeps_nothing_alive_once_it_is_deleted():
    """Its frames hold what the batch was working on."""
    model = layers()
    alive = []

    def fn(x: torch.Tensor) -> None:
        x = model(x)
        alive.append(weakref.ref(x))
        raise KeyError("gone")

    gc.disable()
    try:
        with pytest.raises(KeyError, match="gone") as raised:
            list(map_batches(fn, [torch.ones(1, 4)], model))
        del raised

        assert alive[0]() is None
    finally:
        gc.enable()


@torch.no_grad()
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_made_between_results_is_an_ordinary_model(copied):
    model = layers()
    x = torch.ones(1, 4)
    expected = model(x)
    results = map_batches(model, [x] * 6, model, in_flight=3)
    next(results)
    other = copied(model)

    assert torch.equal(expected, other(x))
    assert 5 == len(list(results))
    assert torch.equal(expected, other(x))


MASKS: dict[int, torch.Tensor] = {}


def cached_mask(size: int) -> torch.Tensor:
    if size not in MASKS:
        MASKS[size] = torch.full((size, 64), 2.0)
    return MASKS[size]


class Masking(nn.Module):
    """Passes on what a function has made, and holds."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64))

    def forward(self, x: torch.Tensor, _: object = None) -> tuple[torch.Tensor, torch.Tensor]:
        mask = cached_mask(len(x))
        return x * self.weight + mask, mask


@torch.no_grad()
@pytest.mark.parametrize("writes", [False, True])
def test_tensors_cached_by_a_function_stay_available_while_spilled(writes):
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Masking() for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            mask = None
            for layer in self.layers:
                x, mask = layer(x, mask)
                if writes:
                    mask += 1
                x = x * mask.mean()
            return x

    MASKS.clear()
    model = Model()
    batches = [torch.full((4096, 64), float(at)) for at in range(4)]
    found = list(map_batches(model, batches, model, in_flight=4, spill=True))
    if writes:  # then batches are not independent, however they are called
        assert torch.equal(torch.full((4096, 64), 2.0 + 4 * 4), MASKS[4096])
    else:
        assert equal(map(model, batches), found)


def test_kv_caches_count_as_waiting_memory():
    from transformers.cache_utils import DynamicCache, EncoderDecoderCache

    cache = DynamicCache()
    cache.update(torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 4), 0)
    both = EncoderDecoderCache(cache, DynamicCache())

    for one in (cache, both):
        assert 2 * 24 * 4 == waiting_bytes(tensors_in(((), {"past_key_values": one}), caches=True))


@torch.no_grad()
def test_different_threads_may_advance_the_iterator_in_turn():
    model = layers()
    batches = [torch.full((1, 4), float(at)) for at in range(5)]
    results = map_batches(model, batches, model, in_flight=2)
    found: list[torch.Tensor] = []
    for _ in batches:
        thread = threading.Thread(target=lambda: found.append(next(results)))
        thread.start()
        thread.join()

    assert equal(map(model, batches), found)
    assert [] == list(results)
