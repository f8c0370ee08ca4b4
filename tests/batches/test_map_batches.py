"""Batches in lockstep give the same results as one by one, and leave nothing behind."""

import contextvars
import gc
import random
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

import offload
from offload.batches.mapping import map_batches
from offload.errors import MapError
from tests.batches.lockstep import assert_as_one_by_one, equal

ROWS, WIDTH, DEPTH = 2, 16, 4


class Layered(nn.Module):
    """An embedding, layers, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))
        self.head = nn.Linear(WIDTH, 32)
        self.order: list[int] = []

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = torch.tanh(layer(x)) + x
        return self.head(x)


@pytest.fixture
def model() -> Layered:
    torch.manual_seed(0)
    return offload.disk_offload(Layered())


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    gc.collect()
    left = [one for one in threading.enumerate() if one not in before and one.name.startswith("offload-batch")]
    assert not left


def tokens(count: int, seed: int = 1) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 32, (ROWS, 3), generator=generator) for _ in range(count)]


def visits(model: nn.Module) -> list[tuple[str, int]]:
    """Records which layers each batch has visited; batches are identified by thread name."""
    seen: list[tuple[str, int]] = []
    for at, layer in enumerate(model.layers):  # type: ignore[union-attr, arg-type]
        layer.register_forward_hook(lambda *_, at=at: seen.append((threading.current_thread().name[-1], at)))
    return seen


@torch.no_grad()
@pytest.mark.parametrize("in_flight", [1, 2, 3, 8, None])
def test_results_are_those_of_one_by_one_in_order(model, in_flight):
    assert_as_one_by_one(model, tokens(7), model, in_flight=in_flight)


@torch.no_grad()
def test_each_layer_runs_for_all_batches_before_the_next_one(model):
    seen = visits(model)
    list(map_batches(model, tokens(3), model, in_flight=3))

    assert [(str(batch), layer) for layer in range(DEPTH) for batch in range(3)] == seen


@torch.no_grad()
def test_the_next_batch_starts_when_one_ends(model):
    batches, began = tokens(6), []

    def fn(at: int) -> torch.Tensor:
        began.append(at)
        x = model(batches[at])
        return model(batches[at]) if at in (0, 1) else x

    found = list(map_batches(fn, range(6), model, in_flight=3))

    assert equal([model(batch) for batch in batches], found)
    assert began == list(range(6))


@torch.no_grad()
def test_unordered_results_come_as_they_are_ready(model):
    def fn(at: int) -> int:
        for _ in range(3 - at):
            model(tokens(1)[0])
        return at

    assert [2, 1, 0] == list(map_batches(fn, range(3), model, in_flight=3, ordered=False))
    assert [0, 1, 2] == list(map_batches(fn, range(3), model, in_flight=3))


@torch.no_grad()
def test_batches_are_taken_from_the_iterable_as_they_begin(model):
    taken = []

    def batches() -> Iterator[torch.Tensor]:
        for at, batch in enumerate(tokens(20)):
            taken.append(at)
            yield batch

    results = map_batches(model, batches(), model, in_flight=2)
    next(results)

    assert len(taken) <= 4
    results.close()


@torch.no_grad()
def test_an_iterator_that_is_never_advanced_leaves_nothing_and_an_empty_iterable_gives_none(model):
    hooks = [len(layer._forward_pre_hooks) for layer in model.layers]
    map_batches(model, tokens(2), model)

    assert [] == list(map_batches(model, [], model))
    assert hooks == [len(layer._forward_pre_hooks) for layer in model.layers]


@torch.no_grad()
def test_models_in_memory_and_without_values_are_allowed():
    plain = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    batches = [torch.ones(1, 2) * at for at in range(3)]

    assert equal([plain(one) for one in batches], list(map_batches(plain, batches, plain)))
    assert equal(batches, list(map_batches(nn.Identity(), batches, nn.Identity())))


def world() -> tuple[Any, ...]:
    x = torch.ones(2, 2)
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        torch.empty(0).device.type,
        (x @ x).dtype,
        _VARIABLE.get(),
    )


_VARIABLE: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="unset")


@contextmanager
def _default_dtype() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    "context",
    [
        torch.no_grad,
        torch.enable_grad,
        torch.inference_mode,
        lambda: torch.autocast("cpu", torch.bfloat16),
        lambda: torch.device("meta"),
        _default_dtype,
    ],
    ids=["no_grad", "enable_grad", "inference_mode", "autocast", "device", "dtype"],
)
def test_a_batch_inherits_the_state_of_the_callers_thread(context):
    layers = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    token = _VARIABLE.set("set")
    try:
        with context():
            expected = world()

            found = list(map_batches(lambda _: world(), range(3), layers, in_flight=2))
    finally:
        _VARIABLE.reset(token)

    assert [expected] * 3 == found


@pytest.mark.parametrize("was", [False, True])
def test_a_batch_leaves_how_strict_torch_is_about_determinism_as_it_was(was):
    layers = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    torch.use_deterministic_algorithms(False, warn_only=was)

    def changing(_: int) -> bool:
        torch.use_deterministic_algorithms(False, warn_only=not was)
        return torch.is_deterministic_algorithms_warn_only_enabled()

    try:
        assert [not was] * 3 == list(map_batches(changing, range(3), layers, in_flight=2))
        assert was == torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False, warn_only=False)


@torch.no_grad()
def test_offloading_applies_inside_batches(model):
    with offload.offloading(min_bytes=64):
        found = list(map_batches(lambda batch: model(batch) @ torch.ones(32, 64), tokens(3), model, in_flight=3))

    assert all(map(offload.is_offloaded, found))


def test_settings_that_a_batch_makes_are_its_own(model):
    """Overlapping `with` blocks would restore each other's settings."""
    batches = tokens(4)

    def fn(at: int) -> torch.dtype:
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64 if at % 2 else torch.bfloat16)
        model(batches[at])
        found = torch.get_default_dtype()
        torch.set_default_dtype(before)
        return found

    found = list(map_batches(fn, range(4), model, in_flight=4))

    assert [torch.bfloat16, torch.float64] * 2 == found
    assert torch.get_default_dtype() == torch.float32


