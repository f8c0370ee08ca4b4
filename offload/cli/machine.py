"""`offload doctor`: what this machine can do.

Always true:
- nothing is left in the folder that is tested
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from offload.cli.output import doing, print_json, print_pairs

if TYPE_CHECKING:
    from offload.planning.machine import Diagnosis


def doctor(options: argparse.Namespace) -> None:
    """Say what this machine can do: versions, devices, memory, and the speed of a folder's disk."""
    with doing("measuring the disk"):
        from offload.planning.machine import diagnose

        found = diagnose(options.folder)
    if options.json:
        print_json(found)
    else:
        print_pairs(_lines(found).items())


def _lines(found: Diagnosis) -> dict[str, str]:
    from rich.filesize import decimal

    disk = found.disk
    rates = {"write, synced": disk.writes, "read, cold": disk.reads}
    written = {name: "not possible here" if rate is None else f"{decimal(int(rate))}/s" for name, rate in rates.items()}
    return {
        **found.versions,
        "kernels for packed weights": found.kernels,
        **{device: decimal(size) for device, size in found.devices.items()},
        "memory": decimal(found.memory),
        "available now": decimal(found.available),
        f"free in {disk.folder}": decimal(disk.free),
        **written,
    }
