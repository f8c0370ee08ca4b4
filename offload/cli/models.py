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
from offload.cli.output import counted, doing, hide_bars_off_a_terminal, print_json
from offload.errors import ArgumentError, CheckpointError, OffloadError, visible_lines
from offload.generation.chat import ONE_ANSWER, ONLY_TOKENS, Prompt, Prompts, ends_of, in_chat, stops_of
from offload.system.reasons import first_line

if TYPE_CHECKING:
    from offload.generation.answering import Answering
    from offload.recording import Recording

_MODES = ("greedy_search", "sample")  # that take drafts
# What transformers raises for settings that it can't follow.
_OF_SETTINGS = (TypeError, AttributeError, LookupError, ArithmeticError, ImportError, AssertionError, RuntimeError)
_LOOKED_UP = 63  # most tokens of a draft from the text


def prompt_cache_of(options: argparse.Namespace) -> Kwargs:
    """Options for `generate`."""
    from offload.generation import PromptCache

    if options.prompt_cache is None:
        return {}
    return {"prompt_cache": PromptCache(options.prompt_cache, max_disk=options.prompt_cache_size)}


def generate(options: argparse.Namespace) -> None:
    """Print what a language model on disk answers, token by token; then, on standard error, its speed.

    A model with a chat template answers the prompt as a message of a chat. Others, and all with --raw, continue it.
    """
    folder = folder_of_model(options)
    with doing("importing transformers"):
        import torch

        from offload.checkpoints.companions import tokenizer_in
        from offload.generation.answering import Job, Streamer
        from offload.generation.text import Text
        from offload.memory import anonymous_bytes
        from offload.recording import Recording

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


def opened(options: argparse.Namespace, most: int) -> tuple[Any, Answering, Prompts]:
    """The model on disk, what answers with it, and what makes prompts of requests.

    Args:
        most: tokens of an answer whose request does not say.

    Raises:
        CheckpointError: as `loaded_model`.
    """
    from offload.checkpoints.companions import tokenizer_in
    from offload.generation.answering import Answering

    folder = folder_of_model(options)
    prompt_cache, model = prompt_cache_of(options), loaded_model(folder, options)
    tokenizer = tokenizer_in(folder, trust_remote_code=options.trust_remote_code)
    drafts = drafts_of(model, tokenizer, options) if getattr(options, "assistant", None) else {}
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    prompts = Prompts(tokenizer, longest, most)
    return model, Answering(model, tokenizer, ends_of(model, folder), prompt_cache, drafts), prompts


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
        streams, picked = read_by_a_pass(model)
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
