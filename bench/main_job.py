"""The main job on real input: a pretrained model answers a question from disk, in full memory and in little; sentences.

Always true:
- every result is checked against plain transformers with the model in memory; a difference is an error
- where ways of loading are compared, each runs in a separate process, with a warm page cache
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.filesize import decimal
from rich.table import Table

from bench.apart import run_apart
from bench.capped import ALLOWANCE
from bench.generate import PROMPT, Trial, trial, typical
from bench.memory_cap import Group, memory_cap
from bench.models import cache_folder, llama, minilm, smollm2, smollm2_dense
from bench.page_cache import files_in, make_cold, warm
from bench.peers import IN_MEMORY, OURS
from bench.process import MemoryTrace, read_bytes
from bench.report import draw_memory
from bench.rounds import Trace
from offload.cli import output
from offload.transformers_api import disable_progress_bar

SENTENCES = (
    "A cat sleeps on the warm windowsill.",
    "The kitten is napping in the sun.",
    "Two dogs chase a ball across the park.",
    "Puppies run after a toy on the grass.",
    "The stock market fell sharply on Monday.",
    "Share prices dropped at the start of the week.",
    "Bake the bread for forty minutes until golden.",
    "The recipe says to leave the loaf in the oven for a while.",
    "The telescope found water vapour around a distant planet.",
    "Astronomers detected moisture in an exoplanet's atmosphere.",
    "The train to Lisbon leaves at half past six.",
    "He forgot his umbrella and got soaked.",
)
QUESTION = "What is the capital of France?"
TOKENS = 16
ROUNDS = 3  # interleaved; medians are reported
ARMS = (IN_MEMORY, OURS, "accelerate")
console = output.console()


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--model", help="compare ways of loading: a causal language model on the hub, or a folder")
    options.add_argument("--made", action="store_true", help="the same with a made Llama of 1 GB")
    options.add_argument("--prompt", help="a question, or for --model a text to continue")
    options.add_argument(
        "--out",
        type=Path,
        default=cache_folder() / "main_job.png",
        help="where the picture of a comparison goes; its points beside it",
    )
    chosen = options.parse_args()
    with output.logging_to_stderr(0):  # hides third-party warnings
        disable_progress_bar()
        if chosen.model or chosen.made:
            compare(chosen.model, chosen.prompt or "The tensors of this model live on disk, so", chosen.out)
        else:
            answer(chosen.prompt or QUESTION)
            embed()
    return 0


def answer(question: str) -> None:
    """SmolLM2 answers from its GGUF file, then from a dense checkpoint three times as large as its memory."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from offload.integrations.transformers import from_pretrained

    packed, dense = smollm2(), smollm2_dense()
    tokenizer = AutoTokenizer.from_pretrained(dense)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    plain = _new_tokens(AutoModelForCausalLM.from_pretrained(dense), prompt)
    on_disk = _new_tokens(from_pretrained(packed, exact=True), prompt)
    _require(plain == on_disk, "tokens of the GGUF file")
    answer = tokenizer.decode(on_disk, skip_special_tokens=True)
    console.print(
        f"SmolLM2-135M in 4 bits, {decimal(packed.stat().st_size)}, on disk:\n\n  {question}\n  {answer}\n\n"
        f"{len(on_disk)} tokens, the same as those of plain transformers with the decoded weights\n",
        markup=False,
    )

    size = sum(path.stat().st_size for path in files_in(dense))
    budget = size // 3
    try:
        with memory_cap(budget + ALLOWANCE) as group:
            done = run_apart(in_little_memory, dense, dict(prompt), budget, group)
        where = f"a process that may take {decimal(budget + ALLOWANCE)}"
    except OSError:
        done = run_apart(in_little_memory, dense, dict(prompt), budget, None)
        where = "a process without a limit of its own: no memory cgroup can be made here"
    _require(done.tokens == plain, "tokens under a memory cap")
    console.print(
        f"The same in float32, {decimal(size)}, of which {decimal(budget)} may stay in memory,\nin {where}:\n"
        f"the same tokens, {done.seconds:.2f} s and {decimal(int(done.read))} read per token, "
        f"{decimal(max(done.peak, 0))} of memory beside the files\n",
        markup=False,
    )


@dataclass(frozen=True)
class Answer:
    """An answer under a budget: seconds and bytes read per token, peak anonymous memory in bytes above the start."""

    tokens: list[int]
    seconds: float
    read: float
    peak: int


def in_little_memory(folder: Path, prompt: dict[str, torch.Tensor], budget: int, group: Group | None) -> Answer:
    """Load a model with a budget, and answer; nothing of it is cached at the start."""
    from offload.integrations.transformers import from_pretrained

    make_cold(files_in(folder))
    if group:
        group.join()
    with MemoryTrace() as memory:
        model = from_pretrained(folder, max_memory=budget)
        before, start = read_bytes(), time.perf_counter()
        tokens = _new_tokens(model, prompt)
    seconds, read = time.perf_counter() - start, read_bytes() - before
    return Answer(tokens, seconds / len(tokens), read / len(tokens), memory.peak)


