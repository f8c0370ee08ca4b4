"""What memory and disk did while a block ran.

Always true:
- a page needs nothing else: no font, script or picture from anywhere
- only a page of the same kind is ever replaced

| module | what |
| --- | --- |
| `page` | `memory_report`: a block is watched, and the page is written when it ends |
| `charts` | lines and bars as SVG, and the page around them |
"""

from offload.report.page import memory_report

__all__ = ["memory_report"]
