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


def doctor(options: argparse.Namespace) -> int:
    """Say what this machine can do: versions, devices, memory, and the speed of a folder's disk."""
    with doing("measuring the disk"):
        from offload.planning.machine import diagnose

        found = diagnose(options.folder)
    checks: dict[str, str | None] = {}
    if options.check:
        with doing("comparing tiny models"):
            from offload.planning.check import check
            from offload.transformers_api import disable_progress_bar

            disable_progress_bar()
            checks = dict(check())
    if options.json:
        print_json({**vars(found), **({"checks": checks} if options.check else {})})
    else:
        on_disk = {f"{what}, on disk": failure or "as in memory, bit for bit" for what, failure in checks.items()}
        print_pairs({**_lines(found), **on_disk}.items())
    return int(any(checks.values()))


def _lines(found: Diagnosis) -> dict[str, str]:
    from rich.filesize import decimal

    disk = found.disk
    rates = {"write, synced": disk.writes, "read, cold": disk.reads, "read with O_DIRECT": disk.reads_direct}
    written = {name: "not possible here" if rate is None else f"{decimal(int(rate))}/s" for name, rate in rates.items()}
    return {
        **found.versions,
        **{name: f"{found.versions[name]}, newer than what was tested ({one})" for name, one in found.newer.items()},
        "kernels for packed weights": found.kernels,
        **{device: decimal(size) for device, size in found.devices.items()},
        **{f"may stay on {device}": decimal(size) for device, size in found.on_devices.items()},
        "memory": decimal(found.memory),
        "available now": decimal(found.available),
        **({} if found.limit is None else {"left in the control group": decimal(found.limit)}),
        "may stay in memory (max_memory)": decimal(found.budget),
        "read ahead": decimal(found.read_ahead),
        f"free in {disk.folder}": decimal(disk.free),
        **written,
    }
