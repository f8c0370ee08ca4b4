"""Thousands of tensors need no descriptors and leave nothing; memory is measured as the kernel sees it."""

import gc
import json
import math
import os
from contextlib import suppress
from types import SimpleNamespace

import psutil
import pytest
import torch
from safetensors.torch import save_file

from offload import memory
from offload.memory import available_bytes, cgroup_available, uncollected
from offload.prefetch.plan import Pool
from tests.page_cache import dropped, needs_page_cache
from tests.processes import run_script

MANY = """
    import ctypes, gc, json, os, resource, sys, torch
    from offload import OffloadedTensor
    from offload.memory import anonymous_bytes

    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))

    def files():
        return sum(len(names) for _, _, names in os.walk(os.environ["TMPDIR"]))

    def round_of(count):
        tensors = [OffloadedTensor.from_original_tensor(torch.full((64,), float(n)), f"w{n}") for n in range(count)]
        right = all(tensor.sum().item() == 64 * n for n, tensor in enumerate(tensors))
        return right, files(), len(os.listdir("/proc/self/fd"))

    def measured():
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        return dict(
            anonymous=anonymous_bytes(),
            descriptors=len(os.listdir("/proc/self/fd")),
            mappings=len(open("/proc/self/maps").readlines()),
            objects=sys.getallocatedblocks(),
        )

    round_of(int(sys.argv[1]))  # of this, the interpreter and the C library keep some for themselves
    before = measured()
    right, most_files, most_descriptors = round_of(int(sys.argv[1]))
    after = measured()
    grown = {key: after[key] - before[key] for key in before}
    print(json.dumps(dict(right=right, files=most_files, descriptors=most_descriptors, left=files(), grown=grown)))
"""


def test_thousands_of_tensors_under_a_limit_of_256_descriptors_leave_nothing(quick_folder):
    found = json.loads(run_script(MANY, 3000, env={"TMPDIR": quick_folder}))

    assert found["right"]
    assert 3000 == found["files"]
    assert 0 == found["left"]
    assert found["descriptors"] < 32
    assert 0 == found["grown"]["descriptors"]
    assert found["grown"]["mappings"] < 100
    assert found["grown"]["objects"] < 1500  # half an object a tensor
    assert found["grown"]["anonymous"] < 8 << 20
    assert [] == os.listdir(quick_folder)


PEAK = """
    import json, sys, time, torch, offload
    from offload.prefetch.engine import _ENGINE
    from torch import nn

    path, layers, size, budget, window = sys.argv[1], *map(int, sys.argv[2:])

    def network(count, width):
        return nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(count)])

    def field(name):
        with open("/proc/self/status") as lines:
            return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))

    def until_dropped(*_):
        while _ENGINE.reader.leaving_bytes:
            time.sleep(0.001)

    torch.set_num_threads(1)
    with torch.no_grad():
        warm = offload.disk_offload(network(2, 512))  # what is imported and allocated once
        warm(torch.ones(1, 512)), warm(torch.ones(1, 512))
        offload.memory_summary()
        with offload.init_empty_weights():
            model = network(layers, size)
        before = field("VmRSS")
        with open("/proc/self/clear_refs", "w") as peak:
            peak.write("5")  # starts VmHWM, the peak of what is resident, anew
        offload.load_checkpoint_and_dispatch(model, path, max_memory=budget, read_ahead=window)
        for layer in model:  # what waits to be dropped is a matter of how fast another thread gets to run
            layer.register_forward_hook(until_dropped)
        x = torch.ones(1, size)
        results = [model(x).sum().item() for _ in range(4)]
    read = offload.memory_summary().counts.bytes_read
    print(json.dumps(dict(peak=field("VmHWM") - before, results=results, read=read)))
"""


