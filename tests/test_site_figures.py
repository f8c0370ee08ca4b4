"""Figures in the README's table match the result files."""

import json
import re
from functools import reduce
from operator import getitem
from statistics import median

import pytest

from bench.peers import IN_MEMORY, OURS
from bench.report import RESULTS
from tests.processes import ROOT

GGUF, NAMED = "2026-11-29-packed.json", "2026-11-29-named.json"
# For each row of the table that is not of a named model: the file, and the case in it.
ROWS = {"Llama of 30 GB, bfloat16, 24 GiB": ("2026-11-27-larger.json", "larger, dense: a token")}
ARMS = {"transformers, on disk": "transformers"}  # what the table calls otherwise
UNITS = {"": 1.0, "s": 1.0, "ms": 1e-3, "MB": 1e6, "GB": 1e9}


def table() -> dict[str, list[str]]:
    """The cells of the README's table, by what is in the first two of a row."""
    text = (ROOT / "README.md").read_text(encoding="utf-8").partition("## What was measured")[2]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| ")]
    return {", ".join(filter(None, row[:2])): row[2:] for row in rows[2:]}


def figure(name: str) -> dict:
    """Of a row: that of `ROWS`, or of a named model, whose size in brackets is not in the case."""
    model = re.sub(r" \(.*?\)", "", name)
    file, case = ROWS.get(name) or (NAMED, f"named, {model}: a token")
    figures = json.loads((RESULTS / file).read_text(encoding="utf-8"))["figures"]
    return next(one for one in figures if one["case"] == case)


def are_one(said: str, measured: float) -> bool:
    """Whether a figure with a unit equals a number, to its precision."""
    digits, unit = re.fullmatch(r"([\d.]+) ?(\w*)", said).groups()
    last = 10.0 ** -len(digits.partition(".")[2])
    return abs(measured / UNITS[unit] - float(digits)) <= last / 2 * 1.001


def test_every_figure_of_the_table_is_listed():
    assert ROWS.keys() <= table().keys()


@pytest.mark.parametrize("name", table())
def test_a_figure_equals_that_of_the_result(name):
    ours, peer, times = table()[name]
    found = figure(name)
    medians = {arm: median(rounds) for arm, rounds in found["values"].items() if rounds}
    said, arm = re.fullmatch(r"([\d.]+ m?s) \((.*)\)", peer).groups()
    best = min(value for arm, value in medians.items() if arm != OURS)

    assert best == medians[ARMS.get(arm, arm)]
    assert are_one(ours, medians[OURS])
    assert are_one(said, best)
    assert are_one(times, best / medians[OURS])


