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

        diagnosis = diagnose(options.folder)
    if options.json:
        print_json(diagnosis)
    else:
        print_pairs(_lines(diagnosis).items())


def _lines(diagnosis: Diagnosis) -> dict[str, str]:
    from rich.filesize import decimal

    disk = diagnosis.disk
    rates = {"write, synced": disk.writes, "read, cold": disk.reads}
    written = {name: "not possible here" if rate is None else f"{decimal(int(rate))}/s" for name, rate in rates.items()}
    return {
        **diagnosis.versions,
        "kernels for packed weights": diagnosis.kernels,
        **{device: decimal(size) for device, size in diagnosis.devices.items()},
        "memory": decimal(diagnosis.memory),
        "available now": decimal(diagnosis.available),
        f"free in {disk.folder}": decimal(disk.free),
        **written,
    }
