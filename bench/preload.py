"""Imports made in advance for processes that run trials.

Always true:
- nothing is computed here: threads started by an op would not survive in forked processes
- `offload` is not among them: forked, it could not know that, and would multiply packed weights on one thread
- peers are silenced: their progress bars and warnings would hide the table; their exceptions are still reported
"""

import importlib.util
import os
import sys

sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  before the imports: they keep it

import accelerate  # noqa: E402
import safetensors.torch  # noqa: E402
import transformers.models.auto.modeling_auto  # noqa: E402
import transformers.models.llama.modeling_llama  # noqa: E402

__all__ = ["accelerate", "safetensors", "transformers"]

PEERS = (
    "compressed_tensors.offload",
    "torch_to_nnef.tensor.offload",
    "tensordict",
    "lmdb",
    "h5py",
    "zarr",
    "datasets.arrow_writer",
)
for peer in PEERS:
    if importlib.util.find_spec(peer.split(".")[0]):
        importlib.import_module(peer)
