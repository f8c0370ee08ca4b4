"""The logger of this package.

Always true:
- calls are logged at `INFO`, results for single values at `DEBUG`
"""

import logging

log = logging.getLogger("offload.integrations")
