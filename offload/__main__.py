"""`python -m offload`.

Always true:
- it is the same as the command `offload`
"""

import sys

from offload.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
