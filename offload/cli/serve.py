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

from offload.cli.models import opened
from offload.cli.output import say, shown
from offload.errors import ArgumentError

LOOPBACK = "127.0.0.1"
KEY = "OFFLOAD_API_KEY"


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
    from offload.serving.app import App
    from offload.serving.engine import ServingEngine
    from offload.serving.server import is_loopback, serve

    names = _names(options.model, options.name)
    model, answer, prompts = opened(options, options.max_new_tokens)
    if model.config.is_encoder_decoder:
        raise ArgumentError(
            f"{options.model} has an encoder of its own for prompts: use offload generate or offload batch"
        )
    engine = ServingEngine(model, answer, in_flight=options.in_flight, most_waiting=options.queue)
    host, port = at.getsockname()[:2]
    key = options.api_key or os.environ.get(KEY) or None
    hosts = [options.host.lower(), "localhost", LOOPBACK, "[::1]"] if is_loopback(options.host) else []
    app = App(engine, prompts, names, key=key, hosts=hosts)
    address = f"[{host}]" if ":" in host else host

    def ready() -> None:
        say(f"offload: the model {names[0]!r} at http://{address}:{port}/v1", file=sys.stderr)

    serve(app, engine, at, grace=options.grace, ready=ready)


def _names(model: str, name: str | None) -> list[str]:
    """What clients may call the model, first what the server calls it: the given name, that of the path, the path."""
    of_path = [os.path.basename(os.path.abspath(model))] if os.path.exists(model) else []
    return list(dict.fromkeys([*([name] if name else []), *of_path, model]))
