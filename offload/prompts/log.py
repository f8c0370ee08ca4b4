"""The logger of this package.

Always true:
- what is known of a prompt is logged at `INFO`, what goes at `DEBUG`; a block that can't be used is a warning
"""

import logging

log = logging.getLogger("offload.prompts")