@torch.no_grad()
def test_random_numbers_do_not_depend_on_what_is_in_flight(model):
    def fn(batch: torch.Tensor) -> torch.Tensor:
        return model(batch) + torch.rand(()) + torch.rand(())

    found = []
    for in_flight in (1, 2, 5):
        torch.manual_seed(7)
        found.append(list(map_batches(fn, tokens(5), model, in_flight=in_flight)))

    assert equal(found[0], found[1])
    assert equal(found[0], found[2])
    assert 5 == len({float((a - b).sum()) for a, b in zip(found[0], map(model, tokens(5)), strict=True)})


@torch.no_grad()
def test_the_callers_generator_advances_only_if_a_batch_used_random_numbers(model):
    state = torch.get_rng_state()
    list(map_batches(model, tokens(2), model))
    after_none = torch.get_rng_state()
    list(map_batches(lambda _: torch.rand(1), tokens(2), model))

    assert torch.equal(state, after_none)
    assert not torch.equal(state, torch.get_rng_state())


@torch.no_grad()
@pytest.mark.parametrize("what", ["function mode", "saved tensors"])
def test_modes_left_in_a_thread_do_not_reach_the_next_batch(model, what):
    from torch.autograd.graph import saved_tensors_hooks
    from torch.overrides import TorchFunctionMode

    class Adding(TorchFunctionMode):
        def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    def pack(x: torch.Tensor) -> torch.Tensor:
        seen.append(x)
        return x

    ways: dict[str, Callable[[], object]] = {
        "function mode": lambda: Adding().__enter__(),
        "saved tensors": lambda: saved_tensors_hooks(pack, lambda x: x).__enter__(),
    }
    seen: list[Any] = []

    def fn(at: int) -> int:
        with torch.enable_grad():
            if at == 0:
                ways[what]()
            before = len(seen)
            (torch.ones(2, requires_grad=True) ** 2).sum()
        return len(seen) - before

    first, *others = map_batches(fn, range(4), model, in_flight=1)

    assert first > 0
    assert [0, 0, 0] == others


