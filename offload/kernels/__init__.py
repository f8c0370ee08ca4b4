"""Packed bytes: decoded and multiplied where they lie, in plain C behind ctypes; on a GPU, by Triton.

Always true:
- decoding gives the bits of the torch chain that does the same; where no library was built, that chain runs
- a product with packed rows is accumulated in float32 from unrounded numbers, or from exact sums of integers: a row of
  the result depends neither on the number of threads nor on the rows beside it
- sizes are checked in one place, before an address is passed on

| module | what |
| --- | --- |
| `native` | the compiled library and its threads: decode rows, pick some, multiply by rows, experts of a layer |
| `accelerated` | packed rows on a GPU, decoded and multiplied by Triton where it is installed |
| `triton_rows` | the functions that Triton compiles |
| `packed` | how rows are packed, and the matrices that the library is given |
| `logps` | the largest log-probabilities of rows, packed |

| source | what |
| --- | --- |
| `kernels.c` | the functions that are exported; how rows are divided among threads |
| `experts.h` | the experts of a layer in one call |
| `kernels.h` | the kinds of rows, and what the sources share |
| `rows.h` | decoding and multiplying rows; `rows_avx512.c` and others compile it for an instruction set each |
| `gguf.h` | the kinds of blocks in GGUF files, as floats |
| `limbs.h` | products with such blocks, in integers; `limbs_vnni.c` compiles it for products of bytes |
| `coded.c` `coded.h` | blocks whose numbers are codes: taken apart to bytes in plain C, then the same for all kinds |
| `numbers.h` | numbers whose factors are stored elsewhere |
| `words.h` | integers in words, outputs innermost |
| `pairs.h` | products of bfloat16 numbers, two at a time |
| `logps.c` | packing and unpacking log-probabilities |
| `simd.h` | vectors, under one set of names |
"""
