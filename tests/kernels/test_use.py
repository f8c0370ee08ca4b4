"""How the kernels are used: by several threads, after a fork, while signals arrive, with rows of any number."""

from __future__ import annotations

import ctypes
import mmap
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from offload.kernels import native
from offload.kernels.packed import BLOCKS, GgufRows
from tests.campaigns import amount
from tests.kernels.multiplying import multiply
from tests.kernels.test_gguf_rows import decoded, dequantized, multiplied, same_bits, tame_bytes
from tests.processes import in_fork

pytestmark = pytest.mark.skipif(native.library() is None, reason="the kernels were not built")

BEST = native.best_level()


@pytest.mark.parametrize("kind", ["Q4_K", "IQ2_XS"])
def test_eight_threads_multiply_by_the_same_rows(kind):
    rows, columns = tame_bytes(kind, 160, 512), 512
    xs = [torch.randn(count, columns, generator=torch.Generator().manual_seed(count)) for count in range(1, 9)]
    expected = [multiplied(x, rows, kind, BEST) for x in xs]
    together = threading.Barrier(8)

    def multiply(x: torch.Tensor) -> list[torch.Tensor]:
        together.wait()
        return [multiplied(x, rows, kind, BEST) for _ in range(20)]

    with ThreadPoolExecutor(8) as threads:
        found = [*threads.map(multiply, xs)]

    assert all(torch.equal(one, other) for one, others in zip(expected, found, strict=True) for other in others)


def test_a_product_does_not_wait_for_a_team_that_was_late(monkeypatch):
    """As where other programs compute; later, the team is asked again."""
    kind, calls = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint), []
    number = ctypes.CFUNCTYPE(ctypes.c_int)(lambda: 0)

    @kind
    def late(work, data, threads, flags):
        calls.append(threads)
        ctypes.CFUNCTYPE(None, ctypes.c_void_p)(work)(data)
        time.sleep(0.01)

    team = native.Team(*(ctypes.cast(one, ctypes.c_void_p) for one in (late, number, number)))
    monkeypatch.setattr(native, "_threads", lambda numbers: (2, ctypes.addressof(team)))
    rows, x = tame_bytes("Q4_K", 160, 512), torch.ones(1, 512)
    expected = multiplied(x, rows, "Q4_K", 0)

    assert all(torch.equal(expected, multiplied(x, rows, "Q4_K", 0)) for _ in range(200))
    assert 1 <= len(calls) < 100
    before = len(calls)
    while len(calls) == before:
        multiplied(x, rows, "Q4_K", 0)


