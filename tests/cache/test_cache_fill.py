"""Computing missing rows: batch by batch, and resuming where a job was stopped."""

from __future__ import annotations

import os
import threading
from functools import partial

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, StackDataset

from offload import TensorCache, map_batches, progress
from offload.errors import ArgumentError, ArgumentTypeError, CacheError, ColumnError, MapError, ShapeMismatchError
from tests.campaigns import amount
from tests.processes import in_fork, run_script

ROWS = 10


@pytest.fixture
def cache(tmp_path):
    return TensorCache.create(tmp_path / "cache", {"x": (torch.int64, ())}, ROWS)


def doubled(batch):
    return {"x": batch * 2}


class Numbers(Dataset):
    def __len__(self):
        return ROWS

    def __getitem__(self, row):
        return torch.tensor(row)


@pytest.mark.parametrize(
    "inputs",
    [torch.arange(ROWS), np.arange(ROWS), list(range(ROWS)), range(ROWS), Numbers()],
    ids=["tensor", "array", "list", "range", "dataset"],
)
def test_rows_are_made_of_their_inputs(cache, inputs):
    def fn(batch):
        sizes.append(len(batch))
        return {"x": torch.as_tensor(batch) * 2}

    sizes = []
    cache.fill(fn, inputs, batch_size=4)

    assert [4, 4, 2] == sizes
    assert list(range(0, 2 * ROWS, 2)) == cache[:]["x"].tolist()


PAIRS = StackDataset(a=torch.arange(ROWS), b=torch.arange(ROWS))
TEXTS = [torch.arange(row) for row in range(ROWS)]


def of_texts():
    return TensorCache.from_records([{"tokens": text} for text in TEXTS], schema={"tokens": (torch.int64, (None,))})


@pytest.mark.parametrize(
    ("inputs", "number", "options"),
    [
        (lambda: PAIRS, lambda batch: 2 * batch["a"] - batch["b"], {}),
        (of_texts, lambda batch: torch.tensor([len(row) for row in batch["tokens"]]), {"batch_size": 3}),
        (lambda: TEXTS, lambda batch: torch.tensor([len(row) for row in batch]), {"collate": list}),
    ],
    ids=["two parts", "another cache's ragged rows", "no tensor"],
)
def test_items_come_as_a_data_loader_gives_them_or_as_they_are_collated(cache, inputs, number, options):
    cache.fill(lambda batch: {"x": number(batch)}, inputs(), **options)

    assert list(range(ROWS)) == cache[:]["x"].tolist()


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_rows_computed_before_an_error_are_kept_and_the_rest_is_computed_next(cache, error):
    def failing(batch):
        seen.append(batch.tolist())
        if len(seen) == 3:
            raise error
        return doubled(batch)

    seen = []
    with pytest.raises(type(error)):
        cache.fill(failing, torch.arange(ROWS), batch_size=3)
    assert list(range(6)) == TensorCache.open(cache.folder).get(range(6))["x"].div(2).tolist()  # it is on the disk
    cache.close()

    with TensorCache.open(cache.folder, "r+") as again:
        again.fill(failing, torch.arange(ROWS), batch_size=3)
        assert [[6, 7, 8], [9]] == seen[3:]
        again.fill(failing, torch.arange(ROWS))
        assert 5 == len(seen)  # nothing was missing
        assert list(range(0, 2 * ROWS, 2)) == again[:]["x"].tolist()


def test_rows_computed_some_seconds_before_a_kill_are_kept(cache, monkeypatch):
    monkeypatch.setattr("offload.cache.missing._FLUSH_EVERY", 0.0)
    cache.close()

    def killed(batch):
        return os.kill(os.getpid(), 9) if 6 in batch else doubled(batch)

    assert not in_fork(lambda: TensorCache.open(cache.folder, "r+").fill(killed, torch.arange(ROWS), batch_size=3))
    assert [6, 7, 8, 9] == TensorCache.open(cache.folder).missing_rows().tolist()