def _new_tokens(model: Any, prompt: Mapping[str, torch.Tensor]) -> list[int]:
    """What a model answers, greedily."""
    with torch.inference_mode():
        found = model.generate(**prompt, max_new_tokens=TOKENS, do_sample=False)
    tokens: list[int] = found[0, prompt["input_ids"].shape[1] :].tolist()
    return tokens


def compare(model: str | None, text: str, out: Path) -> None:
    """Ways of loading a model: tokens, times and memory, and a picture of these."""
    folder, prompt = _folder_and_prompt(model, text)
    trials = generate(folder, prompt, text_of=model)
    report(folder, trials)
    traces = {trial.arm: trial.trace for trial in trials}
    out.parent.mkdir(parents=True, exist_ok=True)
    points = {arm: [(round(second, 3), used) for second, used in _thinned(trace)] for arm, trace in traces.items()}
    out.with_suffix(".json").write_text(json.dumps(points) + "\n", encoding="utf-8")
    console.print(f"memory over time: {draw_memory(traces, 'Load, then decode', out)}")


def _thinned(trace: Trace, most: int = 300) -> Trace:
    """Fewer points, for a picture."""
    return trace[:: max(len(trace) // most, 1)]


def embed() -> None:
    """Rank sentence pairs by similarity with all-MiniLM-L6-v2 on disk."""
    from transformers import AutoModel, AutoTokenizer

    from offload.integrations.transformers import from_pretrained
    from offload.tensor.wrapper import is_offloaded

    folder = minilm()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    batch = tokenizer(list(SENTENCES), padding=True, return_tensors="pt")
    on_disk = from_pretrained(folder, model_class=AutoModel)
    assert all(is_offloaded(parameter) for parameter in on_disk.parameters())
    vectors = _embeddings(on_disk, batch)
    _require(torch.equal(vectors, _embeddings(AutoModel.from_pretrained(folder), batch)), "embeddings")

    likeness = vectors @ vectors.T  # (sentences, sentences)
    rows, columns = torch.triu_indices(len(SENTENCES), len(SENTENCES), offset=1)
    ranking = likeness[rows, columns].argsort(descending=True)[:6]
    console.print("all-MiniLM-L6-v2, on disk: the most similar of 12 sentences\n")
    for pair in ranking:
        row, column = int(rows[pair]), int(columns[pair])
        console.print(f"  {likeness[row, column]:.3f}  {SENTENCES[row]}\n         {SENTENCES[column]}")
    console.print("\nembeddings equal those of the model in memory, bit for bit\n")


@torch.inference_mode()
def _embeddings(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Mean-pooled, normalized: (sentences, 384)."""
    states = model(**batch).last_hidden_state
    mask = batch["attention_mask"].unsqueeze(-1)
    return torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1), dim=1)


def generate(folder: Path, prompt: list[int], *, text_of: str | None) -> list[Trial]:
    """The same tokens from each way of loading."""
    warm(files_in(folder))
    with tempfile.TemporaryDirectory() as scratch:
        rounds = [[run_apart(trial, arm, folder, Path(scratch), prompt, TOKENS) for arm in ARMS] for _ in range(ROUNDS)]
    for one in chain.from_iterable(rounds):
        _require(one.tokens == rounds[0][0].tokens, f"tokens of {one.arm}")
    trials = [typical(list(same_arm)) for same_arm in zip(*rounds, strict=True)]
    console.print(f"{TOKENS} tokens equal with everything on disk, in memory and with accelerate: {trials[0].tokens}")
    if text_of:
        from transformers import AutoTokenizer

        console.print(AutoTokenizer.from_pretrained(folder).decode(prompt + trials[0].tokens), markup=False)
    return trials


def report(folder: Path, trials: list[Trial]) -> None:
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    table = Table(
        "", *(trial.arm for trial in trials), title=f"\n{folder.name}: a checkpoint of {decimal(size)}", box=box.SIMPLE
    )
    rows = {
        "checkpoint bytes": lambda _: decimal(size),
        "bytes written by loading": lambda trial: decimal(trial.bytes_written),
        "load time": lambda trial: f"{trial.load_seconds:.2f} s",
        "time to first token": lambda trial: f"{trial.first_token_seconds:.2f} s",
        "time per token": lambda trial: f"{trial.token_seconds * 1e3:.0f} ms",
        "anonymous memory after loading": lambda trial: decimal(trial.loaded_bytes),
        "peak anonymous memory": lambda trial: decimal(trial.peak_bytes),
    }
    for label, value in rows.items():
        table.add_row(label, *map(value, trials))
    console.print(table)


def _folder_and_prompt(model: str | None, prompt: str) -> tuple[Path, list[int]]:
    if model is None:
        return llama(), PROMPT
    from transformers import AutoTokenizer

    from offload.integrations.hub import folder_of

    folder = folder_of(model)
    return folder, AutoTokenizer.from_pretrained(folder)(prompt)["input_ids"]


def _require(equal: bool, what: str) -> None:
    if not equal:
        sys.exit(f"{what} differ from those of the model in memory")


if __name__ == "__main__":
    sys.exit(main())
