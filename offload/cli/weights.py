"""`offload quantize` and `merge-lora`: write a model with changed weights, from file to file.

Always true:
- the named model is only read, and the new folder appears complete
- a killed run is continued with `--resume`, and never restarted unless requested
"""

from __future__ import annotations

import argparse
import sys

from offload.cli import arguments
from offload.cli.files import add_dtype, add_shard_size, dtype_of_copy, print_written
from offload.cli.models import add_revision, folder_of_model
from offload.cli.output import counted, doing, say

_FORMS = {"int8": "8-bit integers", "int4": "4-bit integers", "fp8": "8-bit floating-point numbers (E4M3)"}


def add_to(commands: arguments.Commands) -> None:
    """Add these commands to a parser."""
    command = commands.add_parser("quantize", help="write a model in 8 or 4 bits", description=quantize.__doc__)
    _add_folders(command, "model")
    forms = command.add_mutually_exclusive_group(required=True)
    for form, words in _FORMS.items():
        forms.add_argument(f"--{form}", dest="form", action="store_const", const=form, help=words)
    command.add_argument(
        "--group-size",
        type=arguments.count,
        default=128,
        metavar="N",
        help="columns that share a scale, for --int8 and --int4; fewer in a layer that it does not divide "
        "(default: %(default)s)",
    )
    command.set_defaults(run=quantize)

    merging = commands.add_parser("merge-lora", help="merge an adapter into its base", description=merge_lora.__doc__)
    _add_folders(merging, "model", "adapter")
    merging.set_defaults(run=merge_lora)
    for made in (command, merging):
        add_dtype(made)
        add_shard_size(made)
        add_revision(made)
        made.add_argument("--resume", action="store_true", help="resume a run that was killed")


def _add_folders(command: argparse.ArgumentParser, *sources: str) -> None:
    about = {
        "model": "a folder with a checkpoint, a GGUF file, or a model on the hub",
        "adapter": "a folder that peft saved, or an adapter on the hub",
    }
    made = [command.add_argument(source, help=about[source]) for source in sources]
    made.append(command.add_argument("target", type=arguments.path, help="the new folder"))
    arguments.complete(*made, folders=True)


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