@pytest.mark.slow(6)
@needs_page_cache
@pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="the kernel does not tell peaks")
def test_peak_memory_is_budget_window_and_32_mib(tmp_path):
    """Four passes over 12 layers of 16 MiB, in all three times the budget: resident pages of any kind.

    Beside what waits to be dropped, for as long as the thread that drops does not get to run.
    """
    layers, size, budget, window = 12, 2048, 64 << 20, 48 << 20
    path = tmp_path / "model.safetensors"
    save_file({f"{layer}.weight": torch.eye(size).mul_(layer + 1) for layer in range(layers)}, path)
    dropped(path)
    found = json.loads(run_script(PEAK, path, layers, size, budget, window))

    assert [math.factorial(layers) * size] * 4 == found["results"]
    assert found["peak"] <= budget + window + (32 << 20)
    assert found["read"] >= layers * (16 << 20)


def test_anonymous_memory_is_what_was_allocated_and_not_what_was_mapped(tmp_path):
    """In a process where nothing else allocates, or lets go."""
    (tmp_path / "file").write_bytes(bytes(64 << 20))
    code = """
        import sys
        import numpy as np
        from offload.memory import anonymous_bytes

        before = anonymous_bytes()
        mapped = np.memmap(sys.argv[1], dtype=np.uint8, mode="r")
        assert 0 == mapped.sum()
        print(anonymous_bytes() - before)
        allocated = np.ones(64 << 20, dtype=np.uint8)
        print(anonymous_bytes() - before)
    """
    with_mapping, with_allocation = map(int, run_script(code, tmp_path / "file").split())

    assert abs(with_mapping) < 16 << 20
    assert 48 << 20 < with_allocation < 90 << 20


def test_memory_is_counted_without_proc(monkeypatch, tmp_path):
    """As in a chroot, and in sandboxes."""
    (tmp_path / "statm").touch()
    monkeypatch.setattr(memory, "_SIZES", tmp_path / "statm")
    monkeypatch.setattr(psutil, "PROCFS_PATH", str(tmp_path))

    assert os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") == memory.total_bytes()
    assert 0 < available_bytes() < memory.total_bytes()
    assert 0 < memory.anonymous_bytes() < memory.total_bytes()


def cgroup(folder, **files: object):
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("__", ".", 1)).write_text(f"{content}\n")


@pytest.fixture
def own(tmp_path):
    def write(*lines: str):
        (tmp_path / "own").write_text("".join(f"{line}\n" for line in lines))
        return tmp_path / "own"

    return write


def test_the_tightest_limit_counts_and_cached_files_are_free_memory(tmp_path, own):
    """Beyond a limit nothing is free; a path of the host seen from a container ends at what is mounted."""
    stat = "anon 1\nfile 999\ninactive_file 20\nactive_file 5"
    cgroup(tmp_path / "cg" / "a", memory__max=1000, memory__current=400, memory__stat=stat)
    cgroup(tmp_path / "cg" / "a" / "b", memory__max="max", memory__current=100, memory__stat=stat)
    cgroup(tmp_path / "cg" / "a" / "b" / "c", memory__max=5000, memory__current=50, memory__stat=stat)
    cgroup(tmp_path / "full" / "a", memory__max=100, memory__current=400)
    cgroup(tmp_path / "inside", memory__max=700, memory__current=400)

    assert 1000 - 400 + 25 == cgroup_available(own("0::/a/b/c"), tmp_path / "cg")
    assert 0 == cgroup_available(own("0::/a"), tmp_path / "full")
    assert 300 == cgroup_available(own("0::/docker/0123"), tmp_path / "inside")


def test_a_cgroup_of_version_1_limits_too(tmp_path, own):
    stat = "cache 999\ninactive_file 1\nactive_file 1\ntotal_inactive_file 30\ntotal_active_file 3"
    files = {"memory__usage_in_bytes": 400, "memory__stat": stat}
    cgroup(tmp_path / "cg" / "memory", memory__limit_in_bytes=2**63 - 4096, **files)
    cgroup(tmp_path / "cg" / "memory" / "a", memory__limit_in_bytes=1000, **files)
    found = cgroup_available(own("5:cpu,memory:/a", "4:pids:/x", "0::/"), tmp_path / "cg")

    assert 1000 - 400 + 33 == found


