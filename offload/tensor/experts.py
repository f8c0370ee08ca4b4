"""The experts of a layer as one act: all that tokens are routed to is known before the first byte is read.

Always true:
- experts that are in memory are computed first, while the others are read, in the order of their file; those are
  computed as they arrive
- those that will not stay are read past the page cache, unless other threads are about to need them
- an expert with few tokens is multiplied from its pieces where they lie, packed or dense, joined or apart, and all of
  these in one call; one with many is multiplied by torch, by each piece where it lies, or once that is decoded
- the result of a token depends neither on the other tokens nor on what is in memory, but for experts with many of them
- several batches can be computed as one: how many tokens an expert has is then counted in each of them
- for an accelerator, those that do not stay there are computed here meanwhile, if there are few tokens and that wins
- what the kernels do not take is left to the caller, which then computes all of it
"""

from __future__ import annotations

import operator
import platform
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F

from offload.errors import OffloadError, RowIndexError
from offload.kernels import native
from offload.kernels.native import ExpertRows, Product, WeightedSum, most_rows
from offload.prefetch import direct
from offload.prefetch.copies import pool_on, streams_to
from offload.prefetch.engine import compute_once, ensure_resident, is_shared, prefetch, touch_if_resident
from offload.prefetch.loads import Arriving, load_of, parts_of_files, start_of, taken_from
from offload.prefetch.scratch import LEAST, scratch_for
from offload.prefetch.value import page_state_of
from offload.storage.handle import Handle
from offload.storage.layout import contiguous
from offload.tensor.backends import COMPILED, any_rows, product_with
from offload.tensor.guests import CPU, sent_to
from offload.tensor.hybrid import crosses, wins
from offload.tensor.products import is_plain, may_be_fused, runs_of
from offload.tensor.recipes import Piece, stored_in
from offload.tensor.rules import records_graph
from offload.tensor.runs import RowRun
from offload.tensor.views import Traced, handle_of, metadata_of, view_spec_of
from offload.tensor.wrapper import OffloadedTensor
from offload.torch_api import modes_are_on

_AT_ONCE = 1024  # rows that experts are given in one call: their products are in memory together
_OF_ROWS = 2  # dimensions
_AHEAD = 4  # experts after which more are asked for, as the window has room again

Gate: TypeAlias = "Callable[[torch.Tensor, torch.Tensor], torch.Tensor]"
Gather: TypeAlias = "Callable[[Act], torch.Tensor | None]"
Reads: TypeAlias = "list[tuple[Handle, torch.Tensor]]"

_GATHERING = threading.local()


@contextmanager
def gathered_by(gather: Gather) -> Iterator[None]:
    """In this context, acts of this thread are given to `gather`, which returns their results."""
    before = getattr(_GATHERING, "gather", None)
    _GATHERING.gather = gather
    try:
        yield
    finally:
        _GATHERING.gather = before


@dataclass(frozen=True)
class Between:
    """What is computed between and after the products, of rows (rows, columns) and the expert of each (rows,).

    Attributes:
        owner: whose experts they are: the same owner computes the same.
        gate: makes what `down` multiplies of the products with `up`.
        is_silu: whether that is the first half of the columns through SiLU, times the second half.
        finish: makes the results of the products with `down`; None if they are.
    """

    owner: object
    gate: Gate
    is_silu: bool = False
    finish: Gate | None = None


