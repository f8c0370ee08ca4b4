"""`offload generate`: language models on disk.

Always true:
- a token is printed as soon as it is generated
"""

from __future__ import annotations

import argparse
import sys
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offload.annotations import Kwargs
from offload.cli import arguments
from offload.cli.output import allow_json, counted, doing, hide_bars_off_a_terminal, print_json
from offload.errors import ArgumentError, CheckpointError, OffloadError, visible_lines
from offload.serving.chat import ONE_ANSWER, ONLY_TOKENS, Prompt, ends_of, in_chat, stops_of
from offload.storage.reasons import first_line

if TYPE_CHECKING:
    from offload.recording import Recording

_MODES = ("greedy_search", "sample")  # that take drafts
# What transformers raises for settings that it can't follow.
_OF_SETTINGS = (TypeError, AttributeError, LookupError, ArithmeticError, ImportError, AssertionError, RuntimeError)
_LOOKED_UP = 63  # most tokens of a draft from the text


def add_to(commands: arguments.Commands) -> None:
    """Add this command to a parser."""
    command = commands.add_parser("generate", help="run a language model from disk", description=generate.__doc__)
    command.usage = "%(prog)s [options] --prompt PROMPT model"
    add_model_options(command)
    command.add_argument(
        "--prompt", type=arguments.prompt, required=True, help="a message to the model, or text that it continues"
    )
    command.add_argument(
        "--system", type=arguments.prompt, metavar="TEXT", help="instructions before the message (default: none)"
    )
    command.add_argument(
        "--raw",
        action="store_true",
        help="continue the prompt as it is (default: a model with a chat template answers it as a message)",
    )
    command.add_argument(
        "--max-new-tokens", type=arguments.count, default=64, metavar="N", help="at most (default: %(default)s)"
    )
    add_prompt_cache(command)
    command.add_argument("--sample", action="store_true", help="sample (default: take the most likely token)")
    add_drafts(command)
    allow_json(command)
    command.set_defaults(run=generate)


def add_model_options(command: argparse.ArgumentParser) -> None:
    """Add the options for the model and where it goes."""
    add_model(command)
    command.add_argument(
        "--device",
        type=arguments.device,
        help="cpu, cuda, cuda:1... (default: an accelerator, if any)",
    )
    command.add_argument(
        "--dtype",
        type=arguments.dtype,
        help="of the weights, converted as they are read: bfloat16, float16, float32... (default: as configured)",
    )
    add_max_memory(command)
    command.add_argument(
        "--device-memory",
        type=arguments.size,
        metavar="SIZE",
        help="the same, on an accelerator: 20GiB (default: nothing)",
    )
    command.add_argument(
        "--offload-dir",
        type=arguments.path,
        metavar="FOLDER",
        help="for weights that change (default: a temporary one)",
    )
    command.add_argument(
        "--store",
        action="store_true",
        help="write weights that have to be decoded or joined to --offload-dir once, for later runs (default: never)",
    )
    add_revision(command)
    add_trust(command)


def add_drafts(command: argparse.ArgumentParser) -> None:
    """Add the options for drafts."""
    about = "a smaller model that drafts tokens (default: none)"
    arguments.complete(command.add_argument("--assistant", metavar="SMALL", help=about), folders=True)
    command.add_argument(
        "--draft",
        type=_draft,
        default="auto",
        metavar="N",
        help="tokens of a draft (default: auto, as many as pay)",
    )


def _draft(text: str) -> int | None:
    """A number of tokens; None for what follows from the cost of a pass."""
    return None if text == "auto" else 0 if text == "0" else arguments.count(text)


def add_model(command: argparse.ArgumentParser) -> None:
    """Add the argument that names a model."""
    about = "a folder with a checkpoint, a GGUF file, or a model on the hub"
    arguments.complete(command.add_argument("model", help=about), folders=True)


def add_max_memory(command: argparse.ArgumentParser) -> None:
    """Add the option for how much of a model stays in memory."""
    command.add_argument(
        "--max-memory",
        type=arguments.size,
        metavar="SIZE",
        help="how much of the weights may stay in memory: 8GiB (default: as much as is available)",
    )


def add_prompt_cache(command: argparse.ArgumentParser) -> None:
    """Add the options for keys and values that are kept."""
    command.add_argument(
        "--prompt-cache",
        type=arguments.path,
        metavar="DIR",
        help="keep keys and values of prompts there, for later ones that begin alike (default: keep none)",
    )
    command.add_argument(
        "--prompt-cache-size",
        type=arguments.size,
        default="10GiB",
        metavar="SIZE",
        help="how much that may take (default: %(default)s)",
    )


