"""Sums larger than memory, and quantizing a model with them: the same on disk as in memory."""

import json
from pathlib import Path

from bench.memory_cap import memory_cap
from tests.page_cache import needs_memory_cap
from tests.processes import run_script

SUMMED = """
    import json, torch
    from offload import OffloadedTensor
    from tests.peak import Peak
    n = 2000  # 16 MB
    torch.set_num_threads(1)
    h, x, plain = OffloadedTensor.zeros((n, n), name="h"), torch.randn(64, n), torch.ones(n, n)
    b, y = OffloadedTensor.zeros((4, n // 2, n // 2), name="b"), torch.randn(4, 64, n // 2)
    warm = OffloadedTensor.zeros((8, 8), name="warm")
    warm.addmm_(x[:, :8].T, x[:, :8]).add_(1)

    def peak(act):
        with Peak() as seen:
            kept = act()
        return seen.nbytes

    acts = dict(
        addmm_=lambda: h.addmm_(x.T, x), out=lambda: torch.addmm(h, x.T, x, out=h), add_=lambda: h.add_(plain),
        iadd=lambda: h.__iadd__(plain), rows=lambda: h[100:1100].__iadd__(plain[100:1100]), mul_=lambda: h.mul_(0.5),
        product=lambda: torch.matmul(x.T, x, out=h), baddbmm_=lambda: b.baddbmm_(y.mT, y),
        batch=lambda: torch.baddbmm(b, y.mT, y, out=b), diagonal=lambda: h.diagonal().add_(1),
        copied=lambda: h + 0,
    )
    print(json.dumps({name: peak(act) for name, act in acts.items()}))
"""


def test_sums_are_updated_through_the_mapping_without_a_copy_in_memory():
    """Peaks of anonymous memory; a copy's is the counter-check."""
    found = json.loads(run_script(SUMMED))

    assert 16e6 <= found.pop("copied")
    assert [] == [(name, taken) for name, taken in found.items() if taken > 4e6]


CAPPED = """
    import json, sys, torch, offload
    from pathlib import Path
    from bench.memory_cap import Group
    from offload import OffloadedTensor
    from tests.gptq import factor, quantized

    folder, group, count, n = sys.argv[1], Group(Path(sys.argv[2])), int(sys.argv[3]), int(sys.argv[4])
    columns = 64  # of the weight, for which the walk takes time
    torch.set_num_threads(1)

    def batch(number, layer):
        return torch.randn(32, n, generator=torch.Generator().manual_seed(1000 * number + layer))

    def weight_of(layer):
        return torch.randn(8, columns, generator=torch.Generator().manual_seed(layer))

    def in_memory(layer):
        hessian = torch.zeros(n, n)
        for number in range(2):
            hessian.addmm_(batch(number, layer).T, batch(number, layer), alpha=2)
        return quantized(weight_of(layer), factor(hessian)[:columns, :columns])

    with offload.offloading(min_bytes="1MiB"):
        in_memory(0)  # what is allocated once
    expected = {layer: in_memory(layer) for layer in (0, count - 1)}
    group.join()
    hessians = [OffloadedTensor.zeros((n, n), name=f"{layer}", offload_dir=folder + "/h") for layer in range(count)]
    weights = [OffloadedTensor.from_original_tensor(weight_of(one), f"{one}", folder + "/w") for one in range(count)]
    for number in range(2):
        for layer, hessian in enumerate(hessians):
            hessian.addmm_(batch(number, layer).T, batch(number, layer), alpha=2)
    with offload.offloading(min_bytes="1MiB"):
        for weight, hessian in zip(weights, hessians):
            weight.update_values(quantized(weight, factor(hessian)[:columns, :columns]))
    same = all(torch.equal(value, weights[layer].materialize()) for layer, value in expected.items())
    print(json.dumps(dict(same=same, facts=group.facts())))
"""


@needs_memory_cap
def test_hessians_four_times_a_memory_cap_are_filled_and_used_within_it(tmp_path):
    """40 of 4 MiB, in a memory cgroup of 40 MiB, which also counts the page cache."""
    count, n, cap = 40, 1024, 40 << 20
    with memory_cap(cap, kills=False) as group:
        found = json.loads(run_script(CAPPED, tmp_path, group.folder, count, n, fresh=True))

    written = sum(path.stat().st_size for path in Path(tmp_path / "h").iterdir())
    assert found["same"]
    assert 4 * cap <= written
    assert found["facts"]["max_usage_in_bytes"] <= cap + (1 << 20)  # see `memory_cap`
    assert 0 < found["facts"]["failcnt"]  # the limit was hit
