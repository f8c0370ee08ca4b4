"""What Linux, threads and torch's modes need from everybody, and that knows nothing of tensors.

| module | what |
| --- | --- |
| `regular` | paths, and opening the regular file that is there |
| `reasons` | what a system error means, for which file and which tensor |
| `locks` | between threads, across forks and interrupts; between processes, on files |
| `background` | a thread that an interrupt can't lose; one that runs while there is work |
| `clock` | the clock of rules that depend on time |
| `modes` | leaving torch's modes |
"""