def multiplied_by_experts(
    x: torch.Tensor,
    picks: torch.Tensor,
    weights: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    between: Between,
    *,
    is_turned: bool = False,
) -> torch.Tensor | None:
    """The weighted sum of the experts of each token: (tokens, outputs); None if the kernels do not take it.

    They do not take sizes that do not fit either: what is wrong is for the caller to say.

    Args:
        x: (tokens, inputs).
        picks: (tokens, picks), numbers of experts; the number after the last one stands for none.
        weights: (tokens, picks).
        up, down: (experts, outputs, inputs), or (experts, inputs, outputs) if they are turned.

    Raises:
        RowIndexError: there is no such expert.
        ReadError, MissingFileError, ChangedFileError: a note says of which expert.
    """
    if type(up) is not OffloadedTensor or type(down) is not OffloadedTensor:
        return None
    device = up._target
    if not _are_routed(x, picks, weights, device):
        return None
    if modes_are_on() or records_graph((x, weights, up, down), {}) or not may_be_fused(x, up.dtype, device):
        return None
    if down.dtype != x.dtype or any(type(one._handle) is Traced or one._target != device for one in (up, down)):
        return None
    if device != CPU and (not crosses(x, device) or _all_stay(device, up)):
        return None
    stack = _Stack.of(between.owner, up, down, is_turned=is_turned)
    if not stack.fits(x.shape[1], between):
        return None
    if device == CPU:
        return _done(Act(x, picks, weights, stack, between))
    return _here_and_there(x, picks, weights, stack, between, *((up.mT, down.mT) if is_turned else (up, down)))


def _all_stay(device: torch.device, stack: OffloadedTensor) -> bool:
    """Whether all that was sent to a device stays there: asked before the device is waited for."""
    return pool_on(device, page_state_of(next(stored_in([handle_of(stack)]))).pool).keeps_all


def _done(act: Act) -> torch.Tensor | None:
    gather: Gather | None = getattr(_GATHERING, "gather", None)
    return act.result() if gather is None else gather(act)


def _here_and_there(
    x: torch.Tensor,
    picks: torch.Tensor,
    weights: torch.Tensor,
    stack: _Stack,
    between: Between,
    *matrices: torch.Tensor,
) -> torch.Tensor | None:
    """The sum of experts that stay on a device, and of the others, which are computed here meanwhile.

    None if all stay, or if that does not win. The matrices are (experts, outputs, inputs).
    """
    device, numbers, none = x.device, picks.cpu(), stack.count
    used = [one for one in numbers.unique().tolist() if one != none]
    experts = [(one, stack.expert(one, x.dtype)) for one in used if 0 <= one < none]
    away = [one for one, expert in experts if expert is not None and streams_to(device, expert.reads)]
    if not away or len(experts) < len(used):
        return None
    is_away = torch.isin(numbers, torch.tensor(away))
    here, there = numbers.where(is_away, none), numbers.masked_fill(is_away, none)
    act = Act(x.cpu(), here, weights.cpu(), stack, between)

    def on_device(numbers: torch.Tensor) -> torch.Tensor:
        """Goes on by itself."""
        results = x.new_zeros(numbers.numel(), stack.outputs[1], dtype=torch.float32)
        for number in numbers[numbers != none].unique().tolist():
            places = (numbers.view(-1) == number).nonzero().flatten()
            tokens, own = places.div(numbers.shape[1], rounding_mode="floor"), torch.full_like(places, number)
            up, down = (one[number] for one in matrices)
            down_x = F.linear(between.gate(F.linear(x[tokens.to(device)], up), own).to(x.dtype), down)
            results[places.to(device)] = (down_x if between.finish is None else between.finish(down_x, own)).float()
        return results.view(*numbers.shape, -1).mul_(weights.float().unsqueeze(-1)).sum(1)

    if not wins(stack.pieces, x, act.result, lambda: on_device(here), len(away).bit_length()):
        return None
    begun, down_x = on_device(there), _done(act)
    return None if down_x is None else begun.add_(sent_to(down_x, device)).to(x.dtype)


def _are_routed(x: torch.Tensor, picks: torch.Tensor, weights: torch.Tensor, device: torch.device) -> bool:
    """Whether each token has numbers of experts, and a weight for each of them, in the memory of a device."""
    if not all(is_plain(one, device) and one.dim() == _OF_ROWS for one in (x, picks, weights)):
        return False
    are_numbers = picks.dtype in (torch.int64, torch.int32) and weights.is_floating_point()
    fits = len(x) == len(picks) and picks.shape == weights.shape
    return are_numbers and fits and x.numel() > 0 and picks.numel() > 0


