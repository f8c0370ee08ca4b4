"""Weak containers, which raise an error if one thread changes them while another iterates over them."""

import sys
import weakref
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offload
from offload.prefetch.engine import POOL, lock
from offload.prefetch.room import OnDevice
from offload.system.locks import _LOCKS
from offload.training import offload_activations
from tests.engines import settled

READS, CHANGES = ("__iter__", "keys", "values", "items"), ("add", "__setitem__", "setdefault", "pop")


class Log:
    """What the package does with weak containers, and which locks it holds then."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.read: dict[int, list[tuple[str, set[int]]]] = defaultdict(list)
        self.changed: dict[int, list[tuple[str, set[int]]]] = defaultdict(list)
        self._alive: list[object] = []
        for kind in (weakref.WeakSet, weakref.WeakValueDictionary, weakref.WeakKeyDictionary):
            for name in {*READS, *CHANGES} & {*vars(kind)}:
                monkeypatch.setattr(kind, name, self._noting(name, getattr(kind, name)))

    def _noting(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def noting(container: Any, *args: Any, **kwargs: Any) -> Any:
            frame = sys._getframe(1)
            while "weak" in frame.f_globals["__name__"] and frame.f_back is not None:
                frame = frame.f_back
            if frame.f_globals["__name__"].startswith("offload"):
                held = {id(one) for one in known if one._is_owned()}
                place = f"{frame.f_globals['__name__']}.{frame.f_code.co_name}"
                (self.read if name in READS else self.changed)[id(container)].append((place, held))
                self._alive.append(container)
            return method(container, *args, **kwargs)

        known: list[Any] = list(_LOCKS)
        return noting

    def unguarded(self) -> list[set[str]]:
        """The places where a container is iterated and changes without a lock that all of them hold."""
        both = [self.read[one] + self.changed[one] for one in self.read.keys() & self.changed.keys()]
        return [{place for place, _ in acts} for acts in both if not set.intersection(*(held for _, held in acts))]


def _under_budgets(folder: Path) -> None:
    offload.save_checkpoint(nn.Sequential(*(nn.Linear(512, 512) for _ in range(4))), folder)
    models = [nn.Sequential(*(nn.Linear(512, 512) for _ in range(4))) for _ in range(2)]
    for model in models:
        offload.load_checkpoint_and_dispatch(model, folder, max_memory="2MiB", read_ahead="1MiB")
    list(offload.map_batches(models[0], [torch.ones(1, 512)] * 3, models[0], in_flight=2))
    models[1](torch.ones(1, 512))
    offload.memory_summary()


def _on_a_device(folder: Path) -> None:
    with lock():
        POOL.on_devices.setdefault(torch.device("meta"), OnDevice(0, torch.device("meta")))
    offload.memory_summary()


def _of_activations(folder: Path) -> None:
    x = torch.ones(1000, requires_grad=True)
    with offload_activations(min_bytes=1000):
        y = x.exp().exp().exp().sum()
    settled()
    y.backward()


def test_a_weak_container_that_is_iterated_changes_under_the_same_lock(tmp_path, monkeypatch):
    """Some lock is held at each iteration and at each change of it."""
    log = Log(monkeypatch)
    for number, act in enumerate((_under_budgets, _on_a_device, _of_activations)):
        (tmp_path / str(number)).mkdir()
        act(tmp_path / str(number))

    assert 3 < len(log.read.keys() & log.changed.keys())
    assert [] == log.unguarded()
