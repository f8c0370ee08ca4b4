"""`offload serve`: an OpenAI-compatible server over a language model on disk.

Always true:
- it listens on this machine alone, unless told
- requests share the passes through the model
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import os
import socket
import sys

from offload.cli import arguments
from offload.cli.models import (
    add_drafts,
    add_model_options,
    add_prompt_cache,
    drafts_of,
    folder_of_model,
    loaded_model,
    prompt_cache_of,
)
from offload.cli.output import say, shown
from offload.errors import ArgumentError
from offload.serving.chat import ends_of

_LOOPBACK = "127.0.0.1"
_KEY = "OFFLOAD_API_KEY"


def add_to(commands: arguments.Commands) -> None:
    """Add this command to a parser."""
    command = commands.add_parser("serve", help="serve a language model to OpenAI's clients", description=serve.__doc__)
    add_model_options(command)
    add_drafts(command)
    add_prompt_cache(command)
    command.add_argument("--name", help="what clients call the model (default: the name of its folder or file)")
    command.add_argument("--host", default=_LOOPBACK, help="address to listen at (default: %(default)s)")
    command.add_argument(
        "--port", type=arguments.port, default=8000, help="to listen at; 0 for a free one (default: %(default)s)"
    )
    command.add_argument(
        "--api-key",
        metavar="KEY",
        help=f"that clients must have; others on this machine see a command line, and not {_KEY} (default: ${_KEY})",
    )
    command.add_argument(
        "--allow-origin",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="of pages in browsers that may ask, such as https://chat.example.org (default: none)",
    )
    command.add_argument(
        "--max-new-tokens",
        type=arguments.count,
        default=1024,
        metavar="N",
        help="per answer, where a request does not say (default: %(default)s)",
    )
    command.add_argument(
        "--in-flight",
        type=arguments.count,
        metavar="K",
        help="answers that share one reading of the model (default: as many as fit in memory, up to 64)",
    )
    command.add_argument(
        "--queue", type=arguments.count, default=256, metavar="N", help="answers that may wait (default: %(default)s)"
    )
    command.add_argument(
        "--grace",
        type=arguments.count,
        default=30,
        metavar="SECONDS",
        help="that answers in progress have after SIGTERM (default: %(default)s)",
    )
    command.set_defaults(run=serve)


def serve(options: argparse.Namespace) -> None:
    """Serve a language model on disk at /v1/chat/completions and /v1/completions, as OpenAI's servers do.

    Requests share the passes: each reads the model once for all answers in progress. SIGTERM or Ctrl-C ends the server.
    """
    if missing := [name for name in ("starlette", "uvicorn") if importlib.util.find_spec(name) is None]:
        raise ArgumentError(f"{missing[0]} is missing: install the package with its extra 'serve'")
    from offload.serving.server import listening

    form = logging.Formatter("%(asctime)s %(message)s")
    with listening(options.host, options.port) as at, shown("offload.serving", logging.INFO, form):
        _serve(options, at)


def _serve(options: argparse.Namespace, at: socket.socket) -> None:
    from offload.checkpoints.companions import tokenizer_in
    from offload.serving.answering import Answering
    from offload.serving.app import App
    from offload.serving.chat import Prompts
    from offload.serving.engine import Engine
    from offload.serving.server import is_loopback, serve

    folder, names = folder_of_model(options), _names(options.model, options.name)
    model = loaded_model(folder, options)
    if model.config.is_encoder_decoder:
        raise ArgumentError(f"{folder} has an encoder of its own for prompts: use offload generate or offload batch")
    prompt_cache = prompt_cache_of(options)
    tokenizer = tokenizer_in(folder, trust_remote_code=options.trust_remote_code)
    ends = ends_of(model, folder)
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    drafts = {} if options.assistant is None else drafts_of(model, tokenizer, options)
    answer = Answering(model, tokenizer, ends, prompt_cache, drafts)
    engine = Engine(model, answer, in_flight=options.in_flight, most_waiting=options.queue)
    host, port = at.getsockname()[:2]
    app = App(
        engine,
        Prompts(tokenizer, longest, options.max_new_tokens),
        names,
        key=options.api_key or os.environ.get(_KEY) or None,
        origins=options.allow_origin,
        hosts=[options.host.lower(), "localhost", _LOOPBACK, "[::1]"] if is_loopback(options.host) else [],
    )
    address = f"[{host}]" if ":" in host else host

    def ready() -> None:
        say(f"offload: the model {names[0]!r} at http://{address}:{port}/v1", file=sys.stderr)

    serve(app, engine, at, grace=options.grace, ready=ready)


def _names(model: str, name: str | None) -> list[str]:
    """What clients may call the model, first what the server calls it: the given name, that of the path, the path."""
    of_path = [os.path.basename(os.path.abspath(model))] if os.path.exists(model) else []
    return list(dict.fromkeys([*([name] if name else []), *of_path, model]))
