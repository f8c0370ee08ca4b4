"""Memory and disk usage while a block runs.

Always true:
- a page is self-contained: it loads no font, script or picture
- only a page of ours is ever replaced

| module | what |
| --- | --- |
| `page` | `memory_report`: watches a block, and writes the page when it ends |
| `charts` | line and bar charts as SVG, and the page around them |
"""

from offload.report.page import memory_report

__all__ = ["memory_report"]
