"""Output of the command line on a terminal of 80 columns, and in a pipe."""

from __future__ import annotations

import argparse
import os
import pty
import re
import shutil
import subprocess
import sys
import termios
from collections.abc import Iterator

import pytest
import torch
from safetensors.torch import save_file

from offload.cli.main import parser
from tests.processes import run_script
from tests.serving.servers import tiny_tokenizer

NAME = "model.layers.10.block_sparse_moe.experts.7.down_projection_of_the_feed_forward_part.weight"


def _parsers(one: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield one
    for action in one._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _parsers(command)


COMMANDS = [pytest.param(one, id=one.prog) for one in _parsers(parser())]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_fits_into_80_columns_describes_each_argument_and_names_defaults(command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    told = [action for action in command._actions if not isinstance(action, argparse._SubParsersAction)]
    takes_a_value = [action for action in command._actions if action.option_strings and action.nargs != 0]
    optional = [action for action in takes_a_value if not action.required]

    lines = command.format_help().splitlines()

    assert len(lines) <= 40 or command.prog.endswith(("chat", "batch", "serve"))
    assert [] == [line for line in lines if len(line) > 80]
    assert [] == [action.dest for action in told if not action.help]
    assert [] == [action.dest for action in optional if "default: " not in (action.help or "")]


def test_a_table_fits_into_a_terminal(tmp_path):
    """A name wider than the terminal continues on the next line."""
    save_file({NAME: torch.zeros(2, 3)}, tmp_path / "model.safetensors")

    lines = _lines(_sent_to_a_terminal(_command("inspect", str(tmp_path))))

    assert [] == [line for line in lines if len(line) > 80]
    first_words = [line.split()[0] for line in lines if line.strip()]
    assert NAME in "".join(word for word in first_words if word in NAME)


def test_an_error_on_a_terminal_is_printed_whole(tmp_path):
    missing = str(tmp_path / NAME)

    assert missing in "".join(_lines(_sent_to_a_terminal(_command("inspect", missing))))


def test_a_table_in_a_pipe_has_one_line_per_row_and_nothing_else(tmp_path):
    """No escapes, and no word on what is imported."""
    save_file({NAME: torch.zeros(2, 3)}, tmp_path / "model.safetensors")
    command, environment = _command("inspect", str(tmp_path)), {**os.environ, "TERM": "xterm"}

    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)

    assert "" == done.stderr
    assert "\x1b" not in done.stdout
    assert "importing" not in done.stdout
    row = f"{NAME} float32 [2, 3] 24 bytes model.safetensors".split()
    assert [row] == [line.split() for line in done.stdout.splitlines() if NAME in line]


def test_a_program_that_imports_offload_prints_nothing_on_a_terminal():
    assert "" == _sent_to_a_terminal([sys.executable, "-c", "import offload"])


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["plan", "--help"], ["plan"]], ids=" ".join)
def test_a_line_is_read_without_torch(words):
    """As the installed command calls it."""
    script = """
        import sys

        sys.argv[0] = "/usr/bin/offload"
        from offload.cli import main
        try:
            main()
        except SystemExit as end:
            print(end.code, [name for name in ("torch", "transformers", "rich") if name in sys.modules])
    """
    expected = 2 if words == ["plan"] else 0

    said = run_script(script, *words, fresh=True)

    assert said.endswith(f"{expected} []\n")
    assert ("offload 0." in said) == (words == ["--version"])


def test_a_program_with_the_name_of_the_command_has_the_package():
    script = """
        import sys

        sys.argv[0] = "tools/offload"
        import offload
        print("torch" in sys.modules, hasattr(offload, "nothing"), offload.OffloadedTensor.__name__)
        print(offload.offloading.__name__, offload.budget.__name__)
    """

    assert "False False OffloadedTensor\noffloading offload.budget\n" == run_script(script, fresh=True)


@pytest.mark.parametrize(
    ("name", "policy", "expected"), [("offload", "", "3000"), ("offload", "active", "None"), ("train", "", "None")]
)
def test_threads_of_the_command_wait_for_one_another_for_a_short_time(name, policy, expected):
    """Unless the user says how; other programs decide that themselves."""
    script = f"""
        import os, sys

        sys.argv[0] = "/usr/bin/{name}"
        import offload
        offload.ON_DISK, print(os.environ.get("GOMP_SPINCOUNT"))
    """
    environment = {key: value for key, value in os.environ.items() if key != "GOMP_SPINCOUNT"}

    said = run_script(script, env=environment | ({"OMP_WAIT_POLICY": policy} if policy else {}), fresh=True)

    assert f"{expected}\n" == said


def test_opening_a_model_leaves_no_progress_bars_on_a_terminal(llama_folder, tmp_path):
    tiny_tokenizer().save_pretrained(shutil.copytree(llama_folder, tmp_path / "model"))
    command = _command("generate", str(tmp_path / "model"), "--prompt", "w1", "--max-new-tokens", "2")

    said = "\n".join(_lines(_sent_to_a_terminal(command)))

    assert "2 tokens: " in said
    assert "Loading weights" not in said


def _command(*words: str) -> list[str]:
    return [sys.executable, "-m", "offload", *words]


def _lines(said: str) -> list[str]:
    """What was sent, without colours."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", said).replace("\r", "").splitlines()


def _sent_to_a_terminal(command: list[str]) -> str:
    """Everything that a command sends to a terminal of 80 columns, including cursor movements."""
    leader, follower = pty.openpty()
    termios.tcsetwinsize(follower, (24, 80))
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "NO_COLOR")}
    environment["TERM"] = "xterm"
    with subprocess.Popen(command, stdin=follower, stdout=follower, stderr=follower, env=environment):
        os.close(follower)
        said = b"".join(_read(leader))
    os.close(leader)
    return said.decode()


def _read(leader: int) -> Iterator[bytes]:
    """Read until the terminal's other end is closed, which Linux reports as EIO."""
    while True:
        try:
            yield os.read(leader, 4096)
        except OSError:
            return
