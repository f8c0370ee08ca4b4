"""Fixtures for many tests.

They import what they need: the process that starts xdist's workers runs no test, and imports no torch.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.campaigns import asked, left_out

if TYPE_CHECKING:
    import torch

    from offload.prefetch.engine import Engine
    from tests.engines import Clock
    from tests.prefetch.fakes import Memory

pytest.register_assert_rewrite("tests.crashes", "tests.interrupts", "tests.acts", "tests.acts_of_rows")
with suppress(ImportError):  # `make gpu` installs nothing
    from hypothesis import HealthCheck, settings

    settings.register_profile(
        "suite", deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
    )

    def pytest_collectstart(collector: pytest.Collector) -> None:
        """Modules of torch's tests load a profile of theirs, with ten examples."""
        if isinstance(collector, pytest.Module):
            settings.load_profile("suite")


if signal.getsignal(signal.SIGINT) is signal.SIG_IGN and threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore Ctrl-C
for library in ("HF_HUB", "TRANSFORMERS", "HF_DATASETS"):
    os.environ.setdefault(f"{library}_OFFLINE", "1")


def _compute_with_one_thread() -> None:
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


os.register_at_fork(after_in_child=_compute_with_one_thread)  # the others of an OpenMP team are in the parent alone


def pytest_configure() -> None:
    """Campaigns that do not exist are an error at once."""
    asked()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what only a campaign runs; the longest come first, so that no worker is left with one at the end."""
    config.hook.pytest_deselected(items=[item for item in items if left_out(item)])
    items[:] = sorted((item for item in items if not left_out(item)), key=_seconds, reverse=True)


@pytest.fixture(autouse=True, scope="module")
def known_objects_stay() -> None:
    """What was imported or made before stays: garbage collections, for which many tests ask, do not look at it."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """Nothing that another test compiled."""
    import torch

    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def _seconds(item: pytest.Item) -> float:
    marker = item.get_closest_marker("slow")
    return marker.args[0] if marker else 0.0


@pytest.fixture(autouse=True, scope="session")
def groups_are_formed_in_ranks() -> Iterator[None]:
    """`tests.distributed.ranks` says why."""
    import torch.distributed as dist

    form, this = dist.init_process_group, os.getpid()

    def formed(*args: object, **given: object) -> None:
        assert this != os.getpid(), "a group of the process of the tests: see tests/distributed/ranks.py"
        form(*args, **given)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "init_process_group", formed)
        yield


@pytest.fixture(autouse=True)
def fresh_prefetcher() -> None:
    """No order, plan, rate or budget that an earlier test has left."""
    from tests.engines import forget

    forget()


@pytest.fixture(autouse=True)
def exact_products(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products with packed weights are those with dense ones, in all threads, unless a test is marked `fused`."""
    from offload.tensor import bound, products

    if request.node.get_closest_marker("fused") is None:
        exact = ContextVar("exact", default=True)
        monkeypatch.setattr(products, "_exact", exact)
        monkeypatch.setattr(bound, "exactly", exact)


@pytest.fixture
def only_own_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of values that earlier tests have left does not count."""
    from tests.engines import be_alone

    be_alone(monkeypatch)


@pytest.fixture
def still_clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of rules that depend on time, which stands still until the test moves it."""
    from offload.system import clock
    from tests.engines import Clock

    still = Clock()
    monkeypatch.setattr(clock, "now", still)
    return still


@pytest.fixture(scope="session")
def delayed_library(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The accelerator of `tests/prefetch/delayed_device.cpp`, built."""
    from tests.prefetch import delayed_device

    if delayed_device.COMPILER is None:
        pytest.skip("needs a C++ compiler, for an accelerator of its own")
    cache = getattr(pytestconfig, "cache", None)
    return delayed_device.built(cache.mkdir("delayed-device") if cache else tmp_path_factory.mktemp("delayed-device"))


@pytest.fixture(scope="session")
def llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama in bfloat16 with tied embeddings, in several safetensors shards."""
    from tests.tiny import tiny_checkpoint

    folder = tmp_path_factory.mktemp("llama")
    return tiny_checkpoint(folder, num_hidden_layers=3, tie_word_embeddings=True, dtype="bfloat16")


@pytest.fixture
def tokens() -> torch.Tensor:
    """Token ids for the tiny Llama: (2, 7)."""
    import torch

    return torch.arange(14).reshape(2, 7)


@contextmanager
def folder_in_memory() -> Iterator[str]:
    """A memory-backed folder if available: creating files on a disk is slow."""
    root = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=root) as folder:
        try:
            yield folder
        finally:
            from tests.engines import settled

            settled()  # the writer of activations may still make a file in it


@pytest.fixture
def quick_folder() -> Iterator[str]:
    with folder_in_memory() as folder:
        yield folder


def private_folders_in(folder: str, patch: pytest.MonkeyPatch) -> None:
    from offload.storage import folders

    patch.setattr(tempfile, "tempdir", folder)
    patch.setattr(folders, "_PRIVATE_FOLDERS", {})


@pytest.fixture
def private_place(quick_folder: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Such a folder, in which private folders are created, too."""
    private_folders_in(quick_folder, monkeypatch)
    return Path(quick_folder)


@pytest.fixture
def memory() -> Memory:
    """Notes what is read into it."""
    from tests.prefetch.fakes import Memory

    return Memory()


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    """A prefetcher of its own, whose reader ends soon after the test."""
    from offload.prefetch.engine import Engine
    from offload.system import background

    monkeypatch.setattr(background, "IDLE", 0.05)
    return Engine()


@pytest.fixture
def nothing_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small computed values are computed at each use, as large ones are."""
    from offload.tensor import recipes

    monkeypatch.setattr(recipes, "SMALL", 0)


@pytest.fixture(scope="module")
def quick_values() -> Iterator[None]:
    """Private folders are in memory, for all tests of a module that makes thousands of values."""
    with folder_in_memory() as folder, pytest.MonkeyPatch.context() as patch:
        private_folders_in(folder, patch)
        yield


def contents(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Every file in a folder, with modification time and bytes."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


def aligned(folder: Path) -> Path:
    """The folder, with the data of its safetensors files aligned to 64 bytes.

    Experts that are stored separately are used in place. Plain transformers joins them in fresh memory, which is
    aligned, and the kernels of some processors give other last bits for unaligned data.
    """
    for path in folder.glob("*.safetensors"):
        stored = path.read_bytes()
        data = 8 + int.from_bytes(stored[:8], "little")
        header = stored[8:data] + b" " * (-data % 64)
        path.write_bytes(len(header).to_bytes(8, "little") + header + stored[data:])
    return folder
