"""`offload quantize` and `merge-lora`: write a model with changed weights, from file to file.

Always true:
- the named model is only read, and the new folder appears complete
- a killed run is continued with `--resume`, and never restarted unless requested
"""

from __future__ import annotations

import argparse
import sys

from offload.cli.files import dtype_of_copy, print_written
from offload.cli.models import folder_of_model
from offload.cli.output import counted, doing, say


def quantize(options: argparse.Namespace) -> None:
    """Write a model with its linear layers in 8 or 4 bits, in the format of compressed-tensors, without calibration.

    offload, transformers, vLLM and others load it. One weight at a time is in memory.
    """
    source = folder_of_model(options)
    with doing("importing transformers and compressed-tensors"):
        import compressed_tensors.quantization.quant_scheme  # noqa: F401 - here, as it takes seconds
        import transformers.models.auto  # noqa: F401

        from offload.integrations.compressed_tensors import quantize_checkpoint

    left = quantize_checkpoint(
        source,
        options.target,
        options.form,
        group_size=options.group_size,
        dtype=options.dtype or dtype_of_copy(source),
        max_shard_size=options.max_shard_size,
        resume=options.resume,
    )
    if left:
        say(
            f"left as they are: {counted(len(left), 'layer')} whose columns do not divide into groups of 32 or more, "
            "or whose experts are stored as one tensor "
            f"({', '.join(left[:3])}{'...' if len(left) > 3 else ''})",
            file=sys.stderr,
        )
    print_written(options.target)


def merge_lora(options: argparse.Namespace) -> None:
    """Write a model with an adapter of peft merged into it: the values of peft's merge_and_unload, bit for bit."""
    source = folder_of_model(options)
    with doing("importing transformers and peft"):
        import peft  # noqa: F401 - here, as it takes seconds
        import transformers.models.auto  # noqa: F401

        from offload.integrations.peft import merge_checkpoint

    merge_checkpoint(
        source,
        options.adapter,
        options.target,
        dtype=options.dtype or dtype_of_copy(source),
        max_shard_size=options.max_shard_size,
        resume=options.resume,
    )
    print_written(options.target)
