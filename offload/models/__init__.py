"""A model and its checkpoint: filled, moved to disk, changed value by value, and saved.

Always true:
- loading writes nothing: what lies in a checkpoint as the model wants it is referenced there, and what has to be
  joined, cut, cast or decoded first is a recipe over that; only what lies in a pickle as no tensor can is copied
- tied weights are one parameter, over one file
- a checkpoint is replaced whole or not at all, and a value is the old one or the new one
- what is copied or replaced goes through memory value by value, or in pieces

| module | what |
| --- | --- |
| `checkpoint` | a checkpoint as a mapping from names to stored values |
| `distributed` | what many processes have written by torch.distributed.checkpoint |
| `device_map` | which tensor goes where |
| `loader` | a model, empty or in memory, filled and moved: `load_checkpoint_and_dispatch` `disk_offload` `load_file` |
| `slots` | a model's tensors, each once, under all their names |
| `deferred` `assembly` | a tensor that is still to be put together from stored ones, and doing that |
| `forms` | the forms that weights are packed in: recipes of dense ones |
| `pretrained` `hooks` | what transformers and accelerate have a say in: names, forms, and where weights are held |
| `values` `journal` | many values, replaced one at a time: `map_values`, and what is noted of its runs |
| `saving` `conversion` | a checkpoint written: `save_checkpoint`, and another one in another form |
| `companions` | what lies beside the weights of a transformers model: configuration, tokenizer, code |
| `verify` | whether a checkpoint is whole |
"""

import logging

log = logging.getLogger(__name__)
