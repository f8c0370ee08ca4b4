"""HTTP: what may be asked for, by whom, and how much of it.

Always true:
- a body is bounded in size and time before it is looked at; templates and tokenizers run in threads, a few at a time
- a client that goes away cancels its answers; one that does not read is left after a while
- errors have OpenAI's form, and no client's text makes a traceback
- keys are compared in constant time; browsers' pages of other origins get nothing
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TypeAlias

import anyio.to_thread
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.responses import Response as Reply
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from offload.annotations import Json
from offload.errors import OffloadError, visible
from offload.generation.answering import AnswerPart, End, Job
from offload.generation.bodies import INVALID, Asked, Refused, chat_body, error_body, object_in, text_body
from offload.generation.chat import Prompts
from offload.serving.engine import ServingEngine, exposition
from offload.serving.responses import Response
from offload.system.reasons import first_line

Items: TypeAlias = "asyncio.Queue[tuple[int, AnswerPart | End] | None]"

_MOST_BYTES = 4 << 20  # of a body
_DRAINED = 64 << 20  # bytes of a larger one that are read, so that its client reads the refusal
_PATIENCE = 30.0  # seconds for a body to arrive, and for a client to read a piece
_AT_ONCE = 4  # prompts that are made ready at a time
_log = logging.getLogger("offload.serving")
_access = logging.getLogger("offload.serving.access")


class _Gone(OffloadError, ConnectionError):
    """The client has gone away."""


class App:
    """The application: an ASGI callable."""

    def __init__(
        self,
        engine: ServingEngine,
        prompts: Prompts,
        names: Sequence[str],
        *,
        key: str | None = None,
        hosts: Sequence[str] = (),
    ) -> None:
        """Clients have the `key`, if any, and call the server by one of `hosts`."""
        self._engine, self._prompts, self._names = engine, prompts, names
        self._key, self._hosts = key, hosts
        self._since = int(time.time())
        self._limiter: anyio.CapacityLimiter | None = None
        routes = [
            Route("/v1/chat/completions", partial(self._complete, chat_body), methods=["POST"]),
            Route("/v1/completions", partial(self._complete, text_body), methods=["POST"]),
            Route("/v1/models", self._models),
            Route("/health", self._health),
            Route("/metrics", self._metrics),
        ]
        handlers = {Refused: _refusal, HTTPException: _unknown}
        self._routes = Starlette(routes=routes, middleware=[Middleware(self._guarded)], exception_handlers=handlers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, and log it. There are no others than those of HTTP: see `server.serve`."""
        begun, status = time.monotonic(), 0

        async def logged_send(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            async with asyncio.timeout(_PATIENCE):
                await send(message)

        try:
            await self._routes(scope, receive, logged_send)
        except (_Gone, TimeoutError):
            status = status or 499  # as nginx says it
        finally:
            client = (scope.get("client") or ("-",))[0]
            seconds = time.monotonic() - begun
            path = visible(scope["path"])[:200]
            _access.info('%s "%s %s" %d %.3f s', client, visible(scope["method"]), path, status, seconds)

    def _guarded(self, inner: ASGIApp) -> ASGIApp:
        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            await (self._refuse(scope) or inner)(scope, receive, send)

        return answer

    def _refuse(self, scope: Scope) -> Reply | None:
        headers = {name.lower(): value for name, value in scope["headers"]}
        if self._hosts:
            host = headers.get(b"host", b"").decode("latin-1").lower()
            name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
            if name not in self._hosts:
                return _json(error_body("this server has another name", INVALID), 421)
        if self._key is not None and scope["path"] != "/health":
            scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
            if scheme.lower() != b"bearer" or not hmac.compare_digest(given.strip(b" "), self._key.encode()):
                body = error_body("the API key is missing or wrong", INVALID, "invalid_api_key")
                return _json(body, 401)
        return None

    async def _models(self, _request: Request) -> Reply:
        mine = {"id": self._names[0], "object": "model", "created": self._since, "owned_by": "offload"}
        return _json({"object": "list", "data": [mine]})

    async def _health(self, _request: Request) -> Reply:
        return _json({"status": "ok"}) if self._engine.is_well else _json({"status": "ending"}, 503)

    async def _metrics(self, _request: Request) -> Reply:
        text = await anyio.to_thread.run_sync(exposition, self._engine)
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")

    async def _complete(self, parsed: Callable[[Json, Sequence[str]], Asked], request: Request) -> Reply:
        if not request.headers.get("content-type", "").split(";")[0].strip().lower().endswith("json"):
            raise Refused("the content-type is not application/json", 415)
        asked = parsed(object_in(await _body(request)), self._names)
        if len(asked.prompts) > (most := self._engine.most_waiting):
            raise Refused(f"a request has at most {most} prompts, and this one {len(asked.prompts)}")
        if self._limiter is None:
            self._limiter = anyio.CapacityLimiter(_AT_ONCE)
        prompts = await anyio.to_thread.run_sync(self._prompts.of, asked, limiter=self._limiter)
        items: Items = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def tell(index: int, item: AnswerPart | End) -> None:
            if isinstance(item, AnswerPart):
                self._engine.count_tokens(item)
            with suppress(RuntimeError):  # the loop is closed: the server has ended
                loop.call_soon_threadsafe(items.put_nowait, (index, item))

        jobs = [
            Job(prompt, partial(tell, index), asked.options, asked.top, asked.echo)
            for index, prompt in enumerate(prompts)
        ]
        self._engine.submit(jobs)
        response = Response(
            self._names[0],
            self._prompts.tokenizer,
            [prompt.text for prompt in prompts],
            sum(len(prompt.tokens) for prompt in prompts),
            is_chat=asked.messages is not None,
            scored=asked.top is not None,
        )
        return _Answer(response, asked, jobs, items)


class _Answer(Reply):
    def __init__(self, response: Response, asked: Asked, jobs: Sequence[Job], items: Items) -> None:
        super().__init__()
        self._response, self._asked, self._jobs, self._items = response, asked, jobs, items

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watcher = asyncio.create_task(self._watch(receive))
        try:
            if self._asked.streams:
                await self._stream(send)
            else:
                await (await self._whole())(scope, receive, send)
        finally:
            watcher.cancel()
            for job in self._jobs:
                job.is_cancelled = True

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._items.put_nowait(None)

    async def _next(self) -> tuple[int, AnswerPart] | None:
        """The next piece, None once all answers have ended; raises `_Gone`, and `Refused` if one has failed."""
        while any(choice.reason is None for choice in self._response.choices):
            item = await self._items.get()
            if item is None:
                raise _Gone
            index, part = item
            choice = self._response.choices[index]
            if isinstance(part, AnswerPart):
                choice.add(part)
                return index, part
            if part.error is not None:
                raise _failure(part.error)
            choice.reason = part.reason
            return index, AnswerPart("")
        return None

    async def _whole(self) -> Reply:
        try:
            while await self._next():
                pass
        except Refused as error:
            return _json(error.body(), error.status)
        return _json(self._response.whole())

    async def _stream(self, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})

        async def event(data: Json) -> None:
            body = data if isinstance(data, str) else json.dumps(data, ensure_ascii=True)
            await send({"type": "http.response.body", "body": f"data: {body}\n\n".encode(), "more_body": True})

        response = self._response
        try:
            for data in response.first():
                await event(data)
            while (part := await self._next()) is not None:
                index, piece = part
                if piece.text or piece.scores:
                    await event(response.piece(index, piece))
                elif response.choices[index].reason is not None:
                    await event(response.last(index))
            if self._asked.with_usage:
                await event(response.counted())
        except Refused as error:
            await event(error.body())
        await event("[DONE]")
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _body(request: Request) -> bytes:
    """The body of a request; raises `Refused` if it is too large, or does not come."""
    parts, size = [], 0
    try:
        async with asyncio.timeout(_PATIENCE):
            while True:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise _Gone
                part = message.get("body", b"")
                size += len(part)
                if size <= _MOST_BYTES:
                    parts.append(part)
                if not message.get("more_body") or size > _DRAINED:
                    break
    except TimeoutError as error:
        raise Refused(f"the body did not come within {_PATIENCE:.0f} s", 408) from error
    if size > _MOST_BYTES:
        raise Refused(f"the body has more than {_MOST_BYTES:,} bytes", 413, code="request_too_large")
    return b"".join(parts)


def _failure(error: Exception) -> Refused:
    if isinstance(error, Refused):
        return error
    _log.error("an answer failed: %s: %s", type(error).__name__, visible(first_line(error)))
    return Refused(f"the model failed: {first_line(error)}", 500, "server_error")


def _json(body: Json, status: int = 200) -> Reply:
    """A reply; lone surrogates of a text are escaped."""
    return Reply(json.dumps(body, ensure_ascii=True), status, media_type="application/json")


async def _refusal(_request: Request, error: Exception) -> Reply:
    assert isinstance(error, Refused)
    reply = _json(error.body(), error.status)
    if error.status == 429:
        reply.headers["retry-after"] = "1"
    if error.status in (408, 413):
        reply.headers["connection"] = "close"
    return reply


async def _unknown(request: Request, error: Exception) -> Reply:
    status = error.status_code if isinstance(error, HTTPException) else 500
    what = f"{request.method} {request.url.path}"[:200]
    return _json(error_body(f"there is no {what} here", INVALID), status)