def prompt_cache_of(options: argparse.Namespace) -> Kwargs:
    """Options for `generate`."""
    from offload.prompts import PromptCache

    if options.prompt_cache is None:
        return {}
    return {"prompt_cache": PromptCache(options.prompt_cache, max_disk=options.prompt_cache_size)}


def add_revision(command: argparse.ArgumentParser) -> None:
    """Add the option for the revision of a model on the hub."""
    command.add_argument("--revision", help="branch, tag or commit on the hub (default: main)")


def add_trust(command: argparse.ArgumentParser) -> None:
    """Add the option that lets a model's own code run."""
    command.add_argument(
        "--trust-remote-code",
        action="store_true",
        help="run code that comes with the model, which can do whatever you can (default: refuse such a model)",
    )


def generate(options: argparse.Namespace) -> None:
    """Print what a language model on disk answers, token by token; then, on standard error, its speed.

    A model with a chat template answers the prompt as a message of a chat. Others, and all with --raw, continue it.
    """
    folder = folder_of_model(options)
    with doing("importing transformers"):
        import torch

        from offload.checkpoints.companions import tokenizer_in
        from offload.memory import anonymous_bytes
        from offload.recording import Recording
        from offload.serving.answering import Job, Streamer
        from offload.serving.text import Text

        tokenizer = tokenizer_in(folder, trust_remote_code=options.trust_remote_code)
    inputs = _inputs(tokenizer, options)
    if inputs["input_ids"].numel() == 0:
        raise ArgumentError(f"the prompt {options.prompt!r} has no tokens for this model: give some text")
    before = anonymous_bytes()
    prompt_cache = prompt_cache_of(options)
    model = loaded_model(folder, options)
    ends = ends_of(model, folder)
    drafts = drafts_of(model, tokenizer, options)
    inputs = inputs.to(model.device)
    pieces: list[str] = []
    with Recording().running() as recording, doing("reading the prompt") as begun, torch.inference_mode():

        def tell(piece: Any) -> None:
            begun()
            for _ in range(piece.tokens):
                recording.mark()
            pieces.append(piece.text)
            if not options.json:
                show(piece.text)

        text = Text(tokenizer, stops_of(model), ends)
        streamer = Streamer(Job(Prompt([], options.max_new_tokens), tell), text)
        try:
            model.generate(
                **inputs,
                **ONE_ANSWER,
                **prompt_cache,
                **drafts,
                max_new_tokens=options.max_new_tokens,
                do_sample=options.sample,
                streamer=streamer,
                stopping_criteria=[streamer.stops],
            )
        except (OffloadError, torch.OutOfMemoryError):
            raise
        except _OF_SETTINGS as error:
            raise CheckpointError(
                f"{folder} can't generate, perhaps because of its generation_config.json: {first_line(error)}"
            ) from error
        streamer.finish()
    per_pass = len(text.tokens) / streamer.passes if drafts else None
    figures = {**_figures(recording), "tokens_per_pass": per_pass, "anonymous_bytes": recording.peak - before}
    if options.json:
        print_json({"text": "".join(pieces), "tokens": text.tokens, **figures})
    else:
        print()
        print(_in_words(len(recording.marks), figures), file=sys.stderr)


def _inputs(tokenizer: Any, options: argparse.Namespace) -> Any:
    """The prompt in tokens: as a message, if there is a chat template for it."""
    if options.raw or not tokenizer.chat_template:
        if options.system is not None:
            raise ArgumentError("--system is for a model with a chat template, without --raw: put it into the prompt")
        return tokenizer(options.prompt, return_tensors="pt", **ONLY_TOKENS)
    roles = {"system": options.system, "user": options.prompt}
    messages = [{"role": role, "content": text} for role, text in roles.items() if text is not None]
    try:
        text = in_chat(tokenizer, messages, {"add_generation_prompt": True})
        return tokenizer(text, add_special_tokens=False, return_tensors="pt", **ONLY_TOKENS)
    except Exception as error:  # chat templates can raise anything
        raise ArgumentError(
            f"the model's chat template rejects the prompt ({first_line(error)}): --raw continues it as it is"
        ) from error


def _figures(recording: Recording) -> dict[str, float | None]:
    """Figures for the first token, and means for the others: with drafts, several come at once."""
    first, last, others = recording.marks[0], recording.marks[-1], len(recording.marks) - 1
    return {
        "first_token_seconds": first.second,
        "token_seconds": (last.second - first.second) / others if others else None,
        "first_token_read_bytes": first.read,
        "token_read_bytes": (last.read - first.read) / others if others else None,
        "waited_seconds": recording.samples[-1].waited,
    }


