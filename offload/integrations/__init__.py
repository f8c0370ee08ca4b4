"""Third-party libraries: each module imports its library when it is called.

| module | what |
| --- | --- |
| `transformers` `hub` | `from_pretrained` and accelerate's empty weights, and finding a model's files |
| `keys_values` | `kv_cache`: keys and values of a transformers model, on disk |
| `adapters` `peft` | adapters over values on disk, as they are loaded with a model; `merge_lora` |
| `compressed_tensors` | quantizing a checkpoint to 8 or 4 bits, from file to file |
| `torchao` | `quantize_` |
| `rows` | `cache_from`: rows of arrays, tables, datasets and files into a cache |
| `tensordict` | reading and writing folders of `TensorDict.memmap` |
"""

from offload.integrations import tensordict
from offload.integrations.keys_values import kv_cache
from offload.integrations.rows import cache_from

__all__ = ["cache_from", "kv_cache", "tensordict"]