@pytest.mark.parametrize(
    "lines",
    [["0::/"], ["0::/a"], ["4:memory:/not/mounted/here"], ["3:cpu:/a"], []],
    ids=["root", "max", "v1", "cpu", "none"],
)
def test_without_a_limit_the_free_memory_of_a_cgroup_is_none(tmp_path, own, lines):
    cgroup(tmp_path / "cg" / "a", memory__max="max", memory__current=400)

    assert cgroup_available(own(*lines), tmp_path / "cg") is None
    assert cgroup_available(tmp_path / "no such file", tmp_path / "cg") is None


def test_available_memory_is_the_smaller_of_free_memory_and_the_cgroups(monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setattr(memory, "cgroup_available", lambda: None)
    assert 0 < available_bytes() <= psutil.virtual_memory().total
    monkeypatch.setattr(memory, "cgroup_available", lambda: 3000)
    assert 3000 == available_bytes()
    monkeypatch.setattr(memory.psutil, "virtual_memory", lambda: SimpleNamespace(available=2000))
    assert 2000 == available_bytes()


@pytest.mark.parametrize(("said", "ranks"), [("4", 4), ("1", 1), ("0", 1), ("many", 1)])
def test_each_rank_of_a_host_has_a_share_of_its_memory(monkeypatch, said, ranks):
    """So has a budget that nobody sets."""
    monkeypatch.setattr(memory, "cgroup_available", lambda: 1 << 20)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", said)

    assert (1 << 20) // ranks == available_bytes()
    pool = Pool()
    pool.reconsider(anew=True)
    assert int((1 << 20) // ranks * 0.85) == pool.capacity


@pytest.mark.parametrize("was_on", [True, False])
def test_the_collector_is_off_in_the_block_and_then_as_it_was(was_on):
    seen: list[bool] = []
    try:
        if not was_on:
            gc.disable()
        with suppress(KeyError), uncollected():
            seen.append(gc.isenabled())
            raise KeyError
        seen.append(gc.isenabled())
    finally:
        gc.enable()

    assert [False, was_on] == seen


ROWS = """
    import json, os, sys, torch
    from offload import OffloadedTensor

    def written():
        with open("/proc/self/io") as lines:
            return next(int(line.split()[1]) for line in lines if line.startswith("write_bytes"))

    def cold(path):  # the kernel dirties what it cached in one piece, up to 2 MiB, as one: ext4 since Linux 6.16
        fd = os.open(path, os.O_RDONLY)
        for _ in range(100):  # a page that the kernel is moving just then stays
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)

    full = OffloadedTensor.from_original_tensor(torch.zeros(4096, 4096), "full", sys.argv[1])  # 64 MiB
    full.flush()
    cold(full.offload_path)
    counts = {}
    for w in (full, OffloadedTensor.empty((4096, 4096), name="empty", offload_dir=sys.argv[1])):
        w[:1] = 0  # what is made once, at the first write
        w.flush()
        before = written()
        for row in range(256, 4096, 512):
            w[row : row + 2] = torch.ones(2, 4096)
        w.flush()
        counts[w.name] = written() - before
        assert w.sum().item() == 16 * 4096
    print(json.dumps(counts))
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/io"), reason="reads /proc")
def test_rows_set_in_place_write_their_own_pages_and_not_the_value(tmp_path):
    """Sixteen rows of 16 KiB in a value of 64 MiB; the slack is what the kernel reads around a page in one piece."""
    rows = 16 * 4096 * 4
    written = json.loads(run_script(ROWS, tmp_path)).values()

    if not all(written):
        pytest.skip("what goes to this file system is not counted")
    assert all(rows <= nbytes <= 4 * rows for nbytes in written)
