"""Packed weight formats: the quantization described by a checkpoint, as recipes of dense weights.

| module | contents |
| --- | --- |
| `formats` | a checkpoint's values in the model's form, and back in their packed pieces; the table of packed formats |
| `decoding` | a dense weight as a recipe over packed pieces; what a format says of its pieces |
| `numbers` | packed numbers as floats, and factors shared by blocks |
| `bitsandbytes` | NF4, FP4 and 8-bit integers |
| `compressed_tensors` | formats of llm-compressor and vLLM: W4A16, W8A16, W8A8, FP8, NVFP4, MXFP4, MXFP8 |
| `gguf` | llama.cpp files as checkpoints of transformers models |
| `fp8` | small floats with a scale per block: DeepSeek, Qwen, Mistral; the experts of gpt-oss (MXFP4) |
| `integers` | GPTQ and AWQ: integers with a scale and a zero point per group; ternary BitNet |
| `torchao` | torchao's classes over their inner tensors |

Always true:
- loading decodes nothing, but checks shapes and dtypes of all pieces; an error names the tensor and the file
- an op sees bit for bit what plain transformers loads when it dequantizes, computed by its own code where there is some
"""
