"""Many batches through one model: each block is read once for all of them.

Always true:
- one thread runs at a time; a batch's results are bit for bit what they would be on its own
- blocks compute in the iterating thread, unless gradients are recorded
- a thread inherits the caller's modes, contexts and settings; each batch has its own random numbers
- when the iteration ends, in whatever way, no thread and no hook is left

| module | what |
| --- | --- |
| `mapping` | `map_batches` |
| `scheduler` | scheduling: which batch continues, and how far, stage by stage |
| `delegated_call` | calling a block's forward in the thread that iterates |
| `gathering` | experts of several batches as one act |
| `stages` | the parts of a model that batches pass together |
| `states` | thread and process state, carried between threads |
"""
