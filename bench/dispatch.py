"""What dispatch adds to an op, in microseconds: an offloaded argument against the plain tensor it stands for.

Tensors are tiny, so that the op itself takes next to nothing. Each figure is the median over rounds of the difference
of the two times, which are taken in turn.

    python -m bench.dispatch
"""

from __future__ import annotations

import timeit
from collections.abc import Callable
from statistics import median

import torch
import torch.nn.functional as F

from offload import OffloadedTensor

Op = Callable[[torch.Tensor], object]


def overhead(op: Op, plain: torch.Tensor, offloaded: torch.Tensor, *, rounds: int = 15, calls: int = 2000) -> float:
    """Microseconds that `op` takes longer with the offloaded tensor."""
    differences = []
    for _ in range(rounds):
        base = timeit.timeit(lambda: op(plain), number=calls)
        differences.append((timeit.timeit(lambda: op(offloaded), number=calls) - base) / calls * 1e6)
    return median(differences)


def main() -> None:
    torch.set_num_threads(1)
    plain = torch.randn(8, 8)
    offloaded = OffloadedTensor.from_original_tensor(plain, "w")
    x, followed, rows = torch.randn(1, 8), torch.randn(1, 8, requires_grad=True), torch.tensor([1])
    ops: dict[str, Op] = {
        "F.linear(x, w)": lambda w: F.linear(x, w),
        "x * w": lambda w: x * w,
        "w.exp()": lambda w: w.exp(),
        "F.embedding(rows, w)": lambda w: F.embedding(rows, w),
        "w.t()": lambda w: w.t(),
        "w.neg_()": lambda w: w.neg_(),
    }
    with torch.no_grad():
        for name, op in ops.items():
            print(f"{name:32}{overhead(op, plain, offloaded):6.1f} µs")
    print(
        f"{'F.linear(x, w), x requires grad':32}{overhead(lambda w: F.linear(followed, w), plain, offloaded):6.1f} µs"
    )


if __name__ == "__main__":
    main()
