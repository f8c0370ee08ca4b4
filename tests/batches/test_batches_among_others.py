"""Batches in lockstep, beside others' tensors, processes, warnings, and the compiler."""

import gc
import multiprocessing
import sys
import threading
import warnings
import weakref
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
import torch
from torch import nn

import offload
from offload.batches.mapping import map_batches
from offload.batches.scheduler import tensors_in, waiting_bytes
from offload.prefetch.plan import Pool
from tests.batches.lockstep import equal


def layers(depth: int = 3, width: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)))


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
