"""`offload plan`: whether a model runs here, and how fast.

Always true:
- no weight is read, and none is downloaded
"""

from __future__ import annotations

import argparse

from offload.cli import arguments
from offload.cli.models import add_max_memory, add_model, add_revision, add_trust
from offload.cli.output import allow_json, doing, print_json, say


def add_to(commands: arguments.Commands) -> None:
    """Add this command to a parser."""
    command = commands.add_parser("plan", help="say whether a model runs here, and how fast", description=plan.__doc__)
    add_model(command)
    add_max_memory(command)
    command.add_argument(
        "--device", type=arguments.device, help="where to compute: cpu, cuda... (default: the accelerator, if any)"
    )
    command.add_argument(
        "--batch", type=arguments.count, default=1, metavar="N", help="sequences at a time (default: %(default)s)"
    )
    command.add_argument(
        "--context", type=arguments.count, default=1024, metavar="N", help="tokens of each (default: %(default)s)"
    )
    command.add_argument(
        "--disk-rate", type=arguments.size, metavar="SIZE", help="bytes per second: 2GB (default: measured)"
    )
    add_revision(command)
    add_trust(command)
    command.set_defaults(run=plan)
    allow_json(command)


def plan(options: argparse.Namespace) -> None:
    """Say whether a model runs on this machine, how fast, and in which ways it would run faster."""
    with doing("importing transformers"):
        from offload.planning.estimate import plan as planned

    with doing("measuring the disk and the processor"):
        found = planned(
            options.model,
            max_memory=options.max_memory,
            device=options.device,
            batch=options.batch,
            context=options.context,
            disk_rate=options.disk_rate,
            trust_remote_code=options.trust_remote_code,
            **({"revision": options.revision} if options.revision else {}),
        )
    if options.json:
        print_json(found)
    else:
        say(str(found))
