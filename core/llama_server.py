"""A llama.cpp server for a GGUF file, out of the package `xllamacpp` (pip; no build, no download beside it).

    python -m core.llama_server checkpoints/demo/export/gguf/MODEL.gguf --port 8080

speaks OpenAI's protocol at http://127.0.0.1:8080/v1 with the chat template inside the GGUF. `llama_server` is the same for
a `with` block: a process of its own, which ends with the block, or with the process that opened it.
"""

import argparse
import contextlib
import importlib.util
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from core.config import UserError, run_step

NUM_CTX = 4096  # where nothing else is said
INSTALL = "pip install -r requirements.txt (it names xllamacpp)"


@dataclass(frozen=True)
class LlamaServer:
    url: str  # of the server; OpenAI's protocol is under url/v1
    seconds: float  # until it answered


def installed() -> bool:
    return importlib.util.find_spec("xllamacpp") is not None


@contextlib.contextmanager
def llama_server(gguf: Path, num_ctx: int = NUM_CTX, threads: int = 1) -> Iterator[LlamaServer]:
    """`threads` is 1 because ggml waits in a loop for its threads: two on a busy core are slower than one."""
    import multiprocessing

    _check(gguf)
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    with tempfile.NamedTemporaryFile(prefix="llama-server-", suffix=".log") as log:
        began = time.perf_counter()
        process = spawn.Process(target=_child, args=(there, log.name, str(gguf), num_ctx, threads), daemon=True)
        process.start()
        there.close()
        try:
            try:
                url = here.recv()
            except EOFError:
                lines = Path(log.name).read_text(encoding="utf-8", errors="replace").splitlines()
                said = [line for line in lines if "rror" in line] or lines
                raise UserError("\n  ".join([f"llama.cpp does not load {gguf}:", *said[-4:]])) from None
            yield LlamaServer(url, time.perf_counter() - began)
        finally:
            here.close()
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()


def _check(gguf: str | Path) -> None:
    if not Path(gguf).is_file():
        raise UserError(f"no file '{gguf}'. Make it: python step6_export.py --config R --formats gguf-q8_0")
    if not installed():
        raise UserError(f"xllamacpp is not installed: {INSTALL}")


def _child(pipe, log: str, gguf: str, num_ctx: int, threads: int) -> None:
    with open(log, "ab") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    server = _start(gguf, num_ctx, threads)
    pipe.send(server.listening_address)
    with contextlib.suppress(EOFError, OSError):
        pipe.recv()  # nothing is ever sent: it ends when the other side is closed, or dead
    os._exit(0)


def _start(gguf: str, num_ctx: int, threads: int, host: str = "127.0.0.1", port: int = 0):
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = gguf
    params.n_ctx, params.n_parallel = num_ctx, 1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.hostnames, params.port = [host], port
    params.use_jinja = True
    params.ui = False
    return xllamacpp.Server(params)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gguf")
    parser.add_argument("--host", default="127.0.0.1", help="0.0.0.0: reachable from other machines")
    parser.add_argument("--port", type=int, default=8080)
    parser.add_argument("--num_ctx", type=int, default=NUM_CTX, help="tokens of the longest conversation")
    parser.add_argument("--threads", type=int, default=max(1, (os.cpu_count() or 2) - 1), help="CPU threads")
    args = parser.parse_args()
    _check(args.gguf)
    try:
        server = _start(args.gguf, args.num_ctx, args.threads, args.host, args.port)
    except RuntimeError as error:
        raise UserError(f"llama.cpp does not load {args.gguf} ({error}); the lines above say why") from error
    print(f"serving {args.gguf} at {server.listening_address}/v1; Ctrl-C ends it", flush=True)
    while True:
        time.sleep(3600)


if __name__ == "__main__":
    run_step(main)
