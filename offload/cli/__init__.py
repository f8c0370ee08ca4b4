"""The command `offload`.

| module | commands |
| --- | --- |
| `models` | `generate` `bench` |
| `files` | `inspect` `convert` `verify` |
| `rows` | `cache info` `cache verify` `cache export` |
| `machine` | `doctor` |
| `arguments` | what is typed, as what it means |
| `main` | the command line as a whole; `output` prints |
"""

from offload.cli.main import main

__all__ = ["main"]