def _in_words(tokens: int, figures: dict[str, Any]) -> str:
    """A line about the speed."""
    from rich.filesize import decimal

    peak = f"{decimal(max(figures['anonymous_bytes'], 0))} of memory at the peak"
    if figures["token_seconds"] is None:
        return f"{counted(tokens, 'token')} in {figures['first_token_seconds']:.3g} s, {peak}"
    read = decimal(int(figures["token_read_bytes"]))
    rate = f"{1 / figures['token_seconds']:.3g} tokens/s"
    per_pass = "" if figures["tokens_per_pass"] is None else f"{figures['tokens_per_pass']:.3g} tokens per pass, "
    return f"{counted(tokens, 'token')}: {rate}, {per_pass}{read} read per token, {peak}"


def folder_of_model(options: argparse.Namespace) -> Path:
    """The folder of the named model; one from the hub is downloaded."""
    from offload.integrations.hub import folder_of

    hide_bars_off_a_terminal()
    return folder_of(options.model, revision=options.revision) if options.revision else folder_of(options.model)


def loaded_model(folder: Path, options: argparse.Namespace) -> Any:
    """The model, on disk.

    Raises:
        CheckpointError: it does not continue text, and as `offload.from_pretrained`.
    """
    with doing("opening the model"):
        from offload.integrations.transformers import from_pretrained, writes_text
        from offload.models.device_map import ON_DISK
        from offload.transformers_api import disable_progress_bar

        disable_progress_bar()  # for loading weights: it would overwrite the line above, and no weight is loaded
        device_map = ON_DISK if options.device is None else f"{ON_DISK}:{options.device}"
        names = ("dtype", "offload_dir", "store", "trust_remote_code")
        chosen = {name: getattr(options, name) for name in names}
        model = from_pretrained(folder, device_map=device_map, max_memory=_budgets(options), **chosen)
        if not writes_text(model):
            raise CheckpointError(
                f"{folder} is a {type(model).__name__}, which does not continue text: run it in Python, with "
                f"offload.from_pretrained({str(folder)!r})"
            )
        return model


def _budgets(options: argparse.Namespace) -> Any:
    """How much may stay where, as `from_pretrained` is told.

    Raises:
        ArgumentError: there is no accelerator to keep something on.
    """
    from offload.models.device_map import existing
    from offload.torch_api import usable_accelerator

    if options.device_memory is None:
        return options.max_memory
    device = existing(options.device or usable_accelerator() or "cpu")
    if device.type == "cpu":
        raise ArgumentError("--device-memory: the model runs on the CPU; --max-memory is for main memory")
    main = {} if options.max_memory is None else {"cpu": options.max_memory}
    return {**main, str(device): options.device_memory}


def drafts_of(model: Any, tokenizer: Any, options: argparse.Namespace) -> dict[str, Any]:
    """What `generate` is told about drafts: from an assistant, or from the text if a pass reads from the disk.

    Raises:
        CheckpointError: as `loaded_model`, of the assistant; or the model takes no drafts.
    """
    from offload.budget import read_by_a_pass

    if options.draft == 0:
        return {}
    settings = copy(model.generation_config)
    settings.update(**ONE_ANSWER)
    takes_back = not (model._is_stateful or model.config.is_encoder_decoder)
    takes_drafts = takes_back and settings.get_generation_mode() in _MODES
    if options.assistant is None:
        streams, picked, _ = read_by_a_pass(model)
        is_wanted = options.draft is not None or streams + picked > 0
        return {"prompt_lookup_num_tokens": options.draft or _LOOKED_UP} if is_wanted and takes_drafts else {}
    if not takes_drafts:
        raise CheckpointError(f"{options.model} can't take back what it has computed, so leave out --assistant")
    folder = folder_of_model(argparse.Namespace(model=options.assistant, revision=None))
    nothing = dict.fromkeys(("dtype", "max_memory", "device_memory", "offload_dir"))
    chosen = {**vars(options), **nothing, "store": False}
    assistant = loaded_model(folder, argparse.Namespace(**chosen))
    if options.draft is not None:
        said = assistant.generation_config
        said.num_assistant_tokens, said.assistant_confidence_threshold = options.draft, 0.0
    if assistant.config.get_text_config().vocab_size == model.config.get_text_config().vocab_size:
        return {"assistant_model": assistant}
    from offload.checkpoints.companions import tokenizer_in

    others = tokenizer_in(folder, trust_remote_code=options.trust_remote_code)
    return {"assistant_model": assistant, "tokenizer": tokenizer, "assistant_tokenizer": others}


def show(text: str) -> None:
    """Print a piece of an answer; control characters are visible on a terminal."""
    print(visible_lines(text) if sys.stdout.isatty() else text, end="", flush=True)
