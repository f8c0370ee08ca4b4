"""A model and its checkpoint: filled, moved to disk, changed value by value, and saved.

Always true:
- what lies in a checkpoint in the dtype that is asked for is referenced there, not copied, but for what lies in a
  pickle as no tensor can
- tied weights are one parameter, over one file
- a checkpoint is replaced whole or not at all, and a value is the old one or the new one
- what is copied, cast or replaced goes through memory value by value, or in pieces

| module | what |
| --- | --- |
| `checkpoint` | a checkpoint as a mapping from names to stored values |
| `device_map` | which tensor goes where |
| `loader` | a model, empty or in memory, filled and moved: `load_checkpoint_and_dispatch` `disk_offload` `load_file` |
| `slots` | a model's tensors, each once, under all their names |
| `deferred` `assembly` | a tensor that is still to be put together from stored ones, and doing that |
| `pretrained` `hooks` | what transformers and accelerate have a say in: names, forms, and where weights are held |
| `values` `journal` | many values, replaced one at a time: `map_values`, and what is noted of its runs |
| `saving` `conversion` | a checkpoint written: `save_checkpoint`, and another one in another form |
| `verify` | whether a checkpoint is whole |
"""

import logging

log = logging.getLogger(__name__)
