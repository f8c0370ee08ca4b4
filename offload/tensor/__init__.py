"""A tensor whose data is a file.

Always true:
- the file is the only copy; what an op computes with is a guest and is never written back by itself
- shape, dtype, strides and target device are known without opening the file
- a view remembers how it was cut; writing through it writes the file

How an op is carried out, in this order:
1. a rule of its own, from the tables `FUNCTIONS` (`__torch_function__`) and `RULES` (`__torch_dispatch__`);
2. an op whose schema says that it gives a view: recorded, nothing is read;
3. all else: the arguments are materialized, the op runs on them, and what the schema says was mutated is written back.

| module | what |
| --- | --- |
| `wrapper` | the class `OffloadedTensor` |
| `arguments` | what users hand in, checked |
| `attributes` | what is noted on a tensor in Python, carried along |
| `cuts` | how a view is cut from its value |
| `extents` `accelerated` | which bytes of its file a view reads; what stays on an accelerator |
| `tables` | 1: the rules that ops have of their own; filled by `ops` |
| `ops` | 1: those rules, for ops that 2 and 3 do not fit |
| `rules` | 2 and 3: what follows from an op's schema |
| `inner` | values that are themselves of a tensor subclass |
| `outside` | numpy, DLPack, text, addresses, pickles |
| `saved` | tensors on their way into a file that is not theirs |
| `processes` | passing to another process |
| `materialize` | tensors, modules and nests of them, plain again |
| `traced` | what stands for a file while a compiler traces |
"""
