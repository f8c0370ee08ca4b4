"""The command `offload`.

| module | commands |
| --- | --- |
| `plan` | `plan` |
| `models` | `generate` `chat` |
| `batch` | `batch` |
| `serve` | `serve` |
| `files` | `inspect` `convert` `quantize` `merge-lora` `verify` |
| `rows` | `cache` |
| `machine` | `doctor` |
| `commands` | the table of commands, with their arguments and options |
| `arguments` | parsing arguments |
| `main` `output` | the command line as a whole, and its output |
"""

from offload.cli.main import main

__all__ = ["main"]
