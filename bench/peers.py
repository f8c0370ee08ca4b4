"""The ways of having a model on disk that are compared, and the model in memory.

Always true:
- each loads the same checkpoint in the same dtype, with the call shown in its own documentation
- a way writes only to the scratch folder that it is given
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

import offload

IN_MEMORY = "in memory (mapped)"
OURS = "offload"


@dataclass(frozen=True)
class Way:
    """One way of loading.

    Attributes:
        package: the required package.
        load: returns a transformers model from a folder.
        fill: fills a model without values from a safetensors file.
    """

    package: str
    load: Callable[[Path, Path], Any]
    fill: Callable[[nn.Module, Path, Path], nn.Module]


def absent(packages: Mapping[str, str]) -> dict[str, str]:
    """Given arms and the packages that they need: those that can't run, and why."""
    return {
        arm: f"{package} is not installed" for arm, package in packages.items() if not importlib.util.find_spec(package)
    }


def limit_memory(name: str, budget: int) -> None:
    """Set how much may stay in memory, if the way supports that."""
    if name == OURS:
        offload.set_max_memory({"cpu": budget})


def _load_in_memory(folder: Path, _scratch: Path) -> Any:
    """transformers' default, which maps safetensors files on the CPU."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder)


def _fill_in_memory(model: nn.Module, file: Path, _scratch: Path) -> nn.Module:
    from safetensors.torch import load_file

    model.load_state_dict(load_file(file), assign=True)
    return model


def _load_offload(folder: Path, _scratch: Path) -> Any:
    return offload.from_pretrained(folder)


def _fill_offload(model: nn.Module, file: Path, _scratch: Path) -> nn.Module:
    return offload.load_checkpoint_and_dispatch(model, file)


def _load_accelerate(folder: Path, scratch: Path) -> Any:
    return _fill_accelerate(_empty_model(folder), folder, scratch)


def _fill_accelerate(model: nn.Module, checkpoint: Path, scratch: Path) -> nn.Module:
    """accelerate's disk offload, which copies the weights to a folder of its own."""
    from accelerate import load_checkpoint_and_dispatch

    device_map = _nearly_all_on_disk(model)
    return load_checkpoint_and_dispatch(model, str(checkpoint), device_map=device_map, offload_folder=str(scratch))


def _load_transformers(folder: Path, scratch: Path) -> Any:
    """Reads the checkpoint in place. The map is not just "disk", which transformers 5.23 takes for a torch device."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, device_map={"": "disk"}, offload_folder=str(scratch))


def _fill_transformers(model: nn.Module, file: Path, scratch: Path) -> nn.Module:
    """The equivalent of transformers' disk map: accelerate's hooks over an index of the checkpoint."""
    from accelerate import dispatch_model

    index = {
        name: {"safetensors_file": str(file), "weight_name": name, "dtype": str(value.dtype).removeprefix("torch.")}
        for name, value in model.state_dict().items()
    }
    return dispatch_model(model, {"": "disk"}, offload_dir=str(scratch), offload_index=index, force_hooks=True)


def _load_compressed_tensors(folder: Path, scratch: Path) -> Any:
    from compressed_tensors.offload import load_offloaded_model
    from transformers import AutoModelForCausalLM

    with load_offloaded_model():
        return AutoModelForCausalLM.from_pretrained(folder, device_map="disk", offload_folder=str(scratch))


def _fill_compressed_tensors(model: nn.Module, file: Path, scratch: Path) -> nn.Module:
    """Offloads each module of a model in memory, which writes one file per tensor."""
    from compressed_tensors.offload import offload_module

    _fill_in_memory(model, file, scratch)
    for module in model.modules():
        if next(module.parameters(recurse=False), None) is not None:
            offload_module(module, "cpu", "disk", offload_dir=str(scratch))
    return model


def _load_torch_to_nnef(folder: Path, scratch: Path) -> Any:
    return _fill_torch_to_nnef(_empty_model(folder), folder, scratch)


def _fill_torch_to_nnef(model: nn.Module, checkpoint: Path, scratch: Path) -> nn.Module:
    from torch_to_nnef.tensor.offload import ON_DISK_DEVICE_MAP_KEY, t2n_load_checkpoint_and_dispatch

    t2n_load_checkpoint_and_dispatch(model, checkpoint, ON_DISK_DEVICE_MAP_KEY, scratch)
    return model


def _empty_model(folder: Path) -> Any:
    from accelerate import init_empty_weights
    from transformers import AutoConfig, AutoModelForCausalLM

    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    model.tie_weights()
    return model.eval()


def _nearly_all_on_disk(model: nn.Module) -> dict[str, str]:
    """accelerate needs one module elsewhere: the smallest with weights of its own."""
    modules = {name: module for name, module in model.named_modules() if name}
    sizes = {name: sum(weight.numel() for weight in part.parameters(recurse=False)) for name, part in modules.items()}
    sizes = {name: size for name, size in sizes.items() if size or not [*modules[name].children()]}
    smallest = min(filter(None, sizes.values()))
    first = next(name for name, size in sizes.items() if size == smallest)
    return {name: "cpu" if name == first or not size else "disk" for name, size in sizes.items()}


WAYS = {
    IN_MEMORY: Way("transformers", _load_in_memory, _fill_in_memory),
    OURS: Way("offload", _load_offload, _fill_offload),
    "accelerate": Way("accelerate", _load_accelerate, _fill_accelerate),
    "transformers": Way("transformers", _load_transformers, _fill_transformers),
    "compressed-tensors": Way("compressed_tensors", _load_compressed_tensors, _fill_compressed_tensors),
    "torch_to_nnef": Way("torch_to_nnef", _load_torch_to_nnef, _fill_torch_to_nnef),
}
IN_PLACE = (IN_MEMORY, OURS, "transformers")  # those that write nothing: for many models, and large ones
PACKAGES = {name: way.package for name, way in WAYS.items()}