def test_rows_that_are_there_are_left_and_so_are_other_columns(tmp_path):
    cache = TensorCache.create(tmp_path, {"x": (torch.int64, ()), "y": (torch.int64, ())}, ROWS)
    cache[[2, 5]] = {"x": torch.tensor([-2, -5])}

    cache.fill(doubled, torch.arange(ROWS), columns="x")

    assert [0, 2, -2, 6, 8, -5, 12, 14, 16, 18] == cache.get(slice(None), "x")["x"].tolist()
    assert list(range(ROWS)) == cache.missing_rows("y").tolist()


@pytest.mark.parametrize(
    ("options", "kind", "said"),
    [
        ({"fn": 3}, TypeError, "not callable"),
        ({"inputs": torch.arange(3)}, ShapeMismatchError, "there are 3 inputs, and the cache in .* has 10 rows"),
        ({"inputs": iter([1])}, ArgumentTypeError, "inputs: a tensor, a list or a dataset with a length"),
        ({"map_fn": 3}, TypeError, "not callable"),
        ({"batch_size": 0}, ArgumentError, "batch_size"),
        ({"columns": ["z"]}, ColumnError, "has no column 'z'"),
    ],
)
def test_invalid_inputs_of_fill_are_refused_before_anything_is_computed(cache, options, kind, said):
    def fn(batch):
        raise AssertionError

    with pytest.raises(kind, match=said):
        cache.fill(**({"fn": fn, "inputs": torch.arange(ROWS)} | options))
    assert 0 == cache.num_filled


def test_rows_that_do_not_fit_are_an_error(cache):
    with pytest.raises(ShapeMismatchError, match="column 'x'"):
        cache.fill(lambda batch: {"x": batch[:1]}, torch.arange(ROWS))


def test_a_bar_is_shown_unless_it_is_not_wanted(cache, tmp_path, monkeypatch):
    shown = []

    class Bar(progress.Bar):
        def __init__(self, **options):
            shown.append(options["disable"])
            super().__init__(**{**options, "disable": True})

    monkeypatch.setattr("offload.cache.table.Bar", Bar)

    cache.fill(doubled, torch.arange(ROWS), progress=False)
    other = TensorCache.create(tmp_path / "other", {"x": (torch.int64, ())}, ROWS)
    other.fill(doubled, torch.arange(ROWS))

    assert [True, None] == shown


# With a model, and in several processes


def test_a_model_is_read_once_for_the_batches_of_map_batches(cache):
    layers = torch.nn.Sequential(torch.nn.Linear(1, 4), torch.nn.Linear(4, 1))
    order = []
    layers[1].register_forward_pre_hook(lambda *_: order.append("second"))
    layers[0].register_forward_pre_hook(lambda *_: order.append("first"))

    def fn(batch):
        layers(batch[:, None].float())
        return doubled(batch)

    cache.fill(fn, torch.arange(ROWS), batch_size=3, map_fn=partial(map_batches, model=layers, in_flight=4))

    assert ["first"] * 4 + ["second"] * 4 == order
    assert list(range(0, 2 * ROWS, 2)) == cache[:]["x"].tolist()


