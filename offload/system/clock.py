"""The clock of all rules that depend on time, such as how long a value that was seen in memory is assumed to be there.

Always true:
- it never goes back
- it is called as `clock.now()`, so that a test can replace it
"""

from __future__ import annotations

import time

now = time.monotonic
