"""A process killed while writing leaves the old value or the new one, complete."""

from __future__ import annotations

import json

import pytest

from tests.processes import run_script

DRIVER = """
    import json, os, sys
    from pathlib import Path
    from tests.kills import campaign

    found = campaign(Path(sys.argv[1]), json.loads(sys.argv[2]), int(sys.argv[3]))
    print(json.dumps({**found, "files": sorted(os.listdir(sys.argv[1]))}))
"""


@pytest.mark.campaign("kills", only=True)
def test_a_value_is_whole_after_each_of_200_kills_at_random_moments(tmp_path):
    """`python -m tests.kills` does 1000, up to 64 MiB. `test_injected` kills at each call that changes files."""
    sizes = [1 << 12, 1 << 16, 1 << 20, 1 << 23]  # bytes

    found = json.loads(run_script(DRIVER, tmp_path, json.dumps(sizes), 200))

    assert 200 == found["kills"]
    assert found["updates"] >= 50
    assert found["reads"] >= 50
    assert found["left"] > 0  # otherwise none was killed while writing
    assert 0 == found["left after use"]
    assert sorted([f"w{size}.safetensors" for size in sizes] + ["later.safetensors"]) == found["files"]


READER = """
    import json, mmap, os, sys, time, torch
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
    read_last = mmap.mmap(-1, 8)

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
            read_last[:] = last.to_bytes(8)
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
        while number % 10 == 0 and number < updates and int.from_bytes(read_last[:]) <= number - 10:
            assert os.waitpid(pid, os.WNOHANG) == (0, 0), "the reader has failed"  # else it reads one of ten values
            time.sleep(0.0005)
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

    assert seen >= 15
