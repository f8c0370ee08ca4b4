"""A tensor whose data is a file.

Always true:
- the file is the only copy; a guest, the tensor an op computes with, is never written back by itself
- shape, dtype, strides and target device are known without opening the file
- a view remembers its strides and offset; writing through it writes the file

How an op is executed, in this order, unless it is a product or pick with a weight that is bound (`bound`):
1. a rule of its own, from the tables `FUNCTIONS` (`__torch_function__`) and `RULES` (`__torch_dispatch__`);
2. an op whose schema says that it returns a view: recorded, nothing is read;
3. all else: arguments are materialized, the op runs on them, and what the schema says was mutated is written back.

Products (`F.linear`, `mm`, `addmm`) go to `products` first, which multiplies by packed weights, and then to
`rules.read_directly` above autograd, or `rules.read` below it. Picks are executed in `ops.embed` and
`ops.pick_where_the_file_is` (`embedding`, `index_select`, indexing), and products of groups in
`groups.multiply_groups`.

| module | what |
| --- | --- |
| `wrapper` | the class `OffloadedTensor`: what users call, where torch enters, pickles |
| `registry` | the tables of rules |
| `rules` | 2 and 3: what follows from an op's schema; how functions run on guests |
| `ops` | 1: rules for ops that 2 and 3 do not fit, and for values of tensor subclasses |
| `views` | which part of which value a tensor is; what stands for a value while a compiler traces |
| `guests` | the plain tensors that ops compute with |
| `replacing` | values and views that are replaced: `update_values`, `.data`, metadata that changes in place |
| `blocks` | values packed in the blocks of a GGUF file |
| `locals` | a rank's part of a DTensor |
| `arguments` | checks of user input |
| `materialize` | offloaded tensors, modules and nested containers made plain again |
| `recipes` `decoded` | values computed from others when they are read: joined, cast; decoded |
| `small` | such values of up to 64 KiB, which are computed once |
| `boxes` | contiguous parts of a value's memory |
| `runs` | which stored rows make rows of a value: asked for by all that decodes, multiplies or picks them |
| `backends` | what does so: C, Triton, torch |
| `products` `bound` | products with packed weights, computed from the packed bytes; weights that are bound; `exact` |
| `hybrid` | whether products for an accelerator are computed where the weights lie |
| `picks` | rows that are picked from a computed value, such as a packed embedding |
| `groups` | products of groups of rows with a matrix each, as of experts |
| `experts` | the experts of a layer as one act: asked for together, multiplied where they lie |
| `deferred` | tensors of a checkpoint that are being rearranged: recorded as recipes |
| `rebuilt` | tensor subclasses whose inner tensors are in files |
| `saved` | writing tensors into other files than their own |
| `processes` | passing tensors to another process |
"""
