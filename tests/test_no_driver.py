"""A build of torch for CUDA on a machine without a driver: everything runs on the CPU, as with a build for it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from transformers import AutoModelForCausalLM

import offload
from offload.cli import main
from offload.errors import ArgumentError, DeviceError
from tests.acts import ACTS, meeting, new_folder
from tests.acts_of_neighbours import inputs_in
from tests.crashes import INTERRUPT
from tests.tiny import tiny_checkpoint

_NAMES_A_KIND = {"current_accelerator", "is_available", "device_count"}  # the only ones that do not need the driver


@pytest.fixture(autouse=True)
def _no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a build names its accelerator unless it is asked for one that is available, and raises for all else."""

    def missing(name: str) -> Callable[..., NoReturn]:
        def fails(*_: object, **__: object) -> NoReturn:
            raise RuntimeError(f"{name}: Found no NVIDIA driver on your system")

        return fails

    def kind(check_available: bool = False) -> torch.device | None:
        return None if check_available else torch.device("cuda")

    for name in set(torch.accelerator.__all__) - _NAMES_A_KIND:
        monkeypatch.setattr(torch.accelerator, name, missing(name))
    monkeypatch.setattr(torch.accelerator, "current_accelerator", kind)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 0)
    for name in ("init", "current_device", "get_device_properties", "get_rng_state_all", "mem_get_info"):
        monkeypatch.setattr(torch.cuda, name, missing(name))


@pytest.mark.parametrize("name", meeting(INTERRUPT))
def test_every_public_call_runs(name, tmp_path):
    call = ACTS[name]
    thing = call.begin(new_folder(tmp_path))

    call.act(thing)

    call.check(thing)


COMMANDS: dict[str, list[str]] = {
    "plan": ["plan", "model", "--disk-rate", "1GB"],
    "doctor": ["doctor", "new folder"],
    "generate": ["generate", "model", "--prompt", "w1", "--max-new-tokens", "2"],
    "batch": ["batch", "model", "in", "out", "--max-new-tokens", "2"],
    "inspect": ["inspect", "model"],
    "verify": ["verify", "model"],
    "convert": ["convert", "model", "converted", "--dtype", "bfloat16"],
    "quantize": ["quantize", "model", "quantized", "--int8", "--group-size", "32"],
    "merge-lora": ["merge-lora", "model", "adapter", "merged"],
}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_runs(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(inputs_in(tmp_path))
    Path("new folder").mkdir()
    code = main([*COMMANDS[name], "--traceback"])

    assert (0, "") == (code, "".join(line for line in capsys.readouterr().err.split("\n") if "NVIDIA" in line))


@pytest.mark.parametrize("device_map", ["disk", "auto", "cpu", {"": "disk", "lm_head": "cpu"}])
def test_models_run_on_the_cpu(device_map, tmp_path):
    folder = tiny_checkpoint(tmp_path / "model")
    tokens = torch.arange(5)[None]
    model = offload.from_pretrained(folder, device_map=device_map)

    assert torch.equal(AutoModelForCausalLM.from_pretrained(folder)(tokens).logits, model(tokens).logits)


def test_an_accelerator_that_is_asked_for_is_an_error_that_names_the_devices(tmp_path):
    folder = tiny_checkpoint(tmp_path / "model")

    with pytest.raises(DeviceError, match=r"no device 'cuda' here: use one of cpu$"):
        offload.plan(folder, device="cuda", disk_rate="1GB")
    with pytest.raises(ArgumentError, match="'cuda:0' is neither 'cpu' nor an accelerator of this machine"):
        offload.from_pretrained(folder, max_memory={"cuda:0": "1GiB"})


def test_the_devices_of_a_diagnosis_are_empty(tmp_path, capsys):
    assert 0 == main(["doctor", str(tmp_path), "--json"])

    assert {} == json.loads(capsys.readouterr().out)["devices"]