def test_a_forked_child_multiplies_after_its_parent_has():
    """With several threads, which the child does not have."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    rows, x = tame_bytes("Q4_K", 160, 512), torch.ones(2, 512)
    try:
        expected = multiplied(x, rows, "Q4_K", BEST)

        assert in_fork(lambda: torch.equal(expected, multiplied(x, rows, "Q4_K", BEST)))
        assert torch.equal(expected, multiplied(x, rows, "Q4_K", BEST))
    finally:
        torch.set_num_threads(before)


def test_a_signal_during_a_product_is_served_after_it():
    """What its handler finds in the result is whole."""
    rows, x = tame_bytes("Q4_K", 160, 512).repeat(25, 1), torch.ones(4, 512)
    expected, place = multiplied(x, rows, "Q4_K", BEST), torch.empty(4, len(rows))
    matrix, found = GgufRows("Q4_K").matrix([rows], 512), []
    product = threading.Event()

    def handle(number: int, frame: object) -> None:
        found.append(not product.is_set() or torch.equal(expected, place))

    before = signal.signal(signal.SIGVTALRM, handle)
    try:
        signal.setitimer(signal.ITIMER_VIRTUAL, 1e-4, 2e-4)
        while len(found) < 10:
            multiply(matrix, x, None, place)
            product.set()
            assert torch.equal(expected, place)
            product.clear()
            place.zero_()
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)

    assert all(found)


@pytest.mark.campaign("shapes")
@pytest.mark.parametrize("is_flipped", [False, True], ids=["random", "flipped"])
def test_rows_of_random_shapes_at_any_address_and_with_flipped_bits_are_those_of_the_package(is_flipped):
    """10,000 shapes in the campaign, and 100,000 mutations. Products are right where they are finite."""
    chance, kinds = np.random.default_rng(7), list(BLOCKS)
    tame = {kind: tame_bytes(kind, 8, 2048).reshape(-1, BLOCKS[kind][1]).numpy() for kind in kinds}
    for number in range(amount("shapes", 300, 100_000) if is_flipped else amount("shapes", 60, 10_000)):
        kind, level = kinds[number % len(kinds)], int(chance.integers(BEST + 1))
        numbers, _ = BLOCKS[kind]
        high, blocks = (4, 1) if is_flipped else map(int, chance.integers(1, (40, 1 + 1024 // numbers)))
        chosen, columns = tame[kind][chance.integers(len(tame[kind]), size=high * blocks)], blocks * numbers
        for bit in chance.integers(chosen.size * 8, size=chance.integers(1, 9)) if is_flipped else ():
            chosen.reshape(-1)[bit // 8] ^= 1 << (bit % 8)
        offset, pages = int(chance.integers(64)), mmap.mmap(-1, chosen.size + 64)
        pages[offset : offset + chosen.size] = chosen.tobytes()
        rows = torch.frombuffer(memoryview(pages)[offset:], dtype=torch.uint8, count=chosen.size).view(high, -1)
        x = torch.from_numpy(chance.standard_normal((int(chance.integers(1, 12)), columns), np.float32))
        dense, place = dequantized(rows, kind), torch.full((2 + len(x), high), 7.0)

        assert same_bits(dense, decoded(rows, kind, columns, torch.float32, level)), (kind, level, chosen.tobytes())
        multiply(GgufRows(kind).matrix([rows], columns), x, None, place[1:-1], level=level)
        exact, size = x.double() @ dense.double().T, x.abs().double() @ dense.abs().double().T
        is_clear = size < 1e30  # otherwise sums overflow, here or there
        assert bool(((place[1:-1] - exact).abs() <= 3e-7 * size + 1e-30)[is_clear].all()), (
            kind,
            level,
            chosen.tobytes(),
        )
        assert bool((place[[0, -1]] == 7).all())


@pytest.mark.campaign("shapes", only=True)
def test_rows_beyond_two_to_the_31_numbers_are_found():
    """Of memory that was never written to, but for the last row: it takes no room."""
    columns, high = 1 << 16, (1 << 15) + 3
    numbers, nbytes = BLOCKS["Q4_0"]
    step = columns // numbers * nbytes
    stored = np.zeros((high, step), np.uint8)
    stored[-1] = tame_bytes("Q4_0", 1, columns).numpy()
    rows = torch.from_numpy(stored)
    assert rows.shape[0] * columns > 1 << 31

    last, x, found = dequantized(rows[-1:], "Q4_0"), torch.randn(1, columns), torch.empty(1, columns)
    product = multiplied(x, rows, "Q4_0", BEST)
    native.decode(GgufRows("Q4_0").matrix([rows], columns), high - 1, found)

    assert torch.equal(last, found)
    assert product[0, :-1].count_nonzero() == 0
    torch.testing.assert_close((x @ last.T)[0], product[0, -1:], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("is_built", [True, False])
@pytest.mark.parametrize("threads", [1, 2])
def test_bytes_are_put_where_they_belong_and_nothing_beside_them(is_built, threads, monkeypatch):
    """Pieces of no byte, and of more and less than a thread takes at a time."""
    monkeypatch.setattr(
        native, "_threads", lambda _: (threads, ctypes.addressof(native._team()) if threads > 1 else None)
    )
    if not is_built:
        monkeypatch.setattr(native, "library", lambda: None)
    sizes, begins = [5, 0, 1 << 20, 3 << 20, (2 << 20) + 7], [3, 8, 9, (1 << 20) + 64, (6 << 20) + 1]
    pieces = [torch.randint(0, 255, (size,), dtype=torch.uint8) for size in sizes]
    expected, place = torch.full((2, 9 << 20), 255, dtype=torch.uint8)
    for piece, begin in zip(pieces, begins, strict=True):
        expected[begin : begin + len(piece)] = piece

    native.gather(pieces, begins, place)

    assert torch.equal(expected, place)
