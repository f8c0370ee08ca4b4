"""Models: filling a model from a checkpoint, moving it to disk, changing its values, and saving it.

Always true:
- loading writes nothing: values that are stored the way the model wants them are referenced, and what has to be
  joined, cut, cast or decoded first becomes a recipe over them; only pickled values that can't be mapped are copied
- tied weights are one parameter, over one file
- a checkpoint is replaced as a whole or not at all, and a value is either the old one or the new one
- what is copied or replaced goes through memory one value at a time, or in pieces

| module | what |
| --- | --- |
| `device_map` | which tensor goes where, and accelerate's hooks: where weights are held, and activations go |
| `loader` | fills a model, empty or not, and moves it: `load_checkpoint_and_dispatch` `disk_offload` `load_file` |
| `slots` | a model's distinct tensors, each under all its names, and their places; a rank's shard of a DTensor |
| `pretrained` | what transformers decides: names and formats; its own loader, given tensors that are on disk |
| `experts` | an implementation of transformers' experts, the default for those on disk: a layer's in one act |
| `values` | replacing many values one at a time, `map_values`, and the record of its runs |
| `saving` | `save_checkpoint` |
"""

import logging

log = logging.getLogger(__name__)
