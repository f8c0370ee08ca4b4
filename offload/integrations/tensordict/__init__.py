"""tensordict: opening folders written by `TensorDict.memmap` in place, and writing folders that it can open.

| module | what |
| --- | --- |
| `reading` | `load_memmap`, `load_memmap_`: offloaded tensors over the files of a folder |
| `writing` | `save_memmap`, `memmap_like`: a folder that tensordict opens |
"""

from offload.integrations.tensordict.reading import load_memmap, load_memmap_
from offload.integrations.tensordict.writing import memmap_like, save_memmap

__all__ = ["load_memmap", "load_memmap_", "memmap_like", "save_memmap"]
