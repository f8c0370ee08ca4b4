"""What would happen if a model ran here: from its configuration, the headers of its files, and a look at the machine.

Always true:
- no weight is read, and of a model on the hub nothing is downloaded but its configuration and headers
- rates are measured here, not known; what cannot be measured is None, or given by the user

| module | what |
| --- | --- |
| `machine` | what a machine can do: memory, disk, computing |
| `sizes` | what a model holds, and which bytes of it a pass needs |
| `estimate` | how long a token takes in each of the ways to run it |
"""

from offload.planning.estimate import Plan, Way, plan

__all__ = ["Plan", "Way", "plan"]
