"""Ranks whose shards are four times their memory load, run and save within that of two values and a little."""

import json

import torch
from safetensors.torch import save_file

from tests.page_cache import needs_memory_cap
from tests.processes import run_script

MIB = 1 << 20
LIMIT = 40 * MIB  # per rank
SIDE = 1024
COUNT = 2 * 4 * LIMIT // (4 * SIDE * SIDE)  # values of 4 MiB, half of each on either rank

SCRIPT = """
    import json, sys, warnings
    from pathlib import Path
    import torch
    import torch.distributed.checkpoint as dcp
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
    import offload
    from bench.memory_cap import memory_cap
    from tests.distributed.ranks import run_ranks
    from tests.peak import Peak

    warnings.simplefilter("ignore")
    folder, limit, side, count = Path(sys.argv[1]), *map(int, sys.argv[2:])

    def walked(count, place):
        found, mesh = {}, init_device_mesh("cpu", (2,))
        with offload.init_empty_weights():
            empty = nn.Sequential(*(nn.Linear(side, side, bias=False) for _ in range(count)))
        parallelize_module(empty, mesh, {str(at): ColwiseParallel(output_layouts=Replicate()) for at in range(count)})

        def measured(name, act):
            with Peak() as peak, torch.no_grad():
                done = act()
            found[name] = peak.nbytes
            return done

        model = measured("load", lambda: offload.load_checkpoint_and_dispatch(empty, folder / "model.safetensors"))
        said = [measured("forward", lambda: model(torch.ones(1, side)))]
        state = model.state_dict()
        measured("save", lambda: dcp.save(state, checkpoint_id=place / "saved"))
        said.append(measured("forward again", lambda: model(torch.ones(1, side))))
        with torch.no_grad():
            for value in state.values():
                value.to_local().zero_()
        measured("dcp load", lambda: dcp.load(state, checkpoint_id=place / "saved"))
        said.append(measured("forward of what was loaded", lambda: model(torch.ones(1, side))))
        return found, all((one == 1).all().item() for one in said)

    def act(rank):
        walked(2, folder / "warm")  # what is loaded once
        with memory_cap(limit, kills=False) as group:
            group.join()
            try:
                found, right = walked(count, folder / "capped")
                facts = group.facts()
            finally:
                (group.folder.parent / "cgroup.procs").write_text("0")
        return found, right, facts

    print(json.dumps(run_ranks(2, act)))
"""


@needs_memory_cap
def test_ranks_with_four_times_their_memory_take_that_of_two_values_and_a_little(tmp_path):
    whole = {f"{at}.weight": torch.full((SIDE, SIDE), 1 / SIDE) for at in range(COUNT)}
    save_file(whole, tmp_path / "model.safetensors")
    ranks = json.loads(run_script(SCRIPT, tmp_path, LIMIT, SIDE, COUNT))

    most = 2 * (2 * MIB) + 16 * MIB
    for found, right, facts in ranks:
        assert right
        assert {} == {name: nbytes for name, nbytes in found.items() if nbytes > most}
        assert facts["max_usage_in_bytes"] <= LIMIT + MIB  # see `memory_cap`
        assert facts["failcnt"] > 0  # otherwise all of it fitted
