"""The command `offload`.

| module | commands |
| --- | --- |
| `models` | `generate` `bench` |
| `files` | `inspect` `convert` `verify` |
| `rows` | `cache info` `cache verify` `cache export` |
| `machine` | `doctor` |
| `main` | the command line as a whole; `output` prints |
"""

from offload.cli.main import main

__all__ = ["main"]
