"""On a full disk nothing half-loaded claims to be complete. (More of it, simulated: `tests/test_crashes.py`.)"""

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


def test_a_conversion_that_does_not_fit_says_so_and_what_is_there_is_whole(tmp_path):
    """Two of eight weights fit; with more room it is done again."""
    weights = {f"{number}.weight": torch.full((512, 512), float(number)) for number in range(8)}
    save_file(weights, tmp_path / "model.safetensors")
    said = run_on_a_small_disk(SCRIPT, tmp_path / "small", "1200k", tmp_path / "model.safetensors")

    assert "ENOSPC" == said["errno"]
    assert "'2.weight'" in said["message"]
    assert "take another offload_dir" in said["message"]
    assert 0 == said["without_data"]  # they are recipes
    assert ["0.weight.safetensors", "1.weight.safetensors"] == said["files"]
    assert said["files_are_whole"]
    assert "6 tensors of the model have no data after loading: 2.weight" in said["again"]
    assert said["right"]
