"""One name, one file: mapped without a copy, written atomically.

| module | what |
| --- | --- |
| `handle` | a stored value, shared by the tensors that are views of it |
| `file` | a safetensors file, checked and mapped |
| `pages` | which parts of a mapped file are in memory |
| `write` `beside` | put a whole file in place, or leave the old one: one of ours, and one that others write |
| `regular` | a file that is to be read: a regular one, and not too large |
| `naming` | which tensor an error about a file was for |
| `folders` | the user's folders, and private ones that vanish |
| `layout` | how values lie in memory and in files |
| `header` `dtypes` `subclasses` `names` `paths` | the format, and what files are called |
| `pickled` `loose` `scratch` | what torch.save wrote, its values that are copied out, and memory for that |
| `process` `locks` `modes` | whose files these are, who waits, and what torch is in the middle of |
| `background` | a thread that works while there is something to do |
"""
