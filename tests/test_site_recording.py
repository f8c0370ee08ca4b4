"""The terminal recording in the README is what `python -m bench.recording` draws from its record."""

import re
import xml.etree.ElementTree as ElementTree

import pytest
from rich.filesize import decimal

from bench.recording import COMMANDS, DRAWING, Record, drawn, read
from tests.processes import ROOT

PAGES = ["README.md", "tutorials/index.md"]


def test_the_drawing_is_made_from_the_record():
    assert drawn(read()) == DRAWING.read_text(encoding="utf-8")


def test_the_model_is_larger_than_the_memory_and_read_from_the_disk():
    record = read()
    _, last = record.screens[-1]
    shown = "".join(text for line in last for text, _ in line)

    assert record.stored > record.limit
    assert [command for command in COMMANDS if f"$ {command.format(model=record.model)}" not in shown] == []
    assert "The capital of France is Paris." in shown
    assert re.search(r"tokens: [\d.]+ tokens/s, .*[1-9][\d.]* [MG]B read per token", shown)


@pytest.mark.parametrize("page", PAGES)
def test_pages_with_the_recording_name_its_sizes(page):
    text, record = (ROOT / page).read_text(encoding="utf-8"), read()
    [about] = [part for part in text.split("\n\n") if "recording.svg" in part]

    said = " ".join(text.partition(about)[0].split("\n\n")[-2].split())
    assert f"SmolLM2-135M in float32, {decimal(record.stored).replace('.0', '')}" in said
    assert f"{decimal(record.limit).replace('.0', '')} of memory" in said


def test_a_line_is_shown_as_long_as_it_was():
    called, opening, done = [("$ offload", "")], [("opening", "")], [("<done>", "")]
    screens = [(0.0, [called]), (1.0, [called, opening]), (3.5, [called, done])]
    parts = list(ElementTree.fromstring(drawn(Record("m", 2, 1, 20, screens))).iter("{http://www.w3.org/2000/svg}text"))

    assert ["$ offload", "opening", "<done>"] == [part.text for part in parts]
    assert ["called", "passing", None] == [part.get("class") for part in parts]
    moves = ["hidden 0.0s", "shown 2.5s 1.0s", "hidden 3.5s"]
    assert moves == [part.get("style", "").removeprefix("animation:") for part in parts]
