"""`offload plan`: whether a model runs here, and how fast.

Always true:
- no weight is read, and none is downloaded
"""

from __future__ import annotations

import argparse

from offload.cli.output import doing, print_json, say


def plan(options: argparse.Namespace) -> None:
    """Say whether a model runs on this machine, how fast, and in which ways it would run faster."""
    with doing("importing transformers"):
        from offload.planning.estimate import plan as planned

    with doing("measuring the disk and the processor"):
        answer = planned(
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
        print_json(answer)
    else:
        say(str(answer))