@torch.no_grad()
def test_a_batch_that_flushes_denormal_numbers_does_so_for_itself(model):
    def fn(at: int) -> float:
        found = (torch.full((), 1e-40) * 0.5).item()
        torch.set_flush_denormal(at == 1)
        return found

    assert [True] * 4 == [one > 0 for one in map_batches(fn, range(4), model, in_flight=1)]


@torch.no_grad()
def test_kernels_of_a_batch_use_the_callers_number_of_threads_at_its_start(model):
    threads = torch.get_num_threads()
    results = map_batches(lambda _: torch.get_num_threads(), tokens(3), model, in_flight=1)
    try:
        assert threads == next(results)
        torch.set_num_threads(threads + 1)
        assert [threads + 1] * 2 == list(results)
    finally:
        torch.set_num_threads(threads)


class Failure(Exception):
    pass


@torch.no_grad()
@pytest.mark.parametrize("in_flight", [1, 3])
def test_an_exception_is_raised_in_place_of_its_result(model, in_flight):
    def fn(at: int) -> int:
        model(tokens(1)[0])
        if at == 2:
            raise Failure
        model(tokens(1)[0])
        return at

    found: list[int] = []
    with pytest.raises(Failure) as failed:
        found.extend(map_batches(fn, range(6), model, in_flight=in_flight))

    assert [0, 1] == found
    assert ["in batch 2"] == failed.value.__notes__


@torch.no_grad()
def test_an_error_of_the_iterable_is_raised_after_earlier_results(model):
    def batches() -> Iterator[torch.Tensor]:
        yield from tokens(2)
        raise Failure

    found: list[torch.Tensor] = []
    with pytest.raises(Failure):
        found.extend(map_batches(model, batches(), model, in_flight=4))

    assert equal([model(one) for one in tokens(2)], found)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["register_forward_pre_hook", "register_forward_hook"])
def test_a_hook_that_raises_is_an_exception_of_its_batch(model, kind):
    def hook(*_: object) -> None:
        raise Failure

    handle = getattr(model.layers[2], kind)(hook)
    with pytest.raises(Failure):
        list(map_batches(model, tokens(3), model, in_flight=3))
    handle.remove()

    assert 3 == len(list(map_batches(model, tokens(3), model, in_flight=3)))


@torch.no_grad()
def test_closing_stops_every_batch_and_runs_its_cleanup(model):
    ended = []

    def fn(at: int) -> None:
        try:
            model(tokens(1)[0])
            model(tokens(1)[0])
        finally:
            ended.append(at)

    hooks = [len(layer._forward_pre_hooks) for layer in model.layers]
    results = map_batches(fn, range(9), model, in_flight=3)
    next(results)
    results.close()

    assert sorted(ended) == list(range(len(ended)))
    assert hooks == [len(layer._forward_pre_hooks) for layer in model.layers]


@torch.no_grad()
def test_an_interrupt_stops_every_batch(model):
    def fn(at: int) -> None:
        model(tokens(1)[0])
        if at == 1:
            signal.raise_signal(signal.SIGINT)
        model(tokens(1)[0])

    with pytest.raises(KeyboardInterrupt):
        list(map_batches(fn, range(4), model, in_flight=4))


@torch.no_grad()
def test_another_interrupt_leaves_no_thread_behind(model):
    """While waiting for batches to end."""
    has_left = threading.Event()

    def fn(at: int) -> int:
        try:
            for _ in range(1 + at):
                model(tokens(1)[0])
        finally:
            if at == 1:
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
                has_left.wait(10)
        return at

    results = map_batches(fn, range(8), model, in_flight=4)
    next(results)
    running = [thread for thread in threading.enumerate() if thread.name.startswith("offload-batch")]
    with pytest.raises(KeyboardInterrupt):
        results.close()
    has_left.set()

    assert len(running) >= 3
    assert all_end(running)


def all_end(threads: list[threading.Thread]) -> bool:
    for thread in threads:
        thread.join(10)
    return not any(thread.is_alive() for thread in threads)


def catching_all(model: nn.Module, *, first: Callable[[], object], again: Callable[[], object]) -> Callable[[int], int]:
    """A function that tries again whatever happens; it begins with `first`, and calls `again` after each failure."""

    def fn(at: int) -> int:
        if at:
            first()
        while at:
            try:
                model(tokens(1)[0])
                break
            except BaseException:
                again()
        return at

    return fn


