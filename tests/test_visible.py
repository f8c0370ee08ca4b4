"""Control characters in names from files are visible: in errors, in reports, and in what commands print."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import offload
from offload import OffloadedTensor, TensorCache, errors
from offload.cli.main import main
from offload.errors import OffloadError, visible, visible_lines

NAME = "w\x1b]0;PWNED\x07\x1b[2J\x9b1m\x7f\u202e\r"
SHOWN = r"w\x1b]0;PWNED\x07\x1b[2J\x9b1m\x7f\u202e\r"


def is_plain(text: str) -> bool:
    return visible_lines(text) == text


def test_visible_text_has_no_control_characters_and_keeps_all_others():
    every = "".join(map(chr, range(0x110000)))
    controls = {character for character in every if visible(character) != character}

    assert SHOWN == visible(NAME)
    assert {chr(code) for code in [*range(32), *range(127, 160)]} <= controls
    assert not controls & set("\u200c\u200dé漢😀 \\\"'")
    assert visible(visible(NAME)) == visible(NAME)
    assert "a\n\tb" == visible_lines("a\n\tb")


@pytest.mark.parametrize(
    "kind", [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, OffloadError)]
)
def test_every_error_shows_control_characters_escaped(kind):
    texts = [str(kind(f"tensor {NAME}: bad"))]
    if issubclass(kind, OSError):
        texts.append(str(kind(5, f"tensor {NAME}: bad", f"/folder/{NAME}")))

    assert "tensor " + SHOWN + ": bad" == texts[0]
    assert all(map(is_plain, texts))
    assert all(SHOWN in text for text in texts)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    save_file({NAME: torch.ones(2), f"{NAME}2": torch.ones(3)}, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


READING: dict[str, Callable[[Path], object]] = {
    "no such tensor": lambda file: OffloadedTensor.from_file(file, "x"),
    "one of several": lambda file: OffloadedTensor.from_file(file),
    "another model": lambda file: offload.load_checkpoint_and_dispatch(nn.Linear(2, 1, device="meta"), file),
    "strict": lambda file: offload.load_checkpoint_and_dispatch(nn.Linear(2, 1, device="meta"), file, strict=True),
    "lengths": TensorCache.from_disk,
}


@pytest.mark.parametrize("case", READING)
def test_errors_about_a_file_show_control_characters_escaped(case, file):
    with pytest.raises(OffloadError) as raised:
        READING[case](file)

    assert is_plain(str(raised.value))


def test_reports_their_log_and_caches_show_control_characters_escaped(file, caplog):
    save_file({NAME: torch.ones(2), "weight": torch.ones(1, 2), "bias": torch.ones(1)}, file)
    report = offload.load_checkpoint_in_model(nn.Linear(2, 1, device="meta"), file)
    with TensorCache.create(file.parent / "cache", {NAME: (torch.float32, ())}, 2) as cache:
        texts = [str(report), repr(cache)]

    assert all(SHOWN in text and is_plain(text) for text in texts)
    assert [] == [record for record in caplog.records if not is_plain(record.getMessage())]


COMMANDS: dict[str, list[str]] = {
    "inspect": ["inspect", "model.safetensors"],
    "inspect --json": ["inspect", "--json", "model.safetensors"],
    "verify": ["verify", "broken"],
    "verify --json": ["verify", "--json", "broken"],
    "cache": ["cache", "cache"],
    "an error": ["inspect", "broken"],
    "an error --json": ["cache", "--json", "broken"],
    "plan": ["plan", "broken"],
    "a log": ["convert", "-vv", "model.safetensors", "new"],
}


@pytest.mark.parametrize("case", COMMANDS)
def test_commands_show_control_characters_escaped(case, file, capfd, monkeypatch):
    monkeypatch.chdir(file.parent)
    with TensorCache.create("cache", {NAME: (torch.float32, ())}, 2, metadata={NAME: NAME}) as cache:
        cache[:] = {NAME: torch.ones(2)}
    index = {"metadata": {}, "weight_map": {NAME: f"{NAME}.safetensors"}}
    Path("broken").mkdir()
    Path("broken/model.safetensors.index.json").write_text(json.dumps(index))
    main(COMMANDS[case])

    out, err = capfd.readouterr()
    assert out or err
    assert is_plain(out + err)


def test_a_model_whose_text_has_them_does_not_move_the_cursor(capsys, monkeypatch):
    from offload.cli.models import show

    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    show(NAME + "\n")

    assert SHOWN in capsys.readouterr().out
