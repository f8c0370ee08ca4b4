"""Named rows on disk: written in batches, by one process or many, read by index, whole after a crash.

| module | what |
| --- | --- |
| `table` | `TensorCache`, which users hold: rows in and out, columns, files |
| `batches` | rows that are read before they are asked for |
| `store` | a folder: made, opened, read, written, closed, and the order in which things are written |
| `states` | the bitmap: which rows are filled, and how many there are |
| `columns` `rowfile` | columns of rows of one size and of any; rows of a file by their numbers |
| `held` `archive` | tensors that are there already, in memory or in a file, as a cache; and such a file |
| `incoming` | rows on their way in, from records and from elsewhere |
| `schema` | what a column is, and what a folder says of itself |
| `indexing` `claims` | which rows are meant, and who computes those that are missing |
"""
