"""Ctrl-C at any place of a public call leaves torch as it was, and every value old or new."""

from __future__ import annotations

import os
import sys

import pytest

from tests.interrupts import interrupted
from tests.public_calls import CALLS, new_folder

# Places that are tried of a call; with OFFLOAD_INTERRUPTS=100000 every one of them.
_MOST = int(os.environ.get("OFFLOAD_INTERRUPTS", "20"))


@pytest.mark.skipif(sys.version_info < (3, 11), reason="the places are found in the tables of Python 3.11 and later")
@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_is_interrupted(name, tmp_path):
    call = CALLS[name]

    assert interrupted(lambda: call.prepare(new_folder(tmp_path)), call.act, call.check, folder=tmp_path, most=_MOST)
