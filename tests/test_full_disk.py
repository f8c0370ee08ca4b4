"""On a full disk nothing half-loaded claims to be complete, and values that can't be replaced are kept."""

import pytest
import torch
from safetensors.torch import save_file

from tests.processes import run_on_a_small_disk

SCRIPT = """
    import errno, json, os, subprocess, sys, torch, offload
    from offload.errors import MetaTensorError, WriteError
    from offload.checkpoints.verify import verify
    from torch import nn

    small, source = sys.argv[1:]

    def empty():
        with offload.init_empty_weights():
            return nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(8)))

    model, said = empty(), {}
    try:
        offload.load_checkpoint_and_dispatch(model, source, offload_dir=small, dtype=torch.bfloat16, store=True)
    except WriteError as error:
        said["errno"], said["message"] = errno.errorcode[error.errno], str(error)
    said["without_data"] = sum(weight.is_meta for weight in model.parameters())
    said["files"] = sorted(os.listdir(small))
    said["files_are_whole"] = verify(small).is_whole
    del model
    try:
        offload.load_checkpoint_and_dispatch(empty(), small)
    except MetaTensorError as error:
        said["again"] = str(error)
    subprocess.run(["mount", "-o", "remount,size=64m", small], check=True)
    model = offload.load_checkpoint_and_dispatch(empty(), source, offload_dir=small, dtype=torch.bfloat16, store=True)
    said["right"] = all((weight == number).all().item() for number, weight in enumerate(model.parameters()))
    print(json.dumps(said))
"""


@pytest.mark.parametrize("form", ["model.safetensors", "pytorch_model.bin"])
def test_a_conversion_that_does_not_fit_says_so_and_what_is_there_is_whole(tmp_path, form):
    """Two of eight weights fit; with more room it is done again."""
    weights = {f"{number}.weight": torch.full((512, 512), float(number)) for number in range(8)}
    (save_file if form.endswith("safetensors") else torch.save)(weights, tmp_path / form)  # type: ignore[operator]
    said = run_on_a_small_disk(SCRIPT, tmp_path / "small", "1200k", tmp_path / form)

    assert "ENOSPC" == said["errno"]
    assert "'2.weight'" in said["message"]
    assert "take another offload_dir" in said["message"]
    assert 0 == said["without_data"]  # they are recipes
    assert ["0.weight.safetensors", "1.weight.safetensors"] == said["files"]
    assert said["files_are_whole"]
    assert "6 tensors of the model have no data after loading: 2.weight" in said["again"]
    assert said["right"]


VALUES = """
    import errno, json, subprocess, sys, torch, offload
    from offload import OffloadedTensor
    from offload.errors import ReadError, WriteError

    small = sys.argv[1]

    def weight(name):
        return OffloadedTensor.from_original_tensor(torch.ones(1 << 16), name, small)

    def twice(name, tensor):
        return torch.cat([tensor * 2] * (4 if name == "b" else 1))

    def failing(act):
        try:
            act()
        except (ReadError, WriteError) as error:  # what may be written to is opened to be, also for a look
            return errno.errorcode[error.errno], str(error)

    def run():
        return offload.map_values(twice, weights, strict_shape=False, resume=True).replaced

    weights, said = {name: weight(name) for name in "abc"}, {}
    said["full"] = failing(run)
    said["then"] = [weight.sum().item() for weight in weights.values()]
    subprocess.run(["mount", "-o", "remount,size=64m", small], check=True)
    said["with room"] = run()
    said["at last"] = [weight.sum().item() for weight in weights.values()]
    for tensor in weights.values():
        tensor._handle.unmap()  # what is mapped keeps the disk busy
    subprocess.run(["mount", "-o", "remount,ro", small], check=True)
    said["update"] = failing(lambda: weights["a"].update_values(torch.ones(1 << 16)))
    said["run"] = failing(lambda: offload.map_values(twice, weights))
    said["still"] = [tensor.sum().item() for tensor in offload.load_file(small).values()]
    print(json.dumps(said))
"""


def test_a_run_stops_on_a_full_disk_and_resumes_with_space_and_a_read_only_disk_is_reported(tmp_path):
    """Three values of 256 KiB on a disk of 1200 KiB; the second one becomes four times as large."""
    said, size = run_on_a_small_disk(VALUES, tmp_path / "small", "1200k"), 1 << 16

    code, message = said["full"]
    assert "ENOSPC" == code
    assert "tensor 'b'" in message
    assert "free some space, or take another offload_dir" in message
    assert [2 * size, size, size] == said["then"]
    assert ["b", "c"] == said["with room"]
    assert [2 * size, 8 * size, 2 * size] == said["at last"] == said["still"]
    assert {"EROFS"} == {said["update"][0], said["run"][0]}
    assert "the file system is read-only: take another offload_dir" in said["update"][1]
    assert "tensor 'a'" in said["update"][1]
    assert "the file system is read-only: write to another folder" in said["run"][1]