@dataclass(frozen=True)
class _Mapped:
    """An expert's matrices over its pieces, which are alive as long as this is."""

    bases: list[torch.Tensor]  # what the pieces are parts of
    values: list[list[torch.Tensor]]  # of each run, those of `up` and then of `down`
    up: Product
    down: Product


def most_of_an_expert(dtype: torch.dtype) -> int:
    """Up to how many rows an expert is multiplied where it lies, faster than by torch.

    With AVX2 torch is slow in bfloat16: this is 2.6 times as fast with 16 rows, 1.3 with 32 (`bench --only experts`).
    """
    has_avx2_alone = native.best_level() == 1 and platform.machine() == "x86_64"
    return 32 if dtype == torch.bfloat16 and has_avx2_alone else most_rows(dtype)


class _Known:
    """An expert: its rows, and the matrices over them as they were last mapped."""

    __slots__ = ("_is_stored", "_mapped", "_parts", "down", "first", "reads", "up")

    def __init__(self, up: Sequence[RowRun], down: Sequence[RowRun]) -> None:
        self.up, self.down = up, down
        self.reads: Reads = sorted((read for run in (*up, *down) for read in run.reads()), key=_place)
        self.first = _place(self.reads[0])
        self._is_stored = all(piece.handle.composed is None for run in (*up, *down) for _, piece in run.pieces)
        self._mapped: _Mapped | None = None
        self._parts: list[direct.FilePart] | None = None

    def load(self) -> direct.Load | None:
        """What it needs from its files, if that is better read past the page cache. Then it counts as used."""
        if self._parts is None:
            self._parts = parts_of_files(self.reads) if self._is_stored else []
        return load_of(self.reads, self._parts)

    def mapped(self, load: direct.Load | None = None) -> _Mapped:
        """Its matrices over what is mapped now, or was loaded."""
        bases, known = [handle.base() for handle, _ in self.reads] if load is None else [], self._mapped
        if load is None and known is not None and all(map(operator.is_, bases, known.bases)):
            return known
        products, values = [], []
        for runs in (self.up, self.down):
            with taken_from(load):
                some = [run.values() for run in runs]
            products.append(product_with(runs, some))
            values.extend(some)
        mapped = _Mapped(bases, values, *products)
        if self._is_stored and load is None:
            self._mapped = mapped
        return mapped

    def dense(self, mapped: _Mapped, number: int, dtype: torch.dtype) -> torch.Tensor:
        """The rows of a run, of those of `up` and then `down`: (rows, columns)."""
        run, values = (*self.up, *self.down)[number], mapped.values[number]
        if run.decoder is None and values[0].dtype == dtype:
            return values[0]
        compute = partial(_decoded, run, values, dtype)
        return compute_once((self, number, dtype), compute, lambda: self.reads)


