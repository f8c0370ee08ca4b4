"""What is in memory: what stays there, and what is read ahead while the current op computes.

Always true:
- only speed depends on it: a wrong guess, a failed read or an evicted page never changes what a read returns
- the order is learned from the last two reads of each thread; where it has branched before, it is followed only once it
  has been seen twice
- the bytes that stream through memory are limited by the window of their pool, for all threads together
- nothing is read ahead while no thread reads, or if everything is in memory

| module | what |
| --- | --- |
| `engine` | the entry point: a value is read |
| `value` | a value as the prefetcher knows it |
| `plan` | which values stay in memory, under a budget |
| `order` | what one thread has read, and will read next |
| `lease` | values that several threads use one after the other |
| `reader` | the threads that read ahead, and drop what is no longer needed |
| `picked` | of values that ops pick from many, which ones stay, by use |
| `tables` | rows of a table, such as an embedding: which are in memory, and which will be needed |
| `filling` | tables that rows are picked from, read in whole if there is room |
| `staging` | copies to an accelerator through reused pinned memory |
"""
