"""`offload generate` and `offload chat`: language models on disk.

Always true:
- a token is printed as soon as it is generated
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offload.annotations import Json, Kwargs
from offload.cli.output import console, counted, doing, print_json, say
from offload.errors import ArgumentError, CheckpointError, OffloadError, visible_lines
from offload.generation.bodies import Asked, Refused
from offload.generation.chat import ONE_ANSWER, Prompt, Prompts, ends_of
from offload.system.reasons import first_line

if TYPE_CHECKING:
    from offload.generation.answering import Answering, Job
    from offload.recording import Recording

_MODES = ("greedy_search", "sample")  # that take drafts
# What transformers raises for settings that it can't follow.
_OF_SETTINGS = (TypeError, AttributeError, LookupError, ArithmeticError, ImportError, AssertionError, RuntimeError)
_LOOKED_UP = 63  # most tokens of a draft from the text


def generate(options: argparse.Namespace) -> None:
    """Print what a language model on disk answers, token by token; then, on standard error, its speed.

    A model with a chat template answers the prompt as a message of a chat. Others, and all with --raw, continue it.
    """
    _, answering, prompts = opened(options, options.max_new_tokens, is_alone=True)
    try:
        [prompt] = prompts.of(_asked(prompts, options))
    except Refused as error:
        way_out = ": --raw continues it as it is" if error.param == "messages" else ""
        raise ArgumentError(f"{error}{way_out}") from error
    pieces: list[str] = []
    job, recording = _answered(answering, prompt, {"temperature": 0}, options, pieces)
    figures = _figures(recording, job)
    if options.json:
        print_json({"text": "".join(pieces), "tokens": job.tokens, **figures})
    else:
        print()
        console(stderr=True).print(_in_words(len(job.tokens), figures))


def _asked(prompts: Prompts, options: argparse.Namespace) -> Asked:
    if not options.raw and prompts.tokenizer.chat_template:
        roles = {"system": options.system, "user": options.prompt}
        return _in_chat([{"role": role, "content": text} for role, text in roles.items() if text is not None])
    if options.system is not None:
        raise ArgumentError("--system is for a model with a chat template, without --raw: put it into the prompt")
    return Asked(None, [options.prompt])


def chat(options: argparse.Namespace) -> None:
    """Talk with a language model on disk: a line is a message. Ctrl-C ends an answer, Ctrl-D the conversation.

    Keys and values of what was said are kept until the end; with --prompt-cache, for later conversations, too.
    """
    messages: list[Json] = [] if options.system is None else [{"role": "system", "content": options.system}]
    with tempfile.TemporaryDirectory(prefix="offload-chat-") as scratch:
        is_asked = options.prompt_cache is not None
        options.prompt_cache = options.prompt_cache or Path(scratch)
        _, answering, prompts = opened(options, options.max_new_tokens, is_alone=True)
        if not prompts.tokenizer.chat_template:
            raise CheckpointError(f"{options.model} has no chat template: offload generate continues a text")
        for line in _lines():
            messages.append({"role": "user", "content": line})
            pieces: list[str] = []
            try:
                [prompt] = prompts.of(_in_chat(messages))
                try:
                    job, recording = _answered(answering, prompt, {}, options, pieces)
                except ArgumentError:
                    if is_asked:
                        raise
                    answering.more.clear()  # keys and values of some models can't be kept
                    job, recording = _answered(answering, prompt, {}, options, pieces)
            except KeyboardInterrupt:
                print()
            except Refused as error:  # what was said has become too long
                say(f"offload: {error}", file=sys.stderr)
                messages.pop()
                continue
            else:
                print(flush=True)
                console(stderr=True).print(_in_words(len(job.tokens), _figures(recording, job)))
            messages.append({"role": "assistant", "content": "".join(pieces)})


def _in_chat(messages: list[Json]) -> Asked:
    return Asked(messages)


def _lines() -> Iterator[str]:
    if sys.stdin.isatty():
        with suppress(ImportError):
            import readline  # noqa: F401  (with it, lines can be edited)
    with suppress(EOFError):
        while True:
            line = input("> " if sys.stdin.isatty() else "")
            if line.strip():
                yield line


def _answered(
    answering: Answering, prompt: Prompt, usual: Json, options: argparse.Namespace, pieces: list[str]
) -> tuple[Job, Recording]:
    """Print an answer as it comes, unless it is wanted as JSON, and append its text to `pieces`.

    `usual` says how tokens are chosen where the command does not: nothing for as the model's settings say. Raises
    `CheckpointError` if these can't be followed.
    """
    import torch

    from offload.generation.answering import Job
    from offload.recording import Recording

    given = {name: getattr(options, name) for name in ("temperature", "top_p", "seed")}
    chosen = {name: value for name, value in given.items() if value is not None}
    with Recording().running() as recording, doing("reading the prompt") as begun, torch.inference_mode():

        def tell(piece: Any) -> None:
            begun()
            for _ in range(piece.tokens):
                recording.mark()
            pieces.append(piece.text)
            if not getattr(options, "json", False):
                show(piece.text)

        how = {**({} if "top_p" in chosen else usual), **chosen}
        if how.get("temperature") == 0:
            how.pop("seed", None)  # nothing is drawn
        job = Job(prompt, tell, how)
        try:
            answering(job)
        except (OffloadError, torch.OutOfMemoryError):
            raise
        except _OF_SETTINGS as error:
            raise CheckpointError(
                f"{options.model} can't generate, perhaps because of its generation_config.json: {first_line(error)}"
            ) from error
    return job, recording


def _figures(recording: Recording, job: Job) -> dict[str, float | None]:
    """Figures for the first token, and means for the others: with drafts, several come at once."""
    first, last, others = recording.marks[0], recording.marks[-1], len(recording.marks) - 1
    return {
        "first_token_seconds": first.second,
        "token_seconds": (last.second - first.second) / others if others else None,
        "first_token_read_bytes": first.read,
        "token_read_bytes": (last.read - first.read) / others if others else None,
        "waited_seconds": recording.end.waited,
        "tokens_per_pass": len(job.tokens) / job.passes if job.is_drafted else None,
        "anonymous_bytes": recording.peak,
    }


def _in_words(tokens: int, figures: dict[str, Any]) -> str:
    from rich.filesize import decimal

    memory = f"{decimal(figures['anonymous_bytes'])} of memory at the peak, with Python and its libraries"
    if figures["token_seconds"] is None:
        return f"{counted(tokens, 'token')} in {figures['first_token_seconds']:.3g} s, {memory}"
    read = decimal(int(figures["token_read_bytes"]))
    rate = f"{1 / figures['token_seconds']:.3g} tokens/s"
    per_pass = figures["tokens_per_pass"]
    drafts = "" if per_pass is None else f"{per_pass:.2f} tokens per pass with drafts, "
    return f"{counted(tokens, 'token')}: {rate}, {drafts}{read} read per token, {memory}"


def folder_of_model(options: argparse.Namespace) -> Path:
    """The folder of the named model; one from the hub is downloaded."""
    from offload.integrations.hub import folder_of

    return folder_of(options.model, revision=options.revision) if options.revision else folder_of(options.model)


def loaded_model(folder: Path, options: argparse.Namespace) -> Any:
    """The model, on disk; raises `CheckpointError` if it does not continue text, and as `offload.from_pretrained`."""
    with doing("opening the model"):
        from offload.integrations.transformers import from_pretrained, writes_text
        from offload.models.device_map import ON_DISK
        from offload.transformers_api import disable_progress_bar

        disable_progress_bar()  # for loading weights: it would overwrite the line above, and no weight is loaded
        device_map = ON_DISK if options.device is None else f"{ON_DISK}:{options.device}"
        names = ("dtype", "trust_remote_code")
        chosen = {name: getattr(options, name) for name in names}
        model = from_pretrained(folder, device_map=device_map, max_memory=_budgets(options), **chosen)
        if not writes_text(model):
            raise CheckpointError(
                f"{folder} is a {type(model).__name__}, which does not continue text: run it in Python, with "
                f"offload.from_pretrained({str(folder)!r})"
            )
        return model


def opened(options: argparse.Namespace, most: int, *, is_alone: bool = False) -> tuple[Any, Answering, Prompts]:
    """The model on disk, what answers with it, and what makes prompts, with `most` tokens if a request does not say."""
    from offload.checkpoints.companions import tokenizer_in
    from offload.generation import PromptCache
    from offload.generation.answering import Answering

    folder, more = folder_of_model(options), Kwargs()
    if options.prompt_cache is not None:
        more["prompt_cache"] = PromptCache(options.prompt_cache, max_disk=options.prompt_cache_size)
    model = loaded_model(folder, options)
    tokenizer = tokenizer_in(folder, trust_remote_code=options.trust_remote_code)
    drafts = drafts_of(model, tokenizer, options) if is_alone or getattr(options, "assistant", None) else {}
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    prompts = Prompts(tokenizer, longest, most)
    return model, Answering(model, tokenizer, ends_of(model), more, drafts), prompts


def _budgets(options: argparse.Namespace) -> Any:
    """How much may stay where, as `from_pretrained` is told; `ArgumentError` if there is no accelerator."""
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
    """What `generate` is told about drafts: from an assistant, or from the text if a pass reads from the disk."""
    from offload.budget import is_read_by_each_pass

    settings = copy(model.generation_config)
    settings.update(**ONE_ANSWER)
    takes_back = not (model._is_stateful or model.config.is_encoder_decoder)
    takes_drafts = takes_back and settings.get_generation_mode() in _MODES
    if options.assistant is None:
        is_wanted = takes_drafts and is_read_by_each_pass(model)
        return {"prompt_lookup_num_tokens": _LOOKED_UP} if is_wanted else {}
    if not takes_drafts:
        raise CheckpointError(f"{options.model} can't take back what it has computed, so leave out --assistant")
    folder = folder_of_model(argparse.Namespace(model=options.assistant, revision=None))
    chosen = {**vars(options), **dict.fromkeys(("dtype", "max_memory", "device_memory"))}
    assistant = loaded_model(folder, argparse.Namespace(**chosen))
    if assistant.config.get_text_config().vocab_size == model.config.get_text_config().vocab_size:
        return {"assistant_model": assistant}
    from offload.checkpoints.companions import tokenizer_in

    others = tokenizer_in(folder, trust_remote_code=options.trust_remote_code)
    return {"assistant_model": assistant, "tokenizer": tokenizer, "assistant_tokenizer": others}


def show(text: str) -> None:
    """Print a piece of an answer; control characters are visible on a terminal."""
    print(visible_lines(text) if sys.stdout.isatty() else text, end="", flush=True)
