"""Many batches through one model: each block is read once for all of them.

Always true:
- one thread runs at a time; what each batch gives is what it gives by itself, bit for bit
- a thread has the world of the caller: modes, contexts, settings; random numbers are the batch's own
- when the iteration ends, however it ends, no thread is left, and no hook

| module | what |
| --- | --- |
| `mapping` | `map_batches` |
| `lift` | which batch goes on, and how far: floor by floor |
| `floors` | the parts of a model that batches go through together |
| `world` | what a thread and the process have set, carried from one to another |
| `waiting` | the tensors of a batch that waits: how much they take, and how they go to disk |
"""