def test_the_table_of_named_models_equals_the_result():
    text = (ROOT / PERFORMANCE).read_text(encoding="utf-8").partition("## Named models")[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| ")][2:]
    arms = (OURS, "llama.cpp", "llama.cpp, not repacked")

    assert len(rows) == 17
    for name, *cells in rows:
        found = figure(name)
        for arm, said in zip(arms, cells, strict=True):
            if said[:1].isdigit():
                assert are_one(said, median(found["values"][arm]))
            else:
                assert said.partition(" in ")[0].replace("none", "no token") in found["missing"].get(arm, "")


def test_a_figure_is_compared_to_its_last_digit():
    assert are_one("0.91 s", 0.9083)
    assert are_one("58 ms", 0.0581)
    assert not are_one("0.90 s", 0.9083)
    assert not are_one("58 ms", 0.0589)


PERFORMANCE = "tutorials/explanation/performance.md"
FORMS, MACHINES = "tutorials/explanation/forms.md", "tutorials/explanation/beyond-one-machine.md"
CAPPED, LARGER, DRAFTS = "2026-11-27-capped.json", "2026-11-27-larger.json", "2026-11-26-drafts.json"
BATCHES, LARGER_BATCHES = "2026-11-27-batches.json", "2026-11-27-larger-batches.json"
PACKED, RANKS, GPU = "2026-11-27-larger-packed.json", "2026-11-27-ranks.json", "2026-11-27-gpu.json"
BEST, BOTH, MODEL = "best", (OURS, "llama.cpp"), "a language model"
TABLES = "2026-11-29-tables.json"
STAYS = ("nothing stays", "half stays", "everything stays")


def of(file: str, case: str, *arms: str, what: tuple[str, ...] = ("",)) -> list[tuple[str, ...]]:
    """Where the figures of these arms are: each of `what`, which stands in the case for `{}`, for each of the arms."""
    return [(file, case.format(one), arm) for arm in arms or (OURS,) for one in what]


def on_a_gpu(row: str, *keys: tuple[str, ...], figure: str = r"(\d+ ms)") -> tuple[str, str, list[tuple[str, ...]]]:
    return PERFORMANCE, rf"\| {re.escape(row)} \| {figure} \|", [(GPU, *path) for path in keys]


# A sentence on a page without its figures, and where each figure is: the file, and the case and the arm, or the keys.
SENTENCES = [
    (
        PERFORMANCE,
        r"the first pass takes ([\d.]+ s) \(plain transformers ([\d.]+ s), its disk map ([\d.]+ s)\), "
        r"and each token after it reads ([\d.]+ GB)",
        of(LARGER, "larger, dense: first pass", OURS, IN_MEMORY, "transformers")
        + of(LARGER, "larger, dense: bytes read, a token"),
    ),
    (
        PERFORMANCE,
        r"with 4 of 64 experts per token and layer, the first pass takes ([\d.]+ s) \(best peer ([\d.]+ s)\), "
        r"and a token ([\d.]+ s) and ([\d.]+ GB) \(best peer ([\d.]+ s) and ([\d.]+ GB)\)",
        of(LARGER, "larger, experts: first pass", OURS, BEST)
        + of(LARGER, "larger, experts: {}", OURS, BEST, what=("a token", "bytes read, a token")),
    ),
    (
        PERFORMANCE,
        r"After 20 tokens, one takes ([\d.]+ s) and ([\d.]+ GB) \(best peer ([\d.]+ s) and ([\d.]+ GB)\)",
        of(LARGER, "larger, experts: {} after 20", OURS, BEST, what=("a token", "bytes read, a token")),
    ),
    (
        PERFORMANCE,
        r"it takes ([\d.]+ s) then \(([\d.]+ s) among the first three\)",
        of(LARGER, "larger, experts: a token{}", f"{OURS}, experts as one act", what=(" after 20", "")),
    ),
    (
        PERFORMANCE,
        r"a batch of 32 tokens takes ([\d.]+ s), and ([\d.]+ s) with the best of the others",
        of(BATCHES, "batches, dense, 32 tokens, 16 in flight: a batch", OURS, BEST),
    ),
    *(
        (
            PERFORMANCE,
            sentence,
            of(LARGER_BATCHES, case, OURS, "offload, one by one", what=("a batch", "bytes read, a batch")),
        )
        for sentence, case in {
            r"each takes ([\d.]+ s) and reads ([\d.]+ GB); "
            r"one by one, after a first pass, it is ([\d.]+ s) and ([\d.]+ GB)\.": "16 tokens, 8 in flight",
            r"With 4 tokens generated it is ([\d.]+ s) and ([\d.]+ GB); "
            r"one by one ([\d.]+ s) and ([\d.]+ GB)\.": "16 tokens and 4 generated, 8 in flight",
        }.items()
        for case in (f"larger-batches, {case}: {{}}",)
    ),
    (
        FORMS,
        r"it loads in ([\d.]+ s) and (\d+ MB), and writes nothing\. A token for which nothing is cached reads "
        r"([\d.]+ GB), what it needs, and takes ([\d.]+ s)\. The tokens after it take ([\d.]+ s), though they read "
        r"([\d.]+ GB) each: .* one takes ([\d.]+ s) and reads ([\d.]+ GB)\. Beside the mapped files, no more than "
        r"(\d+ MB)",
        of(
            *(PACKED, "larger-packed, 30.7 GB of experts in FP8: {}"),
            what=(
                *("load", "anonymous memory, loaded", "bytes read, a token, cold", "a token, cold"),
                *("a token after another", "bytes read, a token after another", "a token after 20"),
                *("bytes read, a token after 20", "peak anonymous memory"),
            ),
        ),
    ),
    (
        PERFORMANCE,
        r"Without drafts a token takes ([\d.]+ s)\. With an assistant that is right in half of the positions it is "
        r"([\d.]+ s), in 80 % of them ([\d.]+ s), in 95 % of them ([\d.]+ s)\.",
        of(DRAFTS, "drafts: dense, a third fits, 0.8 accepted: a token", "no draft")
        + of(DRAFTS, "drafts: dense, a third fits, {} accepted: a token", what=("0.5", "0.8", "0.95")),
    ),
    (
        PERFORMANCE,
        r"SmolLM2-135M, Q4_1, in memory \| (\d+ ms) \| (\d+ ms) \| "
        r".* \(1\.1 GB\), in memory \| (\d+ ms) \| (\d+ ms) \| "
        r".* 1,107 MB of memory \| ([\d.]+ s) \| ([\d.]+ s) \| .* 830 MB \| ([\d.]+ s) \| killed",
        of(GGUF, "gguf: a token, SmolLM2-135M, Q4_1, bfloat16", *BOTH)
        + of(GGUF, "gguf: a token, 1.1 GB, Q4_K_M, bfloat16", *BOTH)
        + of(GGUF, "gguf, capped: a token, 1.1 GB, Q4_K_M, in 1,107 MB", *BOTH)
        + of(GGUF, "gguf, capped: a token, 1.1 GB, Q4_K_M, in 830 MB"),
    ),
    (
        PERFORMANCE,
        " ".join([r"\| [^|]* \| ([\d.]+ m?s) \| ([\d.]+ m?s) \| ([\d.]+ m?s) \|"] * 3) + " As medians",
        [
            (TABLES, f"tables, 20.0 GB: {what}", arm)
            for what in ("a token, 1 row", "a token, 8 rows", "a prompt of 256 tokens")
            for arm in (OURS, "a plain mapping", "rows in memory")
        ],
    ),
    *(
        (
            MACHINES,
            rf"\| {ranks} \| (\d+ ms) \| (\d+ ms) \| (\d+ MB) of \d+ \| (\d+ ms) \| (\d+ ms) \|",
            of(RANKS, f"ranks, {ranks}: a token", OURS, "plain parallel")
            + of(RANKS, f"ranks, {ranks}: read by a rank to the first token")
            + of(RANKS, f"ranks, {ranks}, 1.5x capped: a token", OURS, "plain parallel"),
        )
        for ranks in (1, 2, 4)
    ),
    *(
        on_a_gpu(row, (MODEL, arm, "a token, s"))
        for row, arm in {
            "in the memory of the GPU": "in the memory of the device",
            "from disk, with a budget for all of them": "offload, everything stays",
            "from disk, with a budget for half": "offload, half stays",
            "from disk, with a budget of 0: nothing stays": "offload, nothing stays",
            "accelerate, from main memory": "accelerate, from memory",
            "accelerate, from disk": "accelerate, from disk",
        }.items()
    ),
    *(
        on_a_gpu(
            row,
            *((form, "stored bytes"), *((form, stays, "later tokens, s") for stays in STAYS)),
            (form, STAYS[0], "of the plain copy's rate"),
            figure=r"(\d+ MB) \| ([\d.]+ ms) \| ([\d.]+ ms) \| ([\d.]+ ms) \| ([\d.]+)",
        )
        for row, form in {
            "bfloat16": "bfloat16", "FP8 in blocks": "FP8", "W4A16 in groups of 128": "W4A16", "Q4_K": "Q4_K",
        }.items()
    ),
    (
        PERFORMANCE,
        r"accelerate takes (\d+ ms) for the matrices in bfloat16 from main memory, and (\d+ ms) from disk",
        [(GPU, "accelerate", place, "later tokens, s") for place in ("memory", "disk")],
    ),
    (PERFORMANCE, r"plain copies from pinned memory make (\d+ GB)/s", [(GPU, "bfloat16", "plain pinned copy, bytes/s")]),  # noqa: E501
    (
        "README.md",
        r"a token of a Llama of ([\d.]+ GB) takes (\d+ ms) in plain transformers, (\d+ ms) here if all of it may stay "
        r"there, and (\d+ ms) if none may",
        [
            (GPU, MODEL, "bytes"),
            (GPU, MODEL, "in the memory of the device", "a token, s"),
            *((GPU, MODEL, f"offload, {stays}", "a token, s") for stays in ("everything stays", "nothing stays")),
        ],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("page", "sentence", "sources"), SENTENCES)
def test_a_figure_in_a_sentence_equals_that_of_the_result(page, sentence, sources):
    text = " ".join((ROOT / page).read_text(encoding="utf-8").split())
    [said] = re.findall(sentence, text)

    figures = (said,) if isinstance(said, str) else said
    measured = [measured_by(*source) for source in sources]
    assert [] == [pair for pair in zip(figures, measured, strict=True) if not are_one(*pair)]


def measured_by(file: str, *keys: str) -> float:
    """Of a GPU, what is under the keys; else of a case the median of an arm's rounds, or of the best peer's."""
    found = json.loads((RESULTS / file).read_text(encoding="utf-8"))
    if file == GPU:
        return reduce(getitem, keys, found)
    case, arm = keys
    of_case = next(one for one in found["figures"] if one["case"] == case)
    peers = [median(rounds) for name, rounds in of_case["values"].items() if rounds and not name.startswith(OURS)]
    return min(peers) if arm == BEST else median({of_case["limit_name"]: of_case["limit"], **of_case["values"]}[arm])