def _decoded(run: RowRun, values: list[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    place = torch.empty(run.outputs, run.columns, dtype=dtype)
    native.decode(run.matrix(values), 0, place)
    return place


def _place(read: tuple[Handle, torch.Tensor]) -> tuple[str, int]:
    return str(read[0].path), start_of(*read)


class _Stack:
    """The experts of a layer, as far as they are known. What there are two of is of `up` and of `down`."""

    def __init__(self, up: OffloadedTensor, down: OffloadedTensor, *, is_turned: bool) -> None:
        self.key = _key_of(up, down, is_turned=is_turned)
        self.name = handle_of(up).name
        self.count = len(up)
        self._counts = [len(up), len(down)]
        self.pieces = [
            Piece(handle_of(one), view_spec_of(one).transpose(-2, -1) if is_turned else view_spec_of(one))
            for one in (up, down)
        ]
        self.outputs, self.columns = zip(*(piece.view_spec.shape[1:] for piece in self.pieces), strict=True)
        self._known: dict[int, _Known | None] = {}

    @classmethod
    def of(cls, owner: object, up: OffloadedTensor, down: OffloadedTensor, *, is_turned: bool) -> _Stack:
        """That of two tensors of `owner`, which may be known from before."""
        stack = _STACKS.get(owner)
        if stack is None or stack.key != _key_of(up, down, is_turned=is_turned) or stack._is_exact():
            stack = _STACKS[owner] = cls(up, down, is_turned=is_turned)
        return stack

    def _is_exact(self) -> bool:
        return any(getattr(piece.handle.composed, "is_exact", False) for piece in self.pieces)

    def fits(self, width: int, between: Between) -> bool:
        """Whether tokens of that width go through `up`, and what it gives, through `down`."""
        is_alike = self._counts == [self.count] * 2 and self.columns[0] == width
        return is_alike and (self.outputs[0] == 2 * self.columns[1] or not between.is_silu)

    def expert(self, number: int, dtype: torch.dtype) -> _Known | None:
        """An expert; None if C does not take it, for activations of a dtype."""
        if number not in self._known:
            up, down = (runs_of(Piece(one.handle, one.view_spec[number]), dense_too=True) for one in self.pieces)
            is_taken = all(COMPILED.supports("multiply", run, dtype, 1) for run in (*up, *down))
            self._known[number] = _Known(up, down) if up and down and is_taken else None
        return self._known[number]


def _key_of(up: OffloadedTensor, down: OffloadedTensor, *, is_turned: bool) -> object:
    ours = ((handle_of(one), view_spec_of(one)) for one in (up, down))
    return is_turned, *((handle, handle.source, metadata_of(view_spec)) for handle, view_spec in ours)


# By the owner, which lives as long as what is known of its experts: that refers to the values.
_STACKS: WeakKeyDictionary[object, _Stack] = WeakKeyDictionary()


@dataclass(slots=True, eq=False)
class _Group:
    """An expert, and its matrices, once it is in memory; `load` is what was read of it past the page cache."""

    number: int
    expert: _Known
    load: direct.Load | None = None
    shares: list[_Share] = field(default_factory=list)
    mapped: _Mapped = field(init=False)


@dataclass(slots=True, eq=False)
class _Share:
    """Rows that an expert is given, one after the other, and whether they are few."""

    group: _Group
    begin: int
    end: int
    are_few: bool


class Act:
    """The experts of a layer, for some tokens, which are those of one batch or of several.

    Attributes:
        key: acts with the same one can be done together.
        nbytes: the size of the results that are summed up.
    """

    def __init__(
        self, x: torch.Tensor, picks: torch.Tensor, weights: torch.Tensor, stack: _Stack, between: Between
    ) -> None:
        self._x = x.resolve_neg() if x.stride(1) == 1 else x.contiguous()
        self._picks, self._stack, self._between = picks, stack, between
        self._weights = weights.reshape(-1).to(torch.float32).contiguous()
        self._most = native.MOST_ROWS if any_rows.get() else most_of_an_expert(x.dtype)
        self._tokens_of = [len(x)]  # each batch
        self.is_last = not is_shared()  # no other thread is about to need the same experts
        self.key = stack, between.owner, self._most, x.dtype, x.shape[1], picks.shape[1]
        self.nbytes = picks.numel() * stack.outputs[1] * torch.float32.itemsize

    @classmethod
    def together(cls, acts: Sequence[Act], *, are_last: bool) -> list[torch.Tensor | None]:
        """The results of acts that have the same key: the bits that each of them has alone."""
        act = copy(acts[0])
        act.is_last = are_last
        act._x = torch.cat([one._x for one in acts])
        act._picks = torch.cat([one._picks for one in acts])
        act._weights = torch.cat([one._weights for one in acts])
        act._tokens_of = [count for one in acts for count in one._tokens_of]
        joined = act.result()
        return [None] * len(acts) if joined is None else [one.clone() for one in joined.split(act._tokens_of)]

    def result(self) -> torch.Tensor | None:
        """See `multiplied_by_experts`."""
        numbers, order = self._picks.reshape(-1).sort(stable=True)
        count, rows = self._stack.count, len(order)
        if not 0 <= int(numbers[0]) <= int(numbers[-1]) <= count:
            wrong = int(numbers[0] if numbers[0] < 0 else numbers[-1])
            raise RowIndexError(f"{self._stack.name} has {count} experts, and a token was routed to number {wrong}")
        self._tokens = order.div(self._picks.shape[-1], rounding_mode="floor")
        groups = self._groups(numbers)
        if groups is None:
            return None
        if int(numbers[-1]) == count:
            rows -= int((numbers == count).sum())
        self._down = _results(rows, self._stack.outputs[1])
        self._places = torch.empty_like(order)  # the row of the results, for each pick
        self._places[order] = torch.arange(len(order))
        if rows < len(order):
            self._places[order[rows:]] = -1
        self._out = torch.empty(len(self._x), self._stack.outputs[1], dtype=self._x.dtype)
        with closing(self._as_they_arrive(groups)) as arriving:
            for some, are_last in arriving:
                self._multiply(some, are_last=are_last)
        return self._out

    def _groups(self, numbers: torch.Tensor) -> list[_Group] | None:
        """The experts of the rows, in the order of their numbers; None if the kernels do not take one of them."""
        batches = len(self._tokens_of)
        if batches > 1:  # the rows of an expert are those of one batch after the other
            ends = torch.tensor(self._tokens_of).cumsum(0)
            numbers = numbers * batches + torch.bucketize(self._tokens, ends, right=True)
        groups: list[_Group] = []
        begin = 0
        for key, many in zip(*(one.tolist() for one in numbers.unique_consecutive(return_counts=True)), strict=True):
            number = key // batches
            if number == self._stack.count:
                break
            if not groups or groups[-1].number != number:
                expert = self._stack.expert(number, self._x.dtype)
                if expert is None:
                    return None
                groups.append(_Group(number, expert))
            shares, are_few = groups[-1].shares, many <= self._most
            if are_few and shares and shares[-1].are_few and begin + many - shares[-1].begin <= native.MOST_ROWS:
                shares[-1].end = begin + many
            else:
                shares.append(_Share(groups[-1], begin, begin + many, are_few=are_few))
            begin += many
        return groups

    def _as_they_arrive(self, groups: Sequence[_Group]) -> Generator[tuple[list[_Group], bool]]:
        """Those in memory, together; then the others, one by one, in the order of their file. True: the last ones.

        What is read past the page cache is there until the next ones are asked for.
        """
        cached: list[_Group] = []
        away: list[_Group] = []
        past: list[_Group] = []  # the page cache
        for group in groups:
            if touch_if_resident(group.expert.reads):
                cached.append(group)
                continue
            group.load = group.expert.load() if self.is_last else None
            (away if group.load is None else past).append(group)
        for some in (away, past):
            some.sort(key=lambda group: group.expert.first)
        loads = Arriving([(group.load, group.expert.reads) for group in past if group.load is not None])
        with closing(loads):
            prefetch(read for group in away for read in group.expert.reads)
            left = len(away) + len(past)
            if cached or not left:
                yield cached, not left
            for number, group in enumerate(away):
                if number and number % _AHEAD == 0:
                    prefetch(read for one in away[number : number + 4 * _AHEAD] for read in one.expert.reads)
                with _naming(group, self._stack.name):
                    for read in group.expert.reads:
                        ensure_resident(*read)
                left -= 1
                yield [group], not left
            for group in past:
                with _naming(group, self._stack.name):
                    loads.take()
                left -= 1
                yield [group], not left

    def _multiply(self, groups: Sequence[_Group], *, are_last: bool) -> None:
        """The results of some experts, which are in memory, and after the last ones their sum."""
        for group in groups:
            with _naming(group, self._stack.name):
                group.mapped = group.expert.mapped(group.load)
        few: list[_Share] = []
        rows = 0
        for share in (share for group in groups for share in group.shares):
            if not share.are_few:
                self._multiply_many(share)
                continue
            if rows + share.end - share.begin > _AT_ONCE:
                self._multiply_few(few, and_sum=False)
                few, rows = [], 0
            few.append(share)
            rows += share.end - share.begin
        self._multiply_few(few, and_sum=are_last)
        for group in groups:
            if group.load is not None:
                del group.mapped  # its memory is used again

    def _multiply_many(self, share: _Share) -> None:
        group, numbers = share.group, torch.full((share.end - share.begin,), share.group.number)
        x = self._x.index_select(0, self._tokens[share.begin : share.end])
        rows_of_acts, number = x, 0
        for runs in (group.expert.up, group.expert.down):
            parts = [group.expert.dense(group.mapped, number + n, x.dtype) for n in range(len(runs))]
            products = [F.linear(rows_of_acts, part) for part in parts]
            if not number and self._between.is_silu and [self._stack.columns[1]] * 2 == [len(part) for part in parts]:
                rows_of_acts = F.silu(products[0], inplace=True).mul_(products[1])
            else:
                rows_of_acts = products[0] if len(products) == 1 else torch.cat(products, dim=1)
                rows_of_acts = rows_of_acts if number else self._between.gate(rows_of_acts, numbers).to(x.dtype)
            number += len(runs)
        if self._between.finish is not None:
            rows_of_acts = self._between.finish(rows_of_acts, numbers)
        self._down[share.begin : share.end] = rows_of_acts

    def _multiply_few(self, shares: Sequence[_Share], *, and_sum: bool) -> None:
        """The results of experts with few rows each, in one call if the kernels know what is between the products."""
        between, experts, rows = self._between, [], 0
        for share in shares:
            mapped, count = share.group.mapped, share.end - share.begin
            experts.append(ExpertRows(mapped.up, mapped.down, count, share.begin))
            rows += count
        tokens = self._tokens[:rows]  # all of them; those that are routed to no expert come last
        if 0 < rows < len(self._down):
            tokens = torch.cat([self._tokens[one.begin : one.end] for one in shares])
        total = WeightedSum(self._places.view(self._picks.shape), self._weights, self._out) if and_sum else None
        if between.is_silu or not shares:
            if shares or and_sum:
                native.multiply_experts(experts, self._x, self._down, tokens=tokens if shares else None, total=total)
            return
        numbers = torch.tensor([one.group.number for one in shares]).repeat_interleave(
            torch.tensor([one.end - one.begin for one in shares])
        )
        gated = torch.empty(rows, self._stack.outputs[0], dtype=torch.float32)
        native.multiply_experts(experts, self._x, self._down, tokens=tokens, up=gated)
        gated = between.gate(gated, numbers).to(self._x.dtype).contiguous()
        if between.finish is not None:
            native.multiply_experts(experts, gated, self._down)
            for one in shares:
                part = self._down[one.begin : one.end]
                part.copy_(between.finish(part, torch.full((len(part),), one.group.number)))
            experts = []
        if experts or and_sum:
            native.multiply_experts(experts, gated, self._down, total=total)


def _results(rows: int, columns: int) -> torch.Tensor:
    """Memory for results. The pages of many megabytes would be made anew for each layer."""
    layout = contiguous(torch.float32, (rows, columns))
    return torch.empty(rows, columns, dtype=torch.float32) if layout.nbytes < LEAST else scratch_for(layout, CPU)


@contextmanager
def _naming(group: _Group, name: str) -> Iterator[None]:
    """In this context, errors have a note that says which expert it was."""
    try:
        yield
    except OffloadError as error:
        error.add_note(f"it is part of expert {group.number} of {name}")
        raise
