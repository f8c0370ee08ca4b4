"""A job that is killed while writing rows: filled rows are correct, and flushed rows are filled."""

from __future__ import annotations

import json

import pytest

from tests.campaigns import amount
from tests.processes import run_script

KILLS = amount("kills", 24, 500)
LIMIT = 1000  # seconds

# All of a row is one number, its stamp, unique to a write: a mix of two writes is recognised.
# What the child is about to write, and what it has flushed, is in memory shared by parent and child.
COMMON = """
    import json, mmap, os, random, shutil, signal, sys, time
    import numpy as np, torch
    from offload import TensorCache
    from tests.processes import ended, forked, kill

    torch.set_num_threads(1)
    folder, first, kills = sys.argv[1] + "/cache", int(sys.argv[2]), int(sys.argv[3])
    MOST, FIRST = 1 << 16, 300
    board = np.frombuffer(mmap.mmap(-1, 3 * 8 * MOST), dtype=np.int64).reshape(3, MOST)
    tried, flushed, misc = board  # by row; misc: next stamp, rows that were flushed, steps
    misc[0] = 1
    schema = {"x": (torch.int64, (300,)), "tokens": (torch.int64, (None,)), "note": "json", "y": (torch.int32, ())}

    def values(stamps):
        return {
            "x": torch.tensor(stamps)[:, None].expand(-1, 300),
            "tokens": [torch.full((stamp % 50,), stamp) for stamp in stamps],
            "note": [{"stamp": stamp, "text": "x" * (stamp % 70)} for stamp in stamps],
            "y": torch.tensor(stamps, dtype=torch.int32),
        }

    def stamps(count):
        first = int(misc[0])
        misc[0] += count
        return list(range(first, first + count))

    def begin_again():
        shutil.rmtree(folder, ignore_errors=True)
        board[:2], misc[1] = 0, 0
        TensorCache.create(folder, schema, FIRST).close()

    class Writer:
        def __init__(self):
            self.cache, self.pending = TensorCache.open(folder, "r+"), {}

        def put(self, rows):
            given = stamps(len(rows))
            tried[rows] = given
            self.cache[rows] = values(given)
            self.pending.update(zip(rows, given))

        def append(self, count):
            given, rows = stamps(count), range(len(self.cache), len(self.cache) + count)
            tried[rows.start : rows.stop] = given
            assert rows == self.cache.append(values(given))
            self.pending.update(zip(rows, given))

        def flush(self):
            self.cache.flush()
            self.note()
            misc[1] = max(misc[1], len(self.cache))

        def close(self):
            self.cache.close()
            self.note()

        def note(self):
            for row, stamp in self.pending.items():
                flushed[row] = stamp
            misc[1] = max([misc[1], *(row + 1 for row in self.pending)])
            self.pending = {}

    def check(mode):
        cache = TensorCache.open(folder, mode)
        missing = set(cache.missing_rows().tolist())
        assert len(cache) >= misc[1], (len(cache), misc[1])
        filled = [row for row in range(len(cache)) if row not in missing]
        batch = cache[filled]
        found = batch["y"].tolist()
        for at, (row, stamp) in enumerate(zip(filled, found)):
            assert stamp in (tried[row], flushed[row]), (row, stamp, tried[row], flushed[row])
            assert (batch["x"][at] == stamp).all(), ("x", row, stamp)
            assert torch.equal(batch["tokens"][at], torch.full((stamp % 50,), stamp)), ("tokens", row, stamp)
            assert batch["note"][at] == {"stamp": stamp, "text": "x" * (stamp % 70)}, ("note", row, stamp)
        for row in missing:
            assert tried[row] != flushed[row] or flushed[row] == 0, (row, "was flushed and is missing")
        for name in ("x", "y"):
            assert cache[name].shape[0] == len(cache), (name, cache[name].shape, len(cache))
            if filled:
                assert cache[name][filled[-1]].max().item() == found[-1], name
        tried[:], flushed[:] = 0, 0
        tried[filled], flushed[filled] = found, found
        misc[1] = len(cache) if mode == "r+" else 0
        cache.close()
        return len(filled)
"""

RANDOM = """
    def write_for_ever(seed):
        chance = random.Random(seed)
        writer = Writer()
        while True:
            misc[2] += 1
            act, count = chance.random(), chance.randrange(1, 40)
            if act < 0.55:
                writer.put(chance.sample(range(len(writer.cache)), count))
            elif act < 0.8 and len(writer.cache) < MOST - 100:
                writer.append(count)
            elif act < 0.97:
                writer.flush()
            else:
                writer.close()
                writer = Writer()

    begin_again()
    said = dict(kills=0, filled=0, rows=0)
    for number in range(first, first + kills):
        if number % 25 == 24:  # small
            begin_again()
        pid = forked(lambda: write_for_ever(number))
        chance = random.Random(-number)
        until = misc[2] + chance.randrange(20)
        while misc[2] < until and not os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            time.sleep(0.001)
        time.sleep(chance.uniform(0, 0.01))
        kill(pid)
        said["kills"] += 1
        check("r")
        said["filled"] += check("r+")
        said["rows"] += int(misc[1])
    print(json.dumps(said))
"""


@pytest.mark.slow(8)
@pytest.mark.campaign("kills")
@pytest.mark.timeout(1200)
def test_after_each_kill_what_is_filled_is_right_and_what_was_flushed_is_filled(quick_folder):
    rounds = [
        json.loads(run_script(COMMON + RANDOM, f"{quick_folder}/{first}", first, min(60, KILLS - first), limit=LIMIT))
        for first in range(0, KILLS, 60)
    ]

    assert sum(said["kills"] for said in rounds) == KILLS
    assert all(said["filled"] > 0 for said in rounds)
    assert all(said["rows"] > 300 * said["kills"] for said in rounds)  # it was killed while the cache grew, too
