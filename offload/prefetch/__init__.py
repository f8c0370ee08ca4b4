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
| `plan` | values under a budget: which of them stay in memory |
| `room` | values on an accelerator, and how much of its memory they may take |
| `value` | which ranges of a stored value are known |
| `order` | what one thread, or several as one, have read, and will read next |
| `reader` | the threads that read ahead, and drop what is no longer needed |
| `picked` | of values that ops pick from many, which ones stay, by use |
| `tables` | rows of a table, such as an embedding: which are in memory; files of rows that are read in whole |
| `copies` | stored bytes on an accelerator: which stay there, and how the others get there |
| `pages` | which parts of a mapped file are in the page cache |
| `direct` | parts of files that are read past the page cache |
| `loads` | values that will not stay, read so in the order of their use |
| `scratch` | the memory for that, and for computed values |
| `parallel` | a large range, read by two threads |
| `staging` | copies to an accelerator through reused pinned memory |

A value goes through these stages (`plan.Stage`; `Staged.move_to` is the only way), and a load, which is read past the
page cache, from `AWAY` to `RESIDENT`:

```
          needed soon          the reader takes it           it is read
   AWAY ---------------> QUEUED -----------------> READING ---------------> RESIDENT
    |  ^                   |  ^                                                |
    |  |                   |  | its pages may be gone                          |
    |  |                   v  |                                                |
    +--|---------------> IN_USE <----------------------------------------------+
       |   an op uses it   |  ^
       |                   |  | used again, before it is dropped
       |                   v  |
       +---------------- LEAVING
          it is dropped
```

- a value that does not stay, by the plan or for a lease, is `LEAVING` once others were used after it; so is one that
  was read ahead in vain, or still is. If it is needed again soon, it is `QUEUED` instead
- a value that is evicted, was queued in vain, or could not be read is `AWAY`: nothing is known about its pages, and
  the next op looks
- an op waits only for a value that is `READING`; a queued one it reads itself
"""
