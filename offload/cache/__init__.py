"""Named rows on disk: written in batches, by one process or many, read by index, whole after a crash.

| module | what |
| --- | --- |
| `table` | `TensorCache`, which users hold |
| `making` | a new folder |
| `store` | an opened one: its columns, and the order in which things are written |
| `states` | the bitmap: which rows are filled, and how many there are |
| `columns` `heap` | rows of one size, and rows of any |
| `rowfile` | rows of a file, by their numbers |
| `held` `tensors` `archive` | tensors that are there already, in memory or in a file, as a cache; and such a file |
| `records` `fields` | rows on their way in, from records and from elsewhere |
| `reading` `batches` `hot` | rows on their way out |
| `verify` | whether it is whole |
| `schema` `manifest` | what a column is, and where that is written down |
| `indexing` `gather` `lock` | which rows are meant, how they are read, and who waits |
"""
