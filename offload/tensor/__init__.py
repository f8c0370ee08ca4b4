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
| `wrapper` | the class `OffloadedTensor`, the tables of rules that it is asked for, and what others may ask of it |
| `rules` | 2 and 3: what follows from an op's schema; and how functions run on guests |
| `ops` | 1: the rules of ops that 2 and 3 do not fit, and of values that are themselves of a tensor subclass |
| `guests` | the plain tensors that ops compute with, and what does while a compiler traces |
| `blocks` | values packed in the blocks of a GGUF file |
| `locals` | what a rank has of a DTensor |
| `arguments` | what users hand in, checked |
| `materialize` | tensors, modules and nests of them, plain again |
| `recipes` | values that are carried out from others when they are read: joined, cast, decoded |
| `rebuilt` | tensor subclasses over inner tensors in files |
| `rooms` | memory that values are carried out into, used again |
| `saved` | tensors on their way into a file that is not theirs |
| `processes` | passing to another process |
"""
