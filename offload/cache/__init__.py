"""Named rows on disk: written in batches by one process or many, read by index, consistent after a crash.

| module | what |
| --- | --- |
| `table` | `TensorCache`, the user interface: rows in and out, columns, files |
| `batches` | rows read ahead of use, stopped and resumed |
| `store` | a folder: created, opened, read, written, closed; and the order of writes |
| `states` | which rows are filled, and how many there are |
| `columns` | columns with rows of fixed or varying size |
| `rowfile` | rows of a file by index; any bytes of a file |
| `held` | existing tensors, in memory or in a file, as a cache; writing such a file |
| `incoming` | rows to be added, from records and other sources |
| `topk` | a teacher's log-probabilities, packed |
| `schema` | what a column is, and the manifest of a folder |
| `indexing` | resolving row indices |
| `missing` | missing rows: shared out among processes, computed, and written |
"""
