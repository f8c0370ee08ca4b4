"""Checkpoints: named values in files. Nothing here needs a model.

Always true:
- opening a checkpoint reads headers and the index, no values
- values in a packed format become recipes over their pieces: nothing is decoded when a checkpoint is opened
- a checkpoint is replaced as a whole or not at all

| module | what |
| --- | --- |
| `checkpoint` | a checkpoint as a mapping from names to stored values |
| `dcp` | checkpoints written by many processes with torch.distributed.checkpoint |
| `forms` | packed weight formats, as recipes of dense weights |
| `writing` | named tensors as a new checkpoint |
| `conversion` | a checkpoint to another dtype or form, or to one file per value |
| `companions` | the files beside a transformers model's weights: configuration, tokenizer, code, adapter |
| `verify` | checks that a checkpoint is complete |
"""

import logging

log = logging.getLogger(__name__)
