"""The largest log-probabilities of rows, packed: in C where it was built, else in torch's ops, on any device.

A row of k: its largest and its smallest finite log-probability, float16, little-endian; then a stream of bits, the
lowest first: k token ids, of as many bits as the vocabulary needs, and k codes. Code 0 is the largest number, and
2^bits - 2 the smallest; those between are evenly spread, and 2^bits - 1 is -inf.

Always true:
- both ways give the same bytes and the same numbers
- a number is off by half a step at most, or by a part in 2^11 if that is more: an end as float16 holds it
"""

from __future__ import annotations

import torch

from offload.kernels import native

_BYTE = 8


def bytes_of_row(k: int, id_bits: int, bits: int) -> int:
    """How many bytes a row takes."""
    return 4 + -(-k * (id_bits + bits) // _BYTE)


def pack(ids: torch.Tensor, logps: torch.Tensor, id_bits: int, bits: int) -> torch.Tensor:
    """Packed rows, (rows, bytes), uint8.

    Args:
        ids: (rows, k), int64, on the CPU; of `id_bits` bits.
        logps: (rows, k), float32, from the largest to the smallest in each row; no NaN, and finite ones that float16
            holds.
    """
    if native.library() is not None:
        return native.pack_logps(ids, logps, bytes_of_row(ids.shape[1], id_bits, bits), id_bits, bits)
    most, is_finite = 2**bits - 2, logps > -torch.inf
    ends = torch.cat([logps[:, :1], logps.gather(1, (is_finite.sum(1, keepdim=True) - 1).clamp(min=0))], 1)
    first, last = (kept := ends.half()).float().split(1, 1)
    scale = torch.where(first > last, torch.full_like(first, most) / (first - last), 0)  # no product with a reciprocal
    codes = (
        ((first - logps) * scale + 0.5).clamp(0, most).where(logps != ends[:, 1:], most).where(logps != ends[:, :1], 0)
    )
    codes = torch.where(is_finite, codes, most + 1).long()
    stream = torch.cat([_bits(ids, id_bits), _bits(codes, bits)], 1)
    stream = torch.nn.functional.pad(stream, (0, -stream.shape[1] % _BYTE)).unflatten(1, (-1, _BYTE))
    return torch.cat([kept.view(torch.uint8), (stream << torch.arange(_BYTE)).sum(2).to(torch.uint8)], 1)


def _bits(numbers: torch.Tensor, width: int) -> torch.Tensor:
    """The bits of each, the lowest first, side by side."""
    return (numbers[:, :, None] >> torch.arange(width) & 1).flatten(1)


def unpack(packed: torch.Tensor, k: int, id_bits: int, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids, log-probabilities), each (rows, k): int64 and float32, on the device of the packed rows.

    Args:
        packed: (rows, bytes), uint8, contiguous.
    """
    if packed.is_cpu and native.library() is not None:
        return native.unpack_logps(packed, k, bytes_of_row(k, id_bits, bits), id_bits, bits)
    most, stream = 2**bits - 2, torch.nn.functional.pad(packed[:, 4:], (0, _BYTE)).long()
    first, last = packed[:, :4].reshape(-1).view(torch.float16).float().view(-1, 2).split(1, 1)
    ids, codes = (
        _numbers(stream, start + torch.arange(k, device=packed.device) * width, width)
        for start, width in ((0, id_bits), (k * id_bits, bits))
    )
    width = (last - first) / torch.full_like(first, most)
    logps = torch.where(codes < most, first + codes * width, last)
    return ids, logps.masked_fill(codes > most, -torch.inf)


def _numbers(stream: torch.Tensor, at: torch.Tensor, width: int) -> torch.Tensor:
    """The numbers of so many bits at these bits of each row of bytes."""
    words = torch.zeros_like(stream[:, at >> 3])
    for byte in range(-(-(width + 7) // _BYTE)):
        words |= stream[:, (at >> 3) + byte] << _BYTE * byte
    return (words >> (at & 7)).bitwise_and(2**width - 1)
