"""Neighbours: one file each, which imports its neighbour when it is called.

| module | what |
| --- | --- |
| `accelerate` | empty weights, as accelerate makes them |
| `transformers` `hub` | `from_pretrained`, and where its files are |
| `keys_values` | `kv_cache`: keys and values of a transformers model on disk |
| `peft` | `merge_lora`, and adapters over values on disk |
| `compressed_tensors` | checkpoints in 8 and 4 bits, written from file to file |
| `torchao` `export` | `quantize_`, and its weights in the forms that others load |
| `rows` | `cache_from`: rows of others into a cache |
| `numpy` `hdf5` `arrow` `parquet` | whose rows these are |
| `tensordict` | folders of `TensorDict.memmap`, read and written |
| `log` | the logger of this wing |
"""

from offload.integrations import tensordict
from offload.integrations.keys_values import kv_cache
from offload.integrations.rows import cache_from

__all__ = ["cache_from", "kv_cache", "tensordict"]
