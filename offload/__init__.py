"""PyTorch tensors that live on disk.

| to | use |
| --- | --- |
| load a transformers model from disk | `from_pretrained` |
| know whether a model runs here, and how fast | `plan` |
| say how much stays in memory, and see it | `set_max_memory`, `memory_summary` |
| read a model once for many batches | `map_batches` |
| put a tensor on disk, and replace its value | `OffloadedTensor`: `from_original_tensor`, `update_values` |
| bring it back into memory | `materialize` |
| change many values, one at a time | `map_values`, which gives a `MapReport` |
| quantize a model, or merge an adapter, on disk | `quantize_`, `merge_lora` |
| write a checkpoint, in little memory | `save_checkpoint` |
| keep rows by index, for months, from many processes | `TensorCache` |
| catch what can go wrong | `OffloadError` |

The others:

| to | use |
| --- | --- |
| fill any model from a checkpoint | `init_empty_weights`, `load_checkpoint_and_dispatch`, `load_checkpoint_in_model` |
| say what goes where; move a model that is in memory | `ON_DISK` in a device map; `disk_offload` |
| open a checkpoint as a dictionary | `load_file` |
| store a result beside its tensor; send large ones to disk | `offloaded_like`; `offloading` |
| tell which tensors are on disk | `is_offloaded` |
| send one, or a model, to a process of Ray or dask | `by_reference` |
| keep a teacher's most likely tokens in rows of a cache | `topk` |
| keep nested data: dicts, lists, dataclasses | `save_tree`, `load_tree` |
| store a tensor subclass of your own | `register_subclass` |
| compute with packed weights bit for bit as with dense ones | `exact` |

In modules, which `import offload` brings along:

| in | to | use |
| --- | --- | --- |
| `offload.budget` | keep values in memory, or drop them | `keep_resident` `evict` |
| | set how far to read ahead | `set_read_ahead` |
| `offload.training` | train with state on disk | `offload_optimizer` `offload_activations` |
| | save training as a whole, and resume after a crash | `save_training` `load_training` |
| `offload.generation` | keep the keys and values of prompts for later runs | `PromptCache` |
| `offload.integrations` | keep keys and values of a transformers model on disk | `kv_cache` |
| | read files and tables of others into a cache | `cache_from` |
| | open or write a folder of tensordict's | `tensordict` |
| `offload.errors` | catch specific errors | |
"""

import sys as _sys
from typing import TYPE_CHECKING

from offload import importing as _importing

if _sys.platform != "linux":
    raise ImportError(f"offload works on Linux, whose mappings, locks and hints it builds on; this is {_sys.platform}")

if not getattr(_sys, "_is_gil_enabled", lambda: True)():  # of a free-threaded build, since Python 3.13
    raise ImportError(
        "offload counts on Python's global interpreter lock, and this interpreter runs without: start it with -X gil=1"
    )

__all__ = [
    "ON_DISK",
    "LoadReport",
    "MapReport",
    "OffloadError",
    "OffloadedTensor",
    "TensorCache",
    "by_reference",
    "disk_offload",
    "exact",
    "from_pretrained",
    "init_empty_weights",
    "is_offloaded",
    "load_checkpoint_and_dispatch",
    "load_checkpoint_in_model",
    "load_file",
    "load_tree",
    "map_batches",
    "map_values",
    "materialize",
    "memory_summary",
    "merge_lora",
    "offloaded_like",
    "offloading",
    "plan",
    "quantize_",
    "register_subclass",
    "save_checkpoint",
    "save_tree",
    "set_max_memory",
    "topk",
]
__version__ = "0.1.0"

if TYPE_CHECKING or _importing.is_wanted():
    from offload import budget, errors, generation, integrations, training  # noqa: F401
    from offload.batches.mapping import map_batches
    from offload.budget import memory_summary, set_max_memory
    from offload.cache.table import TensorCache
    from offload.cache.topk import topk
    from offload.errors import OffloadError
    from offload.generation import features as _features  # noqa: F401  what `generate` can do beyond its own
    from offload.integrations.peft import merge_lora
    from offload.integrations.torchao import quantize_
    from offload.integrations.transformers import from_pretrained, init_empty_weights
    from offload.models.device_map import ON_DISK
    from offload.models.loader import (
        LoadReport,
        disk_offload,
        load_checkpoint_and_dispatch,
        load_checkpoint_in_model,
        load_file,
    )
    from offload.models.saving import save_checkpoint
    from offload.models.values import MapReport, map_values, offloaded_like
    from offload.offloading.context import offloading
    from offload.planning.estimate import plan
    from offload.storage.subclasses import register_subclass
    from offload.tensor import groups as _groups  # noqa: F401  fills the tables of rules, as the next one
    from offload.tensor import ops as _ops  # noqa: F401
    from offload.tensor.locals import is_offloaded
    from offload.tensor.materialize import materialize
    from offload.tensor.processes import by_reference
    from offload.tensor.products import exact
    from offload.tensor.wrapper import OffloadedTensor
    from offload.tree.saved import load_tree, save_tree
else:

    def __getattr__(name: str) -> object:
        """For a program that has the command's name, and is another."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        _importing.library()
        return globals()[name]
