"""Blocks compute in the iterating thread, where the state of a batch's thread can be carried over."""

import contextvars
import inspect
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import offload
from offload.batches.mapping import map_batches
from tests.batches.lockstep import assert_as_one_by_one

WIDTH = 8
NOTES: contextvars.ContextVar[tuple[str, ...]] = contextvars.ContextVar("notes", default=())


class Block(nn.Module):
    """Records what each call finds: the thread and its state."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.threads: list[threading.Thread] = []
        self.states: list[Any] = []
        self.act: Callable[[], object] = lambda: None

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        self.threads.append(threading.current_thread())
        self.states.append(state())
        self.act()
        return self.linear(x) * scale


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, scale=2.0)
        return x

    def noted(self) -> list[list[threading.Thread]]:
        return [block.threads for block in self.blocks]  # type: ignore[misc]

    def threads(self) -> set[threading.Thread]:
        return {thread for block in self.blocks for thread in block.threads}  # type: ignore[union-attr]


def state() -> tuple[Any, ...]:
    """What kernels and modules ask their thread for."""
    return (
        *(torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype()),
        *(torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.get_num_threads()),
        NOTES.get(),
    )


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    return offload.disk_offload(Model())


def inputs(count: int) -> list[torch.Tensor]:
    return [torch.full((2, WIDTH), 0.1 * at) for at in range(1, count + 1)]


@torch.no_grad()
@pytest.mark.parametrize("in_flight", [1, 3])
def test_blocks_of_all_batches_compute_in_the_iterating_thread(model, in_flight):
    rest: list[threading.Thread] = []

    def fn(x: torch.Tensor) -> torch.Tensor:
        rest.append(threading.current_thread())
        return model(x)

    assert_as_one_by_one(fn, inputs(5), model, rest, *model.noted(), in_flight=in_flight)
    assert {threading.current_thread()} == model.threads()
    assert threading.current_thread() not in rest


class Plain(TorchDispatchMode):
    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return op(*args, **(kwargs or {}))


class Passing(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


@contextmanager
def one_thread_more() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def no_denormals() -> Iterator[None]:
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


@torch.no_grad()
@pytest.mark.parametrize(
    "context", [torch.enable_grad, Plain, Passing, lambda: torch.device("cpu"), one_thread_more, no_denormals]
)
def test_a_state_that_cannot_be_carried_over_stays_in_its_thread(model, context):
    def fn(x: torch.Tensor) -> torch.Tensor:
        with context():
            return model(x)

    assert_as_one_by_one(fn, inputs(3), model, *model.noted(), in_flight=2)
    assert threading.current_thread() not in model.threads()


@torch.no_grad()
def test_an_iterating_thread_inside_a_mode_leaves_blocks_to_the_batches(model):
    results = map_batches(model, inputs(3), model, in_flight=2)
    with Passing():
        list(results)

    assert threading.current_thread() not in model.threads()


@torch.no_grad()
def test_a_forward_set_on_the_module_is_not_replaced(model):
    own = model.blocks[1].forward = model.blocks[1].forward
    list(map_batches(model, inputs(3), model, in_flight=2))

    assert threading.current_thread() not in model.blocks[1].threads
    assert {threading.current_thread()} == {*model.blocks[0].threads}
    assert own is vars(model.blocks[1])["forward"]
    assert "forward" not in vars(model.blocks[0])


@torch.no_grad()
def test_inner_blocks_compute_in_the_iterating_thread(model):
    outer = nn.Sequential(nn.Sequential(*model.blocks[:2]), model.blocks[2])
    order, blocks = visits(model), [outer[0], *outer[0], outer[1]]

    assert_as_one_by_one(outer, inputs(2), outer, order, *model.noted(), in_flight=2, blocks=blocks)
    assert {threading.current_thread()} == model.threads()
    assert [0, 0, 1, 1, 2, 2] == order


def visits(model: Model) -> list[int]:
    """The numbers of blocks, as they compute."""
    order: list[int] = []
    for at, block in enumerate(model.blocks):
        block.act = partial(torch.compiler.disable(order.append), at)  # type: ignore[assignment]
    return order


@torch.no_grad()
@pytest.mark.parametrize("hooks", [False, True])
def test_compiled_batches_wait_for_one_another(model, hooks):
    expected = [model(x) for x in inputs(2)]
    if hooks:
        for block in model.blocks:
            block.register_forward_pre_hook(lambda *_: None)
    order = visits(model)
    compiled = torch.compile(model, backend="eager")
    found = list(map_batches(compiled, inputs(2), compiled, in_flight=2))

    assert all(map(torch.equal, expected, found))
    assert [0, 0, 1, 1, 2, 2] == order


WORLDS: list[Callable[[], AbstractContextManager[Any]]] = [
    nullcontext,
    torch.no_grad,
    torch.inference_mode,
    lambda: torch.autocast("cpu", torch.bfloat16),
    lambda: torch.autocast("cpu", torch.float16),
]


@pytest.mark.parametrize("outside", WORLDS)
@pytest.mark.parametrize("inside", WORLDS)
def test_a_block_finds_the_state_of_its_batch(model, outside, inside):
    def fn(x: torch.Tensor) -> torch.Tensor:
        NOTES.set(("batch",))
        with inside():
            return model(x).float().clone()

    with torch.no_grad():
        with outside():
            list(map(contextvars.copy_context().run, [fn] * 3, inputs(3)))
        expected = [block.states[:] for block in model.blocks]
        for block in model.blocks:
            block.states.clear()

        with outside():
            results = map_batches(fn, inputs(3), model, in_flight=2)
        list(results)

    assert expected == [block.states for block in model.blocks]


@torch.no_grad()
def test_context_variables_set_by_a_block_remain_after_it(model):
    model.blocks[1].act = lambda: NOTES.set((*NOTES.get(), "block"))

    def fn(name: str) -> tuple[str, ...]:
        NOTES.set((name,))
        model(torch.ones(1, WIDTH))
        return NOTES.get()

    assert [("a", "block"), ("b", "block")] == list(map_batches(fn, "ab", model, in_flight=2))
    assert NOTES.get() == ()


@torch.no_grad()
def test_an_error_of_a_block_is_raised_in_its_batch(model):
    def fail() -> None:
        if len(model.blocks[2].threads) == 2:
            raise KeyError("second")

    model.blocks[2].act = fail

    def fn(x: torch.Tensor) -> str:
        try:
            model(x)
        except KeyError as error:
            return "".join(traceback.format_exception(error))
        return ""

    first, second, third = map_batches(fn, inputs(3), model, in_flight=3)

    assert (first, third) == ("", "")
    assert "in fn" in second
    assert "in fail" in second


@torch.no_grad()
def test_an_interrupt_in_a_block_stops_every_batch(model):
    def interrupt() -> None:
        raise KeyboardInterrupt

    ended = []

    def fn(x: torch.Tensor) -> None:
        try:
            model(x)
        finally:
            ended.append(x)

    results = map_batches(fn, inputs(5), model, in_flight=3)
    model.blocks[1].act = interrupt

    with pytest.raises(KeyboardInterrupt):
        next(results)

    assert len(ended) == 3
    assert "forward" not in vars(model.blocks[0])
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("offload-batch")]


@torch.no_grad()
def test_the_signature_of_a_forward_can_be_inspected(model):
    expected = inspect.signature(model.blocks[0].forward)
    found = list(map_batches(lambda _: inspect.signature(model.blocks[0].forward), range(2), model))

    assert [expected] * 2 == found


@torch.no_grad()
def test_the_iterating_thread_reads_by_itself_between_results(model):
    other = offload.disk_offload(Model())
    expected = [other(x) for x in inputs(4)]
    found = [other(x) for x, _ in zip(inputs(4), map_batches(model, inputs(4), model, in_flight=2), strict=True)]

    assert all(map(torch.equal, expected, found))
