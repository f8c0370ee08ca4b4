"""Public calls leave shared process state alone: random numbers, modes, signals, folders, descriptors."""

import gc
import locale
import logging
import multiprocessing
import os
import random
import signal
import sys
import threading
import warnings
from typing import Any

import numpy as np
import pytest
import torch

from tests.acts import ACTS, meeting, new_folder
from tests.crashes import INTERRUPT
from tests.interrupts import left_on, torch_state


def umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def state() -> dict[str, Any]:
    """Shared process state, by name."""
    return {
        "random": random.getstate(),
        "numpy": repr(np.random.get_state()),
        "torch": torch.get_rng_state().tolist(),
        "torch's modes": torch_state(),
        "default device": torch.get_default_device(),
        "interop threads": torch.get_num_interop_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "printing": vars(torch._tensor_str.PRINT_OPTS).copy(),
        "matmul": torch.get_float32_matmul_precision(),
        "NumPy's errors": np.geterr(),
        "folder": os.getcwd(),
        "locale": locale.setlocale(locale.LC_ALL),
        "environment": dict(os.environ),
        "signals": {number: signal.getsignal(number) for number in signal.valid_signals() - {signal.SIGKILL}},
        "collector": (gc.isenabled(), gc.get_threshold(), gc.get_debug()),
        "warnings": list(warnings.filters),
        "umask": umask(),
        "path": list(sys.path),
        "hooks": (sys.excepthook, sys.unraisablehook, threading.excepthook, sys.gettrace(), sys.getprofile()),
        "logging": (logging.root.level, list(logging.root.handlers), logging.getLogger("offload").handlers),
        "start method": multiprocessing.get_start_method(allow_none=True),
        "recursion": sys.getrecursionlimit(),
        "left on": list(left_on()),
    }


@pytest.mark.parametrize("name", meeting(INTERRUPT))
def test_a_call_leaves_the_process_as_it_was(name, tmp_path):
    """Except for what it is meant to change; on the second call, as imports may set something once.

    No descriptor stays open once all its results are gone; reader and writer threads may be busy a moment longer.
    """
    call = ACTS[name]

    def descriptors() -> int:
        call.act(call.begin(new_folder(tmp_path)))
        return len(os.listdir("/proc/self/fd"))

    descriptors()
    given, before = call.begin(new_folder(tmp_path)), state()
    call.act(given)
    after = state()
    del given
    opened = descriptors()

    assert [] == [what for what in before if before[what] != after[what] and what not in call.changes]
    assert any(descriptors() <= opened for _ in range(50))  # a leak of one per call never returns to the old level
