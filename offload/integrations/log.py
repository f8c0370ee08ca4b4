"""The logger of this wing.

Always true:
- what a neighbour was asked for is told at `INFO`, what came of a single value at `DEBUG`
"""

import logging

log = logging.getLogger("offload.integrations")
