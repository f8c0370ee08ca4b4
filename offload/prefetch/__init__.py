"""What is in memory: what stays there, and what is brought in ahead while the present op computes.

Always true:
- only speed depends on it: a wrong guess, a failed read or a dropped page never changes what a read gives
- the order is learned from the last two reads of each thread; where it has branched before, it is followed only after
  it has been seen twice
- what streams through memory is bounded by the window of its pool, over all threads
- nothing is read ahead while nobody reads, nor where everything is in memory

| module | what |
| --- | --- |
| `engine` | a read of a value: the way in |
| `stream` | what one thread reads, and will read |
| `reader` | the threads that read ahead, and drop what is done with |
| `residency` | what stays: values under a budget |
| `picked` | who stays of values that are picked from many, by their use |
| `filling` | files that rows are picked from, brought in whole where they have room |
| `tables` | rows of values, such as embeddings: which are here, and which are to come |
| `staging` | copies to an accelerator, through memory that is pinned once |
"""