def hooked(model: nn.Module) -> list[nn.Module]:
    return [layer for layer in model.modules() if layer._forward_hooks or "forward" in vars(layer)]


@torch.no_grad()
@pytest.mark.parametrize("where", ["close", "next"])
def test_a_second_interrupt_ends_the_wait_for_a_function_that_catches_everything(model, where):
    has_left, main = threading.Event(), threading.main_thread().ident or 0
    running: list[threading.Thread] = []
    failures, was_left = iter(range(1_000_000)), []

    def first() -> None:
        running.append(threading.current_thread())
        if where == "next":
            signal.pthread_kill(main, signal.SIGINT)

    def again() -> None:
        if next(failures) == 3:
            signal.pthread_kill(main, signal.SIGINT)
            was_left.append(has_left.wait(10))

    results = map_batches(catching_all(model, first=first, again=again), range(3), model, in_flight=3)
    assert 0 == next(results)
    if where == "close":
        assert 1 == next(results)
    with pytest.raises(KeyboardInterrupt):
        results.close() if where == "close" else next(results)
    has_left.set()

    assert all_end(running)
    assert was_left == [True]
    assert not hooked(model)


@torch.no_grad()
def test_any_pattern_of_calls_ends_with_correct_results():
    """Layers are called out of order, twice, or not at all; batches raise; there are two models."""
    torch.manual_seed(0)
    models = [offload.disk_offload(Layered()), Layered()]
    layers = [layer for model in models for layer in (*model.layers, model.head)]
    rng = random.Random(0)
    for _ in range(60):
        ways = [[rng.randrange(len(layers)) for _ in range(rng.randrange(12))] for _ in range(rng.randrange(1, 9))]
        raising = {at for at in range(len(ways)) if rng.random() < 0.1}

        def fn(at: int, ways: Any = ways, raising: Any = raising) -> torch.Tensor:
            x = torch.full((1, WIDTH), float(at))
            for step in ways[at]:
                y = layers[step](x)
                x = x + y[:, :WIDTH]
            if at in raising:
                raise Failure
            return x

        expected = []
        for at in range(len(ways)):
            if at in raising:
                break
            expected.append(fn(at))
        found = []
        try:
            for result in map_batches(fn, range(len(ways)), models, in_flight=rng.randrange(1, 6)):
                found.append(result)
        except Failure:
            assert raising
        assert equal(expected, found)


@torch.no_grad()
def test_a_mapping_inside_a_batch_is_its_own(model):
    def fn(batch: torch.Tensor) -> torch.Tensor:
        return torch.stack(list(map_batches(model, [batch, batch + 1 - 1], model, in_flight=2)))

    assert equal([torch.stack([model(one)] * 2) for one in tokens(3)], list(map_batches(fn, tokens(3), model)))


@torch.no_grad()
def test_other_threads_can_call_the_model_meanwhile(model):
    batch = tokens(1)[0]
    results = map_batches(model, tokens(4), model, in_flight=2)
    first = next(results)
    other: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: other.append(model(batch)))
    thread.start()
    thread.join()

    assert torch.equal(model(batch), other[0])
    assert torch.equal(model(tokens(4)[0]), first)
    assert 3 == len(list(results))


@pytest.mark.parametrize("in_flight", [1, 4])
def test_gradients_are_summed_up_in_the_order_of_the_batches(model, in_flight):
    """Backward may run after its batch has ended, too."""

    def fn(batch: torch.Tensor) -> torch.Tensor:
        loss = model(batch).logsumexp(-1).mean()
        loss.backward()
        return loss.detach()

    expected = [fn(batch) for batch in tokens(4)]
    gradients = [one.grad.clone() for one in model.parameters()]
    model.zero_grad()
    found = list(map_batches(fn, tokens(4), model, in_flight=in_flight))

    assert equal(expected, found)
    assert equal(gradients, [one.grad for one in model.parameters()])
    model.zero_grad()
    [out] = map_batches(model, tokens(1), model)
    out.sum().backward()
    assert all(one.grad is not None for one in model.parameters())