@pytest.mark.campaign("kills")
def test_several_processes_share_the_rows_and_a_killed_one_loses_little(tmp_path):
    """Each row is computed once, except those that a killed process had not flushed."""
    kills = amount("kills", 3, 60)
    count = 60 + 10 * kills  # leaves work for each one
    TensorCache.create(tmp_path / "cache", {"x": (torch.int64, ())}, count).close()
    script = """
        import os, random, signal, sys, time
        import torch
        import offload.cache.missing
        from functools import partial
        from offload import TensorCache, map_batches
        from tests.processes import ended, forked
        folder, log, count, kills = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
        offload.cache.missing._FLUSH_EVERY = 0.0
        layers = torch.nn.Sequential(torch.nn.Linear(1, 4), torch.nn.Linear(4, 1))
        mapped = partial(map_batches, model=layers, in_flight=3)

        def fn(batch):
            fd = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            os.write(fd, "".join(f"{os.getpid()} {row}\\n" for row in batch.tolist()).encode())
            os.close(fd)
            layers(batch[:, None].float())
            time.sleep(0.01)
            return {"x": batch * 2}

        def work():
            with TensorCache.open(folder, "r+") as cache:
                cache.fill(fn, torch.arange(count), batch_size=2, map_fn=mapped)
                assert len(cache.missing_rows()) == 0

        rng = random.Random(0)
        others = [forked(work) for _ in range(2)]
        for _ in range(kills):
            pid = forked(work)
            time.sleep(rng.uniform(0.02, 0.15))
            os.kill(pid, signal.SIGKILL)
            print(pid)
            os.waitpid(pid, 0)
        for pid in others:
            assert 0 == ended(pid)
    """

    killed = set(run_script(script, str(tmp_path / "cache"), str(tmp_path / "log"), str(count), str(kills)).split())

    with TensorCache.open(tmp_path / "cache") as cache:
        assert list(range(0, 2 * count, 2)) == cache[:]["x"].tolist()
    done = [line.split() for line in (tmp_path / "log").read_text(encoding="utf-8").splitlines()]
    alive = [row for pid, row in done if pid not in killed]
    assert len(set(alive)) == len(alive)
    assert count <= len(done) <= count + 6 * kills


def test_a_column_that_is_left_out_is_an_error_unless_it_is_there(tmp_path):
    cache = TensorCache.create(tmp_path, dict.fromkeys("ab", (torch.float32, ())), num_rows=4)

    with pytest.raises(CacheError, match="gave a, and these rows need b, too: return it, or say with"):
        cache.fill(lambda batch: {"a": batch}, torch.arange(4.0))
    cache.fill(lambda batch: {"a": batch}, torch.arange(4.0), columns=["a"])
    cache.fill(lambda batch: {"b": -batch}, torch.arange(4.0), batch_size=3)
    assert not len(cache.missing_rows())

    def writes_itself(batch):
        cache[batch] = {"b": batch.float()}
        return {"a": batch.float()}

    cache = TensorCache.create(tmp_path / "own", dict.fromkeys("ab", (torch.float32, ())), num_rows=4)
    cache.fill(writes_itself, torch.arange(4), batch_size=3)
    assert not len(cache.missing_rows())


def test_two_threads_that_fill_one_cache_do_not_wait_for_each_other_for_ever(cache):
    barrier = threading.Barrier(2, timeout=20)
    seen = []

    def fn(batch):
        if not seen:
            seen.append(0)
            barrier.wait()
        return doubled(batch)

    def other():
        barrier.wait()
        cache.fill(doubled, torch.arange(ROWS), batch_size=1)

    thread = threading.Thread(target=other)
    thread.start()
    cache.fill(fn, torch.arange(ROWS), batch_size=4)
    thread.join(20)

    assert not thread.is_alive()
    assert list(range(0, 2 * ROWS, 2)) == cache[:]["x"].tolist()


def test_rows_that_are_appended_meanwhile_are_not_of_these_inputs(tmp_path):
    cache = TensorCache.create(tmp_path / "cache", {"a": (torch.float32, ()), "b": (torch.float32, ())}, num_rows=6)
    other = TensorCache.open(tmp_path / "cache", mode="r+")

    def fn(batch: torch.Tensor) -> dict[str, torch.Tensor]:
        if len(cache) == 6:
            other.append({"a": torch.zeros(4), "b": torch.zeros(4)})  # not flushed yet
        return {"a": batch, "b": batch}

    cache.fill(fn, torch.arange(6.0), batch_size=2)

    assert torch.equal(torch.arange(6.0), cache[:6]["b"])


@pytest.mark.parametrize("map_fn", [map, partial(map_batches, model=torch.nn.Linear(1, 1), progress=False)])
def test_stop_iteration_is_an_error_and_does_not_end_the_job_without_a_word(cache, map_fn):
    def fn(batch):
        return next(iter([])) if 4 in batch else doubled(batch)

    with pytest.raises(MapError, match="StopIteration"):
        cache.fill(fn, torch.arange(ROWS), batch_size=2, map_fn=map_fn)

    assert [0, 1, 2, 3] == sorted(set(range(ROWS)) - set(cache.missing_rows().tolist()))
