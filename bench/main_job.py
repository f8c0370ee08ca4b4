"""The main job on real input: embed sentences with a pretrained model on disk, generate with a larger one, and report.

Always true:
- every result is checked against the same model in memory; a difference is an error
- each way of loading runs in a separate process, with a warm page cache
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from itertools import chain
from pathlib import Path

import torch
from rich import box
from rich.filesize import decimal
from rich.table import Table

from bench.apart import run_apart
from bench.generate import PROMPT, Trial, trial, typical
from bench.models import cache_folder, llama, minilm
from bench.page_cache import files_in, warm
from bench.peers import IN_MEMORY, OURS
from bench.report import draw_memory
from bench.rounds import Trace
from offload.cli import output

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
TOKENS = 16
ROUNDS = 3  # interleaved; medians are reported
ARMS = (IN_MEMORY, OURS, "accelerate")
console = output.console()


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument(
        "--model", help="a causal language model on the hub, or a folder; a made 1 GB Llama if not given"
    )
    options.add_argument("--prompt", default="The tensors of this model live on disk, so")
    options.add_argument(
        "--out",
        type=Path,
        default=cache_folder() / "main_job.png",
        help="where the picture goes; its points beside it",
    )
    chosen = options.parse_args()
    with output.logging_to_stderr(0):  # hides third-party warnings
        output.hide_bars_off_a_terminal()
        embed()
        folder, prompt = _folder_and_prompt(chosen.model, chosen.prompt)
        trials = generate(folder, prompt, text_of=chosen.model)
    report(folder, trials)
    traces = {trial.arm: trial.trace for trial in trials}
    chosen.out.parent.mkdir(parents=True, exist_ok=True)
    points = {arm: [(round(second, 3), used) for second, used in _thinned(trace)] for arm, trace in traces.items()}
    chosen.out.with_suffix(".json").write_text(json.dumps(points) + "\n", encoding="utf-8")
    console.print(f"memory over time: {draw_memory(traces, 'Load, then decode', chosen.out)}")
    return 0


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
    title = "all-MiniLM-L6-v2 on disk: the most similar of 12 sentences"
    table = Table("likeness", "sentence", "sentence", title=title, box=box.SIMPLE)
    for pair in ranking:
        row, column = int(rows[pair]), int(columns[pair])
        table.add_row(f"{likeness[row, column]:.3f}", SENTENCES[row], SENTENCES[column])
    console.print(table)
    console.print("embeddings equal those of the model in memory, bit for bit\n")


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