def test_backward_goes_down_in_lockstep(model):
    seen: list[tuple[str, int]] = []
    for at, layer in enumerate(model.layers):
        layer.weight.register_hook(lambda _, at=at: seen.append((threading.current_thread().name[-1], at)))
    list(map_batches(lambda batch: model(batch).sum().backward(), tokens(3), model, in_flight=3))

    assert [(str(batch), layer) for layer in reversed(range(DEPTH)) for batch in range(3)] == seen


def test_checkpointing_works_inside_a_batch(model):
    from torch.utils.checkpoint import checkpoint

    def fn(batch: torch.Tensor) -> None:
        x = model.embed(batch)
        for layer in model.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        x.sum().backward()

    for batch in tokens(3):
        fn(batch)
    expected = [one.grad.clone() for one in model.layers.parameters()]
    model.zero_grad()
    list(map_batches(fn, tokens(3), model, in_flight=3))

    assert equal(expected, [one.grad for one in model.layers.parameters()])


def _yielding(batch: torch.Tensor) -> Iterator[torch.Tensor]:
    yield batch


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda m: map_batches(m, [], 1), TypeError, "not iterable"),
        (lambda m: map_batches(m, 1, m), TypeError, "not iterable"),
        (lambda m: map_batches(_yielding, [], m), TypeError, "generator"),
        (lambda m: map_batches(m, [], m, in_flight=0), offload.errors.ArgumentError, "in_flight"),
        (lambda m: map_batches(m, [], m, in_flight=1.5), TypeError, "float"),
        (lambda m: map_batches(m, [], m, blocks=["layers.9"]), offload.errors.ArgumentError, "layers.9"),
        (lambda m: map_batches(m, [], m, blocks=[nn.Linear(1, 1)]), offload.errors.ArgumentError, "not part"),
        (lambda m: map_batches(m, [], m, blocks=[3]), offload.errors.ArgumentError, "not part"),
    ],
)
def test_bad_arguments_raise_before_iteration(model, call, error, words):
    with pytest.raises(error, match=words):
        call(model)


def test_map_batches_is_refused_inside_a_transform_of_torch_func(model):
    with pytest.raises(offload.OffloadError, match="one"):
        torch.func.vmap(lambda x: next(map_batches(model, [x], model)))(torch.zeros(2, 1, 3, dtype=torch.int64))


@torch.no_grad()
def test_blocks_can_be_named(model):
    seen = visits(model)
    list(map_batches(model, tokens(2), model, in_flight=2, blocks=["layers.1", model.layers[3]]))

    assert [(str(batch), layer) for batch in range(2) for layer in range(3)] + [("0", 3), ("1", 3)] == seen


def _along(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(model(forward_ad.make_dual(batch, torch.ones_like(batch)))).tangent


TRANSFORMS: dict[str, Callable[[nn.Module, torch.Tensor], Any]] = {
    "vmap": lambda model, batch: torch.func.vmap(model)(batch),
    "grad": lambda model, batch: torch.func.grad(lambda x: model(x).sum())(batch),
    "jvp": lambda model, batch: torch.func.jvp(model, (batch,), (torch.ones_like(batch),))[1],
    "jacrev": lambda model, batch: torch.func.jacrev(model)(batch),
    "forward mode": _along,
}


@pytest.mark.parametrize("is_grad", [True, False])
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_a_function_may_use_transforms_of_torch_func_and_forward_mode(transform, is_grad):
    torch.manual_seed(0)
    model = offload.disk_offload(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))))

    def fn(batch: torch.Tensor) -> torch.Tensor:
        before = model(batch)
        return model(transform(model, before.detach())).detach()

    with torch.set_grad_enabled(is_grad):
        assert_as_one_by_one(fn, torch.randn(5, ROWS, WIDTH), model, in_flight=3)


def test_stop_iteration_is_an_error_of_its_batch_and_does_not_end_the_results(model):
    def fn(batch: int) -> int:
        return next(iter([])) if batch == 2 else batch

    results = map_batches(fn, range(4), model, in_flight=1)

    assert [0, 1] == [next(results), next(results)]
    with pytest.raises(MapError, match="StopIteration") as raised:
        next(results)
    assert isinstance(raised.value.__cause__, StopIteration)
    assert ["in batch 2"] == raised.value.__notes__
