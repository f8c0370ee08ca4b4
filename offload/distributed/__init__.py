"""Beyond one process: torch.distributed models with each rank's shard on disk.

Always true:
- a DTensor says which shard a rank has, torch.distributed moves activations, and `offload` says where the bytes are
- the DTensor is outside and the tensor on disk inside, never the other way round
- every host opens its own copy of a checkpoint; no weight is sent
- torch.distributed is imported only when there is a DTensor

Code that walks a model looks inside a DTensor with `offload.tensor.locals.local_of`.

| module | what |
| --- | --- |
| `placing` | a rank's shard of a value |
| `cuts` | shards that are cut once and stored in files |
| `together` | steps that all ranks do together, or none does |
| `staging` | a snapshot in files while `async_save` writes it |
"""

from offload.distributed.staging import FileStager

__all__ = ["FileStager"]
