"""One name, one file: mapped without a copy, written atomically.

| module | what |
| --- | --- |
| `handle` | a stored value, shared by its views: in a file of others, in one of ours, or computed |
| `owning` | files of our own: how a value gets one, and is replaced there |
| `file` | a file of tensors, checked and mapped |
| `mapping` | file bytes mapped into memory, and scratch memory for a value in transit |
| `replacing` | how a file or a folder is put in place: whole, or not at all; cleaning up after dead processes |
| `write` | writing values into a file |
| `state_file` | small JSON files that describe a folder |
| `folders` | the user's folders and private temporary ones; how files are named |
| `layout` | how values lie in memory and in files; the words for dtypes |
| `nodes` | plain data as JSON, and back |
| `header` `subclasses` | the file format |
| `pickled` | files that torch.save wrote |
| `gguf_header` | files from llama.cpp |
"""

import logging

log = logging.getLogger("offload.storage")
