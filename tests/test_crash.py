"""A process that is killed while it writes leaves the old value or the new one, whole."""

from __future__ import annotations

import json

import pytest

from tests.processes import run_script

# The driver has torch already; its forks are killed and started again without loading it anew. What a child is about to
# write, and what it has written, stands in memory that they share. No two elements of a value that is a mix are equal
# throughout, as every value is one number repeated.
DRIVER = """
    import glob, json, mmap, os, random, signal, struct, sys, time, torch
    from safetensors.torch import load_file
    from offload import OffloadedTensor
    from offload.storage.file import TensorFile
    from offload.storage.handle import Handle

    torch.set_num_threads(1)
    folder, sizes, kills = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
    random.seed(0)
    board = mmap.mmap(-1, 16)

    def forked(act):
        pid = os.fork()
        if pid:
            return pid
        try:
            act()
        except BaseException:
            import traceback
            traceback.print_exc()
            os._exit(1)
        os._exit(0)

    def update_for_ever(weight):
        number = struct.unpack("qq", board[:])[1]
        while True:
            number += 1
            board[:8] = struct.pack("q", number)
            weight.update_values(torch.full((len(weight),), float(number)))
            board[8:] = struct.pack("q", number)

    def one_number(values):
        low, high = values.aminmax()
        assert low == high, f"a mix of {low} and {high}"
        return int(low)

    found = dict(old=0, new=0, kills=0, left=0, updates=0)
    for size in sizes:
        board[:] = struct.pack("qq", 0, 0)
        name = f"w{size}"
        weight = OffloadedTensor.from_original_tensor(torch.zeros(size), name, folder)
        began = time.monotonic()
        weight.update_values(torch.zeros(size))
        one = time.monotonic() - began
        for _ in range(kills // len(sizes)):
            pid = forked(lambda: update_for_ever(weight))
            time.sleep(random.uniform(0, 4 * one) + 0.003)
            os.kill(pid, signal.SIGKILL)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
            tried, done = struct.unpack("qq", board[:])
            value = one_number(load_file(weight.offload_path)[name])
            assert value in (tried, done), (value, tried, done)
            assert value == one_number(weight.materialize()), "the parent sees another value than the file holds"
            found["kills"] += 1
            found["new" if value == tried and tried != done else "old"] += 1
            board[:] = struct.pack("qq", value, value)
        found["updates"] += struct.unpack("qq", board[:])[1]
        del weight
    found["left"] = len(glob.glob(f"{folder}/.offload-tmp-*"))

    def use_the_folder():
        OffloadedTensor.from_original_tensor(torch.ones(2), "later", folder)

    assert os.waitpid(forked(use_the_folder), 0)[1] == 0
    found["left_after_use"] = len(glob.glob(f"{folder}/.offload-tmp-*"))
    found["files"] = sorted(os.listdir(folder))
    print(json.dumps(found))
"""


def test_a_value_is_whole_after_each_of_200_kills_at_random_moments(tmp_path):
    sizes = [1 << 10, 1 << 14, 1 << 18, 1 << 21]  # float32: 4 KiB to 8 MiB

    found = json.loads(run_script(DRIVER, tmp_path, json.dumps(sizes), 200))

    assert 200 == found["kills"]
    assert found["updates"] >= 200
    assert found["left"] > 0  # else none was killed while it wrote
    assert 0 == found["left_after_use"]
    assert sorted([f"w{size}.safetensors" for size in sizes] + ["later.safetensors"]) == found["files"]


READER = """
    import json, os, sys, time, torch
    from safetensors.torch import load_file
    from offload import OffloadedTensor
    from offload.errors import ChangedFileError
    from offload.storage.file import TensorFile
    from offload.storage.handle import Handle

    torch.set_num_threads(1)
    folder, how = sys.argv[1:3]
    size, updates = 1 << 16, 150
    weight = OffloadedTensor.from_original_tensor(torch.zeros(size), "w", folder)
    path = weight.offload_path

    def by_a_handle_of_its_own():
        handle = Handle.shared(TensorFile.open(path), "w", None)
        while True:
            yield handle.base()

    def by_a_handle_that_is_mapped_anew():
        handle = Handle.shared(TensorFile.open(path), "w", None)
        while True:
            handle.unmap()
            yield handle.base()

    def by_a_tensor_from_before_the_fork():
        while True:
            yield weight + 0

    def by_the_safetensors_library():
        while True:
            yield load_file(path)["w"]

    def read(out):
        seen, last = set(), 0
        for value in globals()[how]():
            low, high = value.aminmax()
            assert low == high, f"a mix of {low} and {high}"
            assert int(low) >= last, f"{low} after {last}"
            last = int(low)
            seen.add(last)
            if last == updates:
                break
        os.write(out, json.dumps(len(seen)).encode())

    into, out = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            read(out)
            os._exit(0)
        except BaseException:
            import traceback
            traceback.print_exc()
        os._exit(1)
    for number in range(1, updates + 1):
        weight.update_values(torch.full((size,), float(number)))
    assert os.waitpid(pid, 0)[1] == 0
    print(os.read(into, 100).decode())
"""


@pytest.mark.parametrize(
    "how",
    [
        "by_a_handle_of_its_own",
        "by_a_handle_that_is_mapped_anew",
        "by_a_tensor_from_before_the_fork",
        "by_the_safetensors_library",
    ],
)
def test_a_reader_in_another_process_never_sees_a_mix_or_an_error(tmp_path, how):
    seen = int(run_script(READER, tmp_path, how))

    assert seen > 10
