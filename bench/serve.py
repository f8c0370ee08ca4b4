"""`offload serve`, asked by many clients at once, of a model three times its budget; and by clients that are no good.

Always true:
- the server is a process of its own, and the clients speak HTTP to it
- every client's answer has the same number of tokens, so that each pass has as many answers as there are clients

`python -m bench.serve --seconds 300` is the mixed load: clients that stream, that vanish, that send garbage, bodies of
10 MB and half of a request. It says how many of each there were, the server's memory, and what its log has of errors.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from bench.limits import MIB
from bench.models import bytes_of_a_pass
from bench.page_cache import files_in, make_cold
from bench.peers import OURS
from bench.rounds import Figure
from bench.scale import FULL, TOY, Scale

_FACTOR = 3.0  # size of the model relative to the budget
_JSON = {"Content-Type": "application/json"}
_HEAD = (
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
)


@dataclass
class Served:
    """A server.

    Attributes:
        address: of it.
        process: that it is.
        log: what it says on standard error.
    """

    address: tuple[str, int]
    process: subprocess.Popen[str]
    log: list[str] = field(default_factory=list)

    def asked(self, body: bytes, seconds: float = 300) -> http.client.HTTPResponse:
        """The response to a request for text, whose body is not read yet."""
        connection = http.client.HTTPConnection(*self.address, timeout=seconds)
        connection.request("POST", "/v1/completions", body, _JSON)
        return connection.getresponse()

    def metrics(self) -> dict[str, float]:
        """Its figures."""
        connection = http.client.HTTPConnection(*self.address, timeout=300)
        connection.request("GET", "/metrics")
        lines = connection.getresponse().read().decode().splitlines()
        connection.close()
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}

    def memory(self) -> int:
        """Bytes that are its own."""
        info = psutil.Process(self.process.pid).memory_full_info()
        return int(info.uss)


@contextmanager
def served(folder: Path, scratch: Path, *options: str) -> Iterator[Served]:
    """A server over a checkpoint, to which a tokenizer is added."""
    with tempfile.TemporaryDirectory(dir=scratch) as made:
        place = with_tokenizer(folder, Path(made) / "model")
        command = [sys.executable, "-m", "offload", "serve", str(place), "--port", "0", *options]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, encoding="utf-8")
        server = Served(("", 0), process)
        try:
            assert process.stderr
            for line in process.stderr:
                server.log.append(line)
                if " at http://" in line:
                    host, port = line.split(" at http://")[1].split("/")[0].split(":")
                    server.address = host, int(port)
                    break
            else:
                raise RuntimeError("".join(server.log[-3:]))
            threading.Thread(target=lambda: server.log.extend(process.stderr or ()), daemon=True).start()
            yield server
        finally:
            process.terminate()
            process.wait()


def with_tokenizer(folder: Path, place: Path) -> Path:
    """A folder that refers to a checkpoint's files, with a tokenizer of words `w0`, `w1`... for it."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    place.mkdir()
    for path in folder.iterdir():
        (place / path.name).symlink_to(path)
    size = json.loads((folder / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(size)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(place)
    return place


@dataclass(frozen=True)
class Answered:
    """Seconds until the first token of an answer, and until its end; its tokens, and why it ended."""

    first: float
    last: float
    tokens: int
    reason: str


def streamed(server: Served, prompt: list[int], tokens: int) -> Answered:
    """One answer, read event by event."""
    start = time.perf_counter()
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": tokens, "temperature": 0}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    response = server.asked(json.dumps(body).encode())
    if response.status != 200:
        raise RuntimeError(response.read().decode())
    first, counted, reason = 0.0, 0, ""
    for line in response:
        if line.startswith(b"data: {"):
            first = first or time.perf_counter() - start
            event = json.loads(line[6:])
            counted = (event.get("usage") or {}).get("completion_tokens", counted)
            reason = "".join(choice["finish_reason"] or "" for choice in event["choices"]) or reason
    return Answered(first, time.perf_counter() - start, counted, reason)


def figures(scale: Scale, scratch: Path) -> list[Figure]:
    """For several numbers of clients: seconds and bytes read per token, and the time to the first token."""
    folder = scale.model()
    size = bytes_of_a_pass(folder)
    budget = max(int(size / _FACTOR), MIB)
    counts, tokens = ((1, 2), 4) if scale.name == TOY.name else ((1, 4, 16, 64), 16)
    found = []
    make_cold(files_in(folder))
    with served(folder, scratch, "--max-memory", str(budget)) as server:
        streamed(server, [1, 2, 3], 2)  # what is done once
        for count in counts:
            found += _of_clients(server, count, tokens, max(size - budget, 0), scale.rounds)
    return found


def _of_clients(server: Served, count: int, tokens: int, least: int, rounds: int) -> list[Figure]:
    rates, reads, firsts = [], [], []
    for number in range(rounds):
        before, start = server.metrics(), time.perf_counter()
        with ThreadPoolExecutor(count) as clients:
            prompts = [[1 + number, 2 + client, *range(3, 30)] for client in range(count)]
            done = [*clients.map(lambda prompt: streamed(server, prompt, tokens), prompts)]
        seconds, after = time.perf_counter() - start, server.metrics()
        generated = sum(one.tokens for one in done)
        rates.append(seconds / generated)
        reads.append((after["offload_read_bytes_total"] - before["offload_read_bytes_total"]) / generated)
        firsts.append(median(one.first for one in done))
    case = f"serve, {count} client{'s' * (count > 1)}, {tokens} tokens each"
    limit = [least / count] * rounds
    return [
        Figure(f"{case}: a token", "s", {OURS: rates}, [], "", {}),
        Figure(f"{case}: bytes read, a token", "B", {OURS: reads}, limit, "model - budget, for all clients", {}),
        Figure(f"{case}: the first token", "s", {OURS: firsts}, [], "", {}),
    ]


# Clients that are no good


def _whole(server: Served, chance: random.Random) -> str:
    tokens = chance.randrange(1, 12)
    done = streamed(server, [chance.randrange(1, 90) for _ in range(chance.randrange(1, 20))], tokens)
    return "whole" if done.tokens == tokens or done.reason == "stop" else f"short by {tokens - done.tokens}"


def _vanishes(server: Served, chance: random.Random) -> str:
    """After some bytes of a stream, or while it waits for an answer."""
    body = json.dumps({"prompt": "w1 w2", "max_tokens": 400, "stream": chance.random() < 0.7}).encode()
    with socket.create_connection(server.address, timeout=60) as made:
        made.sendall(_HEAD % len(body) + body)
        made.settimeout(chance.random())
        with suppress(TimeoutError):
            made.recv(chance.randrange(1, 2000))
    return "vanished"


def _garbage(server: Served, chance: random.Random) -> str:
    with socket.create_connection(server.address, timeout=60) as made:
        made.sendall(chance.randbytes(chance.randrange(1, 5000)))
    return "garbage"


def _half(server: Served, chance: random.Random) -> str:
    """Half of a request."""
    head = _HEAD % 500 + b"{"
    with socket.create_connection(server.address, timeout=60) as made:
        made.sendall(head[: chance.randrange(1, len(head) + 1)])
        time.sleep(chance.random())
    return "half of a request"


def _refused(server: Served, chance: random.Random) -> str:
    """A body that is no request: JSON that means nothing, or 10 MB."""
    bodies = [b"{", b"[]", b'{"prompt": 3}', b'{"prompt": "w1", "n": 99}', b'{"prompt": "%b"}' % (b"w1 " * 3_400_000)]
    response = server.asked(chance.choice(bodies))
    response.read()
    return f"refused with {response.status}"


_CLIENTS: list[Callable[[Served, random.Random], str]] = [_whole, _whole, _vanishes, _garbage, _half, _refused]


def mixed(server: Served, seconds: float, clients: int) -> tuple[Counter[str], list[int]]:
    """What became of each request, and the server's memory, second by second."""
    done: Counter[str] = Counter()
    memory: list[int] = []
    end = time.monotonic() + seconds

    def client(number: int) -> None:
        chance = random.Random(number)
        while time.monotonic() < end:
            try:
                done[chance.choice(_CLIENTS)(server, chance)] += 1
            except (OSError, http.client.HTTPException, RuntimeError) as error:
                done[f"failed: {type(error).__name__}: {str(error)[:80]}"] += 1

    threads = [threading.Thread(target=client, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    while time.monotonic() < end:
        memory.append(server.memory())
        time.sleep(1)
    for thread in threads:
        thread.join()
    return done, memory


def main() -> int:
    """1 if the log has a traceback, if an answer is not whole, or if SIGTERM in the middle did not end the server."""
    options = argparse.ArgumentParser(description="Serve a model to clients that are no good.")
    options.add_argument("--seconds", type=float, default=300)
    options.add_argument("--clients", type=int, default=12)
    options.add_argument("--quick", action="store_true", help="with a tiny model")
    chosen = options.parse_args()
    scale = TOY if chosen.quick else FULL
    folder = scale.model()
    budget = max(int(bytes_of_a_pass(folder) / _FACTOR), MIB)
    with tempfile.TemporaryDirectory() as scratch:
        with served(folder, Path(scratch), "--max-memory", str(budget), "--grace", "1") as server:
            done, memory = mixed(server, chosen.seconds, chosen.clients)
            figures = server.metrics()
            late: list[Any] = []
            asking = threading.Thread(target=lambda: late.append(streamed(server, [1, 2], 1500)))
            asking.start()
            while not server.metrics()["offload_running"]:
                time.sleep(0.01)
            os.kill(server.process.pid, signal.SIGTERM)
            code = server.process.wait(120)
            asking.join()
        tracebacks = sum("Traceback" in line for line in server.log)
    for what, count in done.most_common():
        print(f"{count:8,} {what}")
    for name, value in figures.items():
        print(f"{name} {value:,.6g}")
    fifth = max(len(memory) // 5, 1)
    print(
        f"memory: {median(memory[fifth : 2 * fifth or None]) / MIB:.1f} MiB in the second fifth of the time, ", end=""
    )
    print(f"{median(memory[-fifth:]) / MIB:.1f} MiB in the last; peak {max(memory) / MIB:.1f}")
    print(f"{tracebacks} tracebacks in {len(server.log)} lines of the log; ", end="")
    print(f"SIGTERM: exit {code}, the answer had {late[0].tokens} tokens")
    return int(bool(tracebacks or code or any(what.startswith(("short", "failed")) for what in done)))


if __name__ == "__main__":
    sys.exit(main())
