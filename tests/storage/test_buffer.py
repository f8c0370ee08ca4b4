"""Updates in a `write_buffer` are read at once, and are put into their files once."""

from __future__ import annotations

import errno
import os
import signal
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import offload
from offload import OffloadedTensor, write_buffer
from offload.errors import StaleViewError, WriteError
from offload.storage.buffer import current_buffer
from tests.processes import in_fork


def value(number: float, size: int = 4) -> torch.Tensor:
    return torch.full((size,), float(number))


def in_file(tensor: OffloadedTensor) -> list[float]:
    """What others find in the file."""
    return load_file(tensor.offload_path)[tensor.name].tolist()  # type: ignore[no-any-return]


def left_over(folder: Path) -> list[Path]:
    return list(folder.glob(".offload-tmp-*"))


@pytest.fixture
def weight(tmp_path: Path) -> OffloadedTensor:
    return OffloadedTensor.from_original_tensor(value(0), "w", tmp_path)


@pytest.fixture
def replaced(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The names of the files that were put into their places, one by one."""
    names: list[str] = []
    replace = os.replace

    def noted(source: str, target: str) -> None:
        if not Path(target).name.startswith(".offload-tmp-"):
            names.append(Path(target).name)
        replace(source, target)

    monkeypatch.setattr(os, "replace", noted)
    return names


def test_repeated_updates_are_put_into_the_file_once(weight, tmp_path, replaced):
    with write_buffer():
        for number in range(1, 6):
            weight.update_values(value(number))
            assert [number] * 4 == weight.tolist()
            assert [0] * 4 == in_file(weight)
            assert 1 == len(left_over(tmp_path))

    assert ["w.safetensors"] == replaced
    assert [5] * 4 == in_file(weight) == weight.tolist()
    assert [] == left_over(tmp_path)


def test_every_way_to_read_gives_the_newest(weight):
    view, other = weight[1:3], weight.detach()
    before = weight + 0
    mapped = weight._handle.base()

    with write_buffer():
        weight.update_values(value(1))
        read = {
            "a view": view.tolist(),
            "another tensor": other[:2].tolist(),
            "an op": (weight * 1)[:2].tolist(),
            "materialize": weight.materialize()[:2].tolist(),
            "numpy": weight.numpy()[:2].tolist(),
            "the mapping": weight._handle.base()[:2].tolist(),
            "a mapping of one's own": weight._handle.another_base()[:2].tolist(),
            "a copy of the file": offload.materialize(weight.clone())[:2].tolist(),
            "the pointers": torch.empty(0).set_(weight.untyped_storage())[:2].tolist(),
        }
        thread = threading.Thread(target=lambda: read.update({"a thread": weight[:2].tolist()}))
        thread.start()
        thread.join()
        assert in_fork(lambda: ([1] * 4 == weight.tolist()) or os._exit(1))

    assert {way: [1, 1] for way in read} == read
    assert [0] * 4 == before.tolist() == mapped.tolist()


def test_what_stays_in_memory_between_ops_is_the_newest(tmp_path):
    """Large enough to be tracked by those that read ahead."""
    size = 1 << 18
    large = OffloadedTensor.from_original_tensor(value(0, size), "large", tmp_path)
    assert 0 == large.sum()

    with write_buffer():
        for number in (1, 2):
            large.update_values(value(number, size))
            assert number * size == large.sum()
            large[: size // 2].mul_(3)
            assert number * size * 2 == large.sum()

    assert 4 * size == large.sum() == load_file(large.offload_path)["large"].sum()


def test_a_copy_and_a_checkpoint_made_inside_are_of_the_newest(weight, tmp_path):
    with write_buffer():
        weight.update_values(value(1))
        copy = OffloadedTensor.__deepcopy__(weight, {})
        offload.save_checkpoint({"w": weight}, tmp_path / "saved")

    assert [1] * 4 == copy.tolist() == load_file(tmp_path / "saved" / "model.safetensors")["w"].tolist()


def test_flush_and_passing_to_another_process_do_not_wait(weight):
    from multiprocessing.reduction import ForkingPickler

    with write_buffer():
        weight.update_values(value(1))
        weight.flush()
        assert [1] * 4 == in_file(weight)
        weight.update_values(value(2))
        ForkingPickler.dumps(weight)
        assert [2] * 4 == in_file(weight)


def test_another_shape_and_dtype_make_old_views_stale_as_ever(weight):
    view = weight[:2]

    with write_buffer():
        weight.update_values(torch.ones(2, 3, dtype=torch.int64), strict_shape=False, strict_dtype=False)
        with pytest.raises(StaleViewError):
            view.tolist()

    assert (torch.int64, (2, 3)) == (weight.dtype, weight.shape)
    assert [[1] * 3] * 2 == in_file(weight)


def test_beyond_max_bytes_the_one_updated_longest_ago_is_written(tmp_path, replaced):
    a, b, c = (OffloadedTensor.from_original_tensor(value(0), name, tmp_path) for name in "abc")
    replaced.clear()

    with write_buffer(max_bytes=2 * (4096 + 16)):
        a.update_values(value(1))
        b.update_values(value(1))
        a.update_values(value(2))
        assert [] == replaced
        c.update_values(value(1))
        assert ["b.safetensors"] == replaced

    assert ["b.safetensors", "a.safetensors", "c.safetensors"] == replaced
    assert ([2] * 4, [1] * 4, [1] * 4) == (in_file(a), in_file(b), in_file(c))


def test_with_no_room_at_all_each_is_written_at_once(weight, replaced):
    with write_buffer(max_bytes=0):
        weight.update_values(value(1))
        assert [1] * 4 == in_file(weight)

    assert ["w.safetensors"] == replaced


def test_a_value_of_a_checkpoint_gets_its_file_when_the_block_is_left(tmp_path):
    save_file({"w": value(0)}, tmp_path / "model.safetensors")
    weight = OffloadedTensor.from_file(tmp_path / "model.safetensors", offload_dir=tmp_path / "q")

    with write_buffer():
        weight.update_values(value(1))
        assert not weight.offload_path.exists()
        assert [1] * 4 == weight.tolist()

    assert tmp_path / "q" / "w.safetensors" == weight.offload_path
    assert [1] * 4 == in_file(weight)
    assert [0] * 4 == load_file(tmp_path / "model.safetensors")["w"].tolist()


def test_an_exception_writes_what_was_updated_and_goes_on(weight, tmp_path):
    def update() -> None:
        with write_buffer():
            weight.update_values(value(1))
            raise KeyError("stop")

    with pytest.raises(KeyError, match="stop"):
        update()

    assert [1] * 4 == in_file(weight)
    assert [] == left_over(tmp_path)


@pytest.mark.parametrize("stopped", [False, True])
def test_what_cannot_be_put_into_its_place_is_named_and_has_its_old_value(weight, tmp_path, monkeypatch, stopped):
    other = OffloadedTensor.from_original_tensor(value(0), "other", tmp_path)
    save_file({"new": value(0)}, tmp_path / "model.safetensors")
    new = OffloadedTensor.from_file(tmp_path / "model.safetensors", offload_dir=tmp_path)
    view = weight[:2]
    sync = os.fsync

    def fails_but_for_other(fd: int) -> None:
        if stat.S_ISREG(os.fstat(fd).st_mode) and b'"other"' not in os.pread(fd, 4096, 0):
            raise OSError(errno.EIO, "Input/output error")
        sync(fd)

    def update() -> None:
        with write_buffer():
            for tensor in (weight, other, new):
                tensor.update_values(value(1))
            monkeypatch.setattr(os, "fsync", fails_but_for_other)
            if stopped:
                raise KeyError("stop")

    with pytest.raises(WriteError, match=r"2 of 3 values .* not be written \('w', 'new'\): .*'w'.*Input/o") as caught:
        update()
    monkeypatch.undo()

    assert isinstance(caught.value.__cause__, WriteError)
    assert errno.EIO == caught.value.errno
    assert [0] * 4 == weight.tolist() == in_file(weight) == new.tolist()
    assert [0, 0] == view.tolist()
    assert [1] * 4 == other.tolist() == in_file(other)
    assert [] == left_over(tmp_path)
    for tensor in (weight, new):  # later they can be written
        tensor.update_values(value(2))
        assert [2] * 4 == in_file(tensor) == tensor.tolist()


def test_an_update_that_fails_leaves_the_one_that_waits(weight, tmp_path, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with write_buffer():
        weight.update_values(value(1))
        monkeypatch.setattr(os, "posix_fallocate", full)
        with pytest.raises(WriteError, match="tensor 'w'"):
            weight.update_values(value(2))
        monkeypatch.undo()
        assert [1] * 4 == weight.tolist()

    assert [1] * 4 == in_file(weight)


def test_what_is_updated_in_an_inner_block_waits_for_the_outer_one(weight, replaced):
    with write_buffer():
        weight.update_values(value(1))
        with write_buffer():
            weight.update_values(value(2))
        assert [0] * 4 == in_file(weight)
        assert [2] * 4 == weight.tolist()

    assert ["w.safetensors"] == replaced
    assert [2] * 4 == in_file(weight)


def test_a_thread_that_did_not_enter_writes_at_once_and_nothing_older_comes_after(weight, tmp_path, replaced):
    with write_buffer():
        weight.update_values(value(1))
        thread = threading.Thread(target=weight.update_values, args=(value(2),))
        thread.start()
        thread.join()
        assert [2] * 4 == in_file(weight) == weight.tolist()

    assert ["w.safetensors"] == replaced
    assert [2] * 4 == in_file(weight)
    assert [] == left_over(tmp_path)


def test_an_update_that_found_the_block_open_and_comes_after_it_does_not_wait(weight, tmp_path, monkeypatch):
    """As of a thread that runs in a copy of the context, and that the block does not wait for."""
    with write_buffer():
        buffer = current_buffer()
    monkeypatch.setattr("offload.storage.handle.current_buffer", lambda: buffer)

    weight.update_values(value(1))

    assert [1] * 4 == in_file(weight)
    assert [] == left_over(tmp_path)


def test_threads_with_blocks_of_their_own_update_and_read_one_value(weight, tmp_path):
    """Each reads what somebody wrote, whole, and the file ends as the tensor is."""
    wrong: list[torch.Tensor] = []

    def work(start: int) -> None:
        with write_buffer():
            for number in range(start, start + 20):
                weight.update_values(value(number))
                seen = weight.materialize()
                if seen.unique().numel() != 1:
                    wrong.append(seen)

    threads = [threading.Thread(target=work, args=(100 * number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert [] == wrong
    assert in_file(weight) == weight.tolist()
    assert [] == left_over(tmp_path)


def test_a_forked_child_writes_at_once_and_leaves_alone_what_waits(weight, tmp_path):
    other = OffloadedTensor.from_original_tensor(value(0), "other", tmp_path)

    def child() -> None:
        other.update_values(value(5))
        assert [5] * 4 == in_file(other)
        weight.flush()
        assert [0] * 4 == in_file(weight)

    def child_leaves() -> None:
        try:
            with write_buffer():
                weight.update_values(value(1))
                if not os.fork():
                    raise KeyError
                os.wait()
                assert [0] * 4 == in_file(weight)
        except KeyError:
            os._exit(0)

    with write_buffer():
        weight.update_values(value(1))
        assert in_fork(child)
        assert [0] * 4 == in_file(weight)
    assert [1] * 4 == in_file(weight)

    weight.update_values(value(0))
    child_leaves()
    assert [1] * 4 == in_file(weight)


def test_a_child_that_was_forked_inside_reads_on_after_the_block(weight):
    go, on = os.pipe()
    with write_buffer():
        weight.update_values(value(1))
        pid = os.fork()
        if not pid:
            os.read(go, 1)
            weight._handle.unmap()
            os._exit(0 if weight.tolist() == [1] * 4 else 1)
    os.write(on, b".")

    assert 0 == os.waitpid(pid, 0)[1]


def test_a_process_that_is_killed_inside_leaves_the_old_values(weight, tmp_path):
    def killed() -> None:
        with write_buffer():
            weight.update_values(value(1))
            os.kill(os.getpid(), signal.SIGKILL)

    assert not in_fork(killed)

    assert [0] * 4 == in_file(weight) == weight.tolist()
    assert 1 == len(left_over(tmp_path))
    assert in_fork(lambda: OffloadedTensor.from_original_tensor(value(0), "later", tmp_path))
    assert [] == left_over(tmp_path)


def test_values_in_private_folders_do_not_wait(replaced):
    weight = OffloadedTensor.from_original_tensor(value(0), "w")

    with write_buffer():
        weight.update_values(value(1))
        assert [1] * 4 == in_file(weight)
