"""How long a token takes here: alone, and with other requests in flight.

Always true:
- a pass takes as long as the slower of the two: reading what does not stay in memory, and computing
- what would not be quicker than the model as it is is not shown
- the first line of a plan answers the question
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from offload.errors import ArgumentError
from offload.memory import as_budget, as_bytes, available_bytes
from offload.planning.machine import Computing, computing_rates, disk_rate_at
from offload.planning.sizes import DENSE, ModelSizes, sizes_of
from offload.prefetch.plan import Pool
from offload.prefetch.room import free_on, room_on
from offload.tensor.arguments import checked_count, computing_device
from offload.tensor.wrapper import PathLike
from offload.torch_api import usable_accelerator

IN_FLIGHT = 16  # requests that share each pass
_SLOW = 1.0  # seconds per token that nobody waits for


@dataclass(frozen=True)
class Way:
    """A way of running a model.

    Attributes:
        stays: how many bytes of its files stay in memory.
        reads: how many bytes a pass reads.
        sends: how many bytes cross the bus to an accelerator in a pass.
        tokens: how many tokens a pass gives.
        pass_seconds: how long a pass takes.
        first_seconds: how long the first pass takes, with nothing in memory.
        bound: what takes longest: "reading", "sending" or "computing".
        command: what runs it in a shell.
    """

    stays: int
    reads: int
    sends: int
    tokens: int
    pass_seconds: float
    first_seconds: float
    bound: str
    command: str

    @property
    def token_seconds(self) -> float:
        """Time per token, averaged over a pass."""
        return self.pass_seconds / self.tokens


@dataclass(frozen=True)
class Plan:
    """Whether a model runs on this machine, and how fast. Sizes in bytes, rates in bytes per second.

    Attributes:
        model: what it holds.
        budget: what may stay in memory: of weights, if it was set, else with keys and values.
        disk_rate: how fast the disk is read.
        computing: how fast the device computes.
        tokens: how many tokens a batch has, whose keys and values are kept.
        context_bytes: what those take.
        runs: whether there is memory for keys and values.
        device_memory: what is free on the accelerator that computes; None on the CPU.
        fits: whether all of the model stays in memory, that of the accelerator if there is one, in the form that it is
            stored in.
        as_it_is: the way of one pass per token, with the model as it is stored.
        together: the way with 16 requests in flight, if that is quicker.
    """

    model: ModelSizes
    budget: int
    disk_rate: float
    computing: Computing
    tokens: int
    context_bytes: int | None
    device_memory: int | None
    runs: bool
    fits: bool
    as_it_is: Way
    together: Way | None

    @property
    def answer(self) -> str:
        """Whether it runs here, and how fast, in a sentence or two."""
        from rich.filesize import decimal

        if not self.runs:
            return (
                f"Does not run here: keys and values of the context take {decimal(self.context_bytes or 0)} of memory."
            )
        seconds = self.as_it_is.token_seconds
        sentence = f"Runs here{', slowly' if seconds > _SLOW else ''}: {_in_words(seconds)} per token"
        sentence += f", {1 / seconds:.{seconds > 0.1:d}f} tokens/s." if 1e-3 <= seconds < 1 else "."
        where = "memory" if self.device_memory is None else "the memory of the device"
        if self.fits and self.model.form in DENSE:
            return f"{sentence} It fits in {where}: use plain transformers, no setting of offload makes it faster."
        return f"{sentence} It fits in {where}, packed as it is." if self.fits else sentence

    def rows(self) -> Iterator[tuple[str, str]]:
        """What it says below the answer: labels, and what they are of."""
        from rich.filesize import decimal

        model, way, on_device = self.model, self.as_it_is, self.device_memory
        yield "model", f"{model.name}: {_count(model.parameters)} parameters, {decimal(model.stored)} ({model.form})"
        context = ""
        if self.context_bytes is not None:
            context = f"; keys and values of {self.tokens:,} tokens: {decimal(self.context_bytes)}"
        stays = f"{decimal(way.stays)} of weights stay, {decimal(self.budget)} may"
        yield "memory", stays + (context if on_device is None else "")
        if on_device is not None:
            yield "device", f"{decimal(on_device)} free{context}"
        reading = f"reads {decimal(way.reads)} at {decimal(int(self.disk_rate))}/s" if way.reads else "reads nothing"
        reading += f", sends {decimal(way.sends)}" if way.sends else ""
        yield "a pass", f"{reading}, bound by {way.bound}; the first takes {_in_words(way.first_seconds)}"
        if self.context_bytes is None:  # it does not generate: these are no commands for it
            return
        yield "type", way.command
        if self.together is not None:
            yield "faster", f"{_in_words(self.together.token_seconds)} per token, with {IN_FLIGHT} requests in flight:"
            yield "", self.together.command

    def __str__(self) -> str:
        return "\n".join([self.answer, *(f"  {label:8}{text}" for label, text in self.rows())])


def _in_words(seconds: float) -> str:
    if seconds < 1e-3:
        return "under 1 ms"
    return f"{seconds:.2g} s" if seconds >= 1 else f"{seconds * 1e3:.0f} ms"


def _count(parameters: int) -> str:
    """`7.24 billion`."""
    for size, word in ((10**9, "billion"), (10**6, "million")):
        if parameters >= size:
            return f"{parameters / size:.3g} {word}"
    return f"{parameters:,}"


def plan(
    model: PathLike,
    *,
    max_memory: int | str | None = None,
    device: torch.device | str | None = None,
    batch: int = 1,
    context: int = 1024,
    disk_rate: int | str | None = None,
    trust_remote_code: bool = False,
    **hub_options: object,
) -> Plan:
    """Whether a model runs on this machine, and how fast.

    It reads the configuration and the headers of the files (from the hub, by requests of some kilobytes), and
    measures the disk and a matrix product. Nothing is loaded.

    Args:
        model: a folder with a checkpoint, a GGUF file, or a model on the hub.
        max_memory: how much of the weights may stay in memory, as in `set_max_memory`; None for what there is room for.
        device: where ops run; None for the accelerator if there is one.
        batch: sequences that are generated at a time.
        context: tokens of each, whose keys and values are kept.
        disk_rate: bytes per second, as 2_000_000_000 or "2GB"; None to measure it where the model is.
        trust_remote_code: whether code that comes with the model may run, which can do whatever you can.
        hub_options: revision, token.

    Returns:
        What the model takes, what stays in memory, what a token reads and how long it takes; prints as the command
        `offload plan` does.

    Raises:
        CheckpointError: no such model, or none that transformers knows.
        ValueError: an invalid amount, or a disk that could not be measured.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = dict(hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, vocab_size=9)
        >>> LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained("llama")
        >>> plan("llama", disk_rate="1GB").fits
        True
    """
    batch, context = checked_count(batch, "batch"), checked_count(context, "context")
    rate = None if disk_rate is None else as_bytes(disk_rate)
    if rate == 0:
        raise ArgumentError("disk_rate must be a positive number of bytes per second, such as '2GB'")
    budget = _budget(max_memory)
    sizes = sizes_of(model, trust_remote_code=trust_remote_code, **hub_options)
    computes_on = computing_device(device) if device is not None else usable_accelerator()
    computing = computing_rates(computes_on or torch.device("cpu"), sizes.form)
    context_bytes = None if sizes.kv_per_token is None else sizes.kv_per_token * batch * context
    on_device = stays = None
    if computes_on is not None and computes_on.type != "cpu":
        on_device, stays = free_on(computes_on), room_on(computes_on, beside=context_bytes or 0)
    beside = 0 if max_memory is None else max(0, available_bytes() - budget)  # a budget that is set is for weights
    here = context_bytes or 0 if on_device is None else 0  # keys and values are where ops run
    left = max(0, budget - max(0, here - beside))
    measured = rate or disk_rate_at(sizes.file)
    estimate = Estimate(sizes, left, measured, computing, stays)
    name, options = shlex.quote(sizes.name), _options(max_memory, device)
    as_it_is = estimate.of(f'offload generate {name}{options} --prompt "..."', batch)
    many = f"offload batch {name} requests.jsonl answers.jsonl{options} --in-flight {IN_FLIGHT}"
    together = estimate.of(many, batch, IN_FLIGHT)
    fits = sizes.stored <= (left if stays is None else stays)
    has_use = not fits or sizes.form not in DENSE  # else plain transformers are as fast
    return Plan(
        model=sizes,
        budget=budget,
        disk_rate=measured,
        computing=computing,
        tokens=batch * context,
        context_bytes=context_bytes,
        device_memory=on_device,
        runs=(context_bytes or 0) < (max(available_bytes(), budget) if on_device is None else on_device),
        fits=fits,
        as_it_is=as_it_is,
        together=together if has_use and together.token_seconds < as_it_is.token_seconds else None,
    )


def _options(max_memory: int | str | None, device: torch.device | str | None) -> str:
    """The request as options for the suggested commands."""
    options = {"--max-memory": max_memory, "--device": device}
    return "".join(f" {option} {shlex.quote(str(value))}" for option, value in options.items() if value is not None)


def _budget(max_memory: int | str | None) -> int:
    if max_memory is not None:
        return as_budget(max_memory)
    pool = Pool()
    pool.reconsider(anew=True)
    return pool.capacity


@dataclass(frozen=True)
class Estimate:
    """Estimates the time of passes on a machine.

    Attributes:
        on_device: how many bytes of weights stay on an accelerator; None on the CPU.
    """

    sizes: ModelSizes
    budget: int
    disk_rate: float
    computing: Computing
    on_device: int | None = None

    def of(self, command: str, batch: int = 1, in_flight: int = 1) -> Way:
        """A way, with `in_flight` batches per pass."""
        sizes, tokens = self.sizes, batch * in_flight
        needed, most = sizes.needed(tokens), sizes.stored - sizes.rows
        stays = min(self.budget, most)
        on_device = 1.0 if self.on_device is None else min(1.0, self.on_device / max(sizes.stored, 1))
        reads, sends = sizes.missing(tokens, stays), sizes.missing(tokens, int(on_device * most))
        computing, rate = in_flight * self._computing(batch), self.computing.sends or math.inf
        taken = {"reading": reads / self.disk_rate, "sending": sends / rate, "computing": computing}
        bound = max(reversed(taken), key=taken.__getitem__)
        first = max(needed / self.disk_rate, needed / rate, computing)
        return Way(stays, reads, sends, tokens, taken[bound], first, bound, command)

    def _computing(self, batch: int) -> float:
        """Compute time of a batch in seconds: its weights pass through the processor, or are multiplied.

        Kernel calls have a cost of their own, which dominates for small models: that of a small layer, for each op.
        """
        sizes, rates = self.sizes, self.computing
        packed = sizes.needed_packed(batch)
        streaming = (sizes.needed(batch) - packed) / rates.streams + packed / rates.packed
        return max(streaming, 2 * batch * sizes.multiplied(1) / rates.multiplies) + sizes.ops * rates.call
