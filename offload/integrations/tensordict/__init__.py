"""tensordict, both ways: folders that `TensorDict.memmap` wrote, in place, and folders that it opens.

| module | what |
| --- | --- |
| `reading` | `load_memmap`, `load_memmap_`: offloaded tensors over the files of such a folder |
| `writing` | `save_memmap`, `memmap_like`: a folder that tensordict opens |
| `rows` | TensorDicts as rows of a cache |
"""

from offload.integrations.tensordict.reading import load_memmap, load_memmap_
from offload.integrations.tensordict.writing import memmap_like, save_memmap

__all__ = ["load_memmap", "load_memmap_", "memmap_like", "save_memmap"]
