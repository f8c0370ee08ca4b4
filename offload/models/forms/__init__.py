"""The forms that weights are packed in: what a checkpoint's quantization says, as recipes of dense weights.

| module | what is in it |
| --- | --- |
| `decoding` | a dense weight as a recipe over packed pieces; which form a configuration names |
| `numbers` | packed numbers as floats, and factors that blocks of them share |
| `bitnet` | ternary weights for transformers' own modules |
| `bitsandbytes` | NF4, FP4 and 8-bit integers |
| `compressed_tensors` | what llm-compressor and vLLM publish: W4A16, W8A16, W8A8, FP8, NVFP4, MXFP4, MXFP8 |
| `gguf` | files of llama.cpp as checkpoints of transformers' models |
| `fp8` | 8-bit floats with a scale for each block (DeepSeek, Qwen, Mistral), and 4-bit experts beside them |
| `integers` | GPTQ and AWQ: integers with a scale and a zero point for each group |
| `mxfp4` | the experts of gpt-oss: 4-bit floats with an exponent for each block |
| `packing` | the packed pieces of a model's values, for saving |
| `torchao` | torchao's classes, over their inner tensors |

Always true:
- nothing is decoded by loading: shapes and dtypes of all pieces are checked then, and an error names tensor and file
- what an op sees is bit for bit what plain transformers loads where it dequantizes, by its own code where it has some
"""
