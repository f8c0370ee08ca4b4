"""Beyond one process: models of torch.distributed, with each rank's share on disk.

Always true:
- a DTensor says which share a rank has, torch.distributed moves activations, and `offload` says where the bytes are
- a DTensor is outside, and a tensor on disk inside: never the other way
- every host opens a checkpoint of its own; no weight travels
- torch.distributed is imported only where a DTensor came in

What walks a model looks inside a DTensor with `offload.tensor.locals.local_of`.

| module | what |
| --- | --- |
| `placing` | the share that a rank has of a value |
| `cuts` | shares that are cut once, into files |
| `together` | what ranks do together, or none does |
| `staging` | a state in files, while `async_save` writes it |
"""

from offload.distributed.staging import FileStager

__all__ = ["FileStager"]
