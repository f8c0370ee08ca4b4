"""One name, one file: mapped without a copy, written atomically.

| module | what |
| --- | --- |
| `handle` | a stored value, shared by the tensors that are views of it |
| `file` | a safetensors file, checked and mapped |
| `mapping` | bytes of files as memory, and memory for a value on its way |
| `pages` | which parts of a mapped file are in memory |
| `replacing` | how a file or a folder gets in its place: whole, or not at all; and what the dead left |
| `write` | values on their way into a file |
| `regular` | a path, and the file there that is to be opened: a regular one |
| `state_file` | small files of JSON: what a folder says of itself |
| `reasons` | what an error of the system means, of which file, and for which tensor |
| `folders` | the user's folders, and private ones that vanish |
| `layout` | how values lie in memory and in files |
| `nodes` | plain data as JSON, and back |
| `header` `dtypes` `subclasses` `names` | the format, and what files are called |
| `pickled` `loose` | what torch.save wrote, and its values that are copied out |
| `process` `locks` `modes` | whose files these are, who waits, and what torch is in the middle of |
| `background` | a thread that works while there is something to do |
"""

import logging

log = logging.getLogger("offload.storage")
