"""What to expect of a model on this machine: from its configuration, its files' headers, and measured rates.

Always true:
- no weight is read, and for a model on the hub only configuration and headers are downloaded
- rates are measured here, not looked up; what can't be measured is None, or given by the user

| module | what |
| --- | --- |
| `machine` | measured properties of a machine: memory, disk, compute |
| `sizes` | the sizes of a model, and which bytes a pass needs |
| `estimate` | how long a token takes, for each way of running the model |
"""

from offload.planning.estimate import Plan, Way, plan

__all__ = ["Plan", "Way", "plan"]
