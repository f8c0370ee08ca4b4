"""The context `offloading`: results go to disk as they are made.

The result of an op is, in this order: left alone, if it is a view or the op is traced; computed straight into its file,
if it is large and this kind of op supports that; written to a file afterwards, if it is large, dense and new; otherwise
left in memory. The debug log says which way each took.

| module | what |
| --- | --- |
| `context` | the context itself, and the two torch modes behind it |
| `made` | where results go, how large they have to be, and results computed straight into their file |
"""
