"""A job that is killed while it writes rows: what is filled is right, and what was flushed is filled."""

from __future__ import annotations

import json
import os

import pytest

from tests.processes import run_script

KILLS = int(os.environ.get("OFFLOAD_CACHE_KILLS", "24"))  # 500 for the whole campaign

# All of a row is of one number, its stamp, which no other write has: half of one write and half of another shows.
# What the child is about to write, and what it has flushed, stands in memory that parent and child share.
DRIVER = """
    import json, mmap, os, random, signal, sys, time
    import numpy as np, torch
    from offload import TensorCache
    from offload.errors import CorruptFileError

    torch.set_num_threads(1)
    folder, first, kills = sys.argv[1] + "/cache", int(sys.argv[2]), int(sys.argv[3])
    MOST, FIRST = 1 << 16, 300
    board = np.frombuffer(mmap.mmap(-1, 3 * 8 * MOST), dtype=np.int64).reshape(3, MOST)
    tried, flushed, misc = board  # by row; misc: next stamp, rows that were flushed, steps
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

    def write_for_ever(seed):
        chance = random.Random(seed)
        cache = TensorCache.open(folder, "r+")
        pending = {}
        while True:
            misc[2] += 1
            act, given = chance.random(), stamps(chance.randrange(1, 40))
            if act < 0.55:
                rows = chance.sample(range(len(cache)), len(given))
                for row, stamp in zip(rows, given):
                    tried[row] = stamp
                cache[rows] = values(given)
                pending.update(zip(rows, given))
            elif act < 0.8 and len(cache) < MOST - 100:
                first = len(cache)
                for row, stamp in enumerate(given, first):
                    tried[row] = stamp
                assert range(first, first + len(given)) == cache.append(values(given))
                pending.update(enumerate(given, first))
            else:
                if act < 0.97:
                    cache.flush()
                else:
                    cache.close()
                for row, stamp in pending.items():
                    flushed[row] = stamp
                misc[1] = max(misc[1], len(cache) if act < 0.97 else max([*pending, misc[1] - 1]) + 1)
                pending = {}
                if act >= 0.97:
                    cache = TensorCache.open(folder, "r+")

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
        try:
            column = cache["x"]
        except CorruptFileError as error:
            assert mode == "r" and "mends the column" in str(error)
            cache.close()
            return 0
        assert tuple(column.shape) == (len(cache), 300)
        if filled:
            assert column[filled[-1], 0].item() == found[-1]
        tried[:], flushed[:] = 0, 0
        tried[filled], flushed[filled] = found, found
        misc[1] = len(cache) if mode == "r+" else 0
        cache.close()
        return len(filled)

    misc[0] = 1
    TensorCache.create(folder, schema, FIRST).close()
    said = dict(kills=0, filled=0, rows=0)
    for number in range(first, first + kills):
        if number % 25 == 24:  # begin again, small
            import shutil
            shutil.rmtree(folder)
            board[:2], misc[1] = 0, 0
            TensorCache.create(folder, schema, FIRST).close()
        pid = os.fork()
        if not pid:
            try:
                write_for_ever(number)
            except BaseException:
                import traceback
                traceback.print_exc()
            os._exit(1)
        chance = random.Random(-number)
        until, began = misc[2] + chance.randrange(20), time.monotonic()
        while misc[2] < until and time.monotonic() - began < 5:
            time.sleep(0.001)
        time.sleep(chance.uniform(0, 0.01))
        os.kill(pid, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
        said["kills"] += 1
        check("r")
        said["filled"] += check("r+")
        said["rows"] += int(misc[1])
    print(json.dumps(said))
"""


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_after_each_kill_what_is_filled_is_right_and_what_was_flushed_is_filled(tmp_path):
    rounds = [
        json.loads(run_script(DRIVER, tmp_path / str(first), first, min(60, KILLS - first)))
        for first in range(0, KILLS, 60)
    ]

    assert sum(said["kills"] for said in rounds) == KILLS
    assert all(said["filled"] > 0 for said in rounds)
    assert all(said["rows"] > 300 * said["kills"] for said in rounds)  # it was killed while it grew, too
