"""One name, one file: mapped without a copy, written atomically.

| module | what |
| --- | --- |
| `handle` | a stored value, shared by the tensors that are views of it |
| `file` | a file of tensors, checked and mapped; and its values that are copied out |
| `mapping` | bytes of files as memory, and memory for a value on its way |
| `pages` | which parts of a mapped file are in memory |
| `replacing` | how a file or a folder gets in its place: whole, or not at all; and what dead processes left |
| `write` | values on their way into a file |
| `regular` | a path, and the file there that is to be opened: a regular one |
| `state_file` | small files of JSON: what a folder says of itself |
| `reasons` | what an error of the system means, of which file, and for which tensor |
| `folders` | the user's folders, and private ones that vanish; what files are called |
| `layout` | how values lie in memory and in files; the words for dtypes |
| `nodes` | plain data as JSON, and back |
| `header` `subclasses` | the format |
| `pickled` | what torch.save wrote |
| `gguf_header` | what llama.cpp has |
| `locks` `modes` | who waits, and what torch is in the middle of |
| `background` | a thread that works while there is something to do |
"""

import logging

log = logging.getLogger("offload.storage")
