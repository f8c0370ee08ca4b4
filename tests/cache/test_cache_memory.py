"""A cache larger than the memory limit is built, scanned and read at random."""

from __future__ import annotations

import json

from tests.page_cache import needs_memory_cap
from tests.processes import run_script

MIB = 1 << 20

SCRIPT = """
    import json, sys, torch
    from bench.memory_cap import memory_cap
    from offload import TensorCache
    from offload.memory import anonymous_bytes

    torch.set_num_threads(1)
    limit, rows = int(sys.argv[2]), 3 * int(sys.argv[2]) // 8192
    with TensorCache.create(sys.argv[1] + "/warm", {"x": (torch.int32, (8,))}, 64) as warm:  # what is loaded once
        warm[[3, 1]] = {"x": torch.zeros(2, 8, dtype=torch.int32)}
        warm[[1, 3]]
    with memory_cap(limit, kills=False) as group:
        group.join()
        before = anonymous_bytes()
        cache = TensorCache.create(sys.argv[1] + "/cache", {"x": (torch.int32, (2048,))}, rows)
        for part in torch.arange(rows, dtype=torch.int32).split(256):
            cache[part] = {"x": part[:, None].expand(-1, 2048)}
        cache.flush()
        right = all(
            torch.equal(part, cache[part]["x"][:, 0]) and torch.equal(part, cache[part]["x"][:, -1])
            for part in [*torch.arange(rows).int().split(256), *torch.randint(0, rows, (40, 256)).int().unbind()]
        )
        said = {"filled": cache.num_filled, "right": right, "anonymous": anonymous_bytes() - before, **group.facts()}
        (group.folder.parent / "cgroup.procs").write_text("0")
    print(json.dumps(said))
"""


@needs_memory_cap
def test_a_cache_of_three_times_the_memory_is_built_scanned_and_read_at_random(tmp_path):
    limit = 48 * MIB

    said = json.loads(run_script(SCRIPT, tmp_path, limit, fresh=True))

    assert (3 * limit // 8192, True) == (said["filled"], said["right"])
    assert said["max_usage_in_bytes"] <= limit + (1 << 20)  # see `memory_cap`
    assert said["failcnt"] > 0  # otherwise all of it fitted
    assert said["anonymous"] < 24 * MIB
