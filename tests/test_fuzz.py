"""Damaged files of every kind are read correctly or refused with a proper error, and wrong readers are found."""

import random

import pytest

from tests.fuzz import mutations
from tests.processes import run_module, run_script

COMPARED = ("safetensors", "pickle")
KINDS = (*COMPARED, "folder", "index", "cache", "tree", "training", "memmap")

HEAD = ["tried", "equal", "read", "refused", "failed"]

MISBEHAVING = """
    import os, signal, sys, time
    from pathlib import Path
    import torch
    from tests.fuzz import campaign as fuzz
    from tests.fuzz.models import Kind
    from offload.errors import CorruptFileError

    def torn(words):
        raise CorruptFileError(f"{words} is torn")

    fuzz._LIMIT = 1.0
    acts = {
        "refuse": lambda folder: torn(folder / "a"),
        "refuse_without_a_path": lambda _: torn("it"),
        "run_over": lambda _: {}["a"],
        "die": lambda _: os.kill(os.getpid(), signal.SIGSEGV),
        "fill_memory": lambda _: {} if bytearray(b"x") * (300 << 20) else None,
        "read": lambda _: {"w": torch.ones(2)},
        "hang": lambda _: time.sleep(1000),
    }
    whole = lambda files, chance: files
    kinds = [Kind(name, [{"a": b"bytes"}], whole, act) for name, act in acts.items()]
    kinds += [
        Kind("read_as_they", [{"a": b""}], whole, acts["read"], acts["read"]),
        Kind("read_other_as_they", [{"a": b""}], whole, lambda _: {"w": torch.zeros(2)}, acts["read"]),
        Kind("they_die", [{"a": b""}], whole, acts["read"], lambda _: os.kill(os.getpid(), signal.SIGKILL)),
    ]
    for name, found in fuzz.campaign(kinds, 0, Path(sys.argv[1], "work"), trials=2).items():
        print(name, *[outcome for outcome, count in found.counts.items() for _ in range(count)], len(found.failures))
"""


def test_forbidden_behaviour_of_a_reader_is_found(tmp_path):
    found = dict(line.split(maxsplit=1) for line in run_script(MISBEHAVING, tmp_path).splitlines())

    good = {"refuse": "refused", "read": "read", "read_as_they": "equal", "they_die": "read"}
    assert {name: f"{outcome} {outcome} 0" for name, outcome in good.items()} == {
        name: found.pop(name) for name in good
    }
    assert {"failed failed 2"} == set(found.values())


MODELS = ("awq", "mxfp4", "dcp", "adapter")  # few of each here: `make campaign` has more, and every form


@pytest.mark.parametrize(("kinds", "trials"), [(KINDS, 120), (MODELS, 20)], ids=["files", "models"])
def test_damaged_files_of_every_kind_are_read_rightly_or_refused(kinds, trials):
    pytest.importorskip("tensordict")
    pytest.importorskip("peft")
    done = run_module("tests.fuzz.campaign", "--trials", trials, "--only", ",".join(kinds), limit=240)

    assert not done.returncode, done.stdout + done.stderr
    table = [line.split() for line in done.stdout.splitlines()]
    rows = table[table.index(HEAD) + 1 :]
    assert sorted(kinds) == sorted(name for name, *_ in rows)
    for name, tried, equal, read, refused, failed in rows:
        assert (str(trials), "0") == (tried, failed)
        assert kinds is MODELS or int(refused) > 10
        assert kinds is MODELS or int(equal if name in COMPARED else read) > 10, f"{name}: hardly anything is read"


def test_the_same_seed_damages_alike():
    data = mutations.safetensors_made(random.Random(1))

    for damage in (mutations.bytes_damaged, mutations.safetensors_damaged):
        assert damage(data, random.Random(7)) == damage(data, random.Random(7))
    assert 60 < len({mutations.safetensors_damaged(data, random.Random(seed)) for seed in range(100)})
