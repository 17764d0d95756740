"""The part `decode` of `gpu-check`: a worker beside a loop that only computes and takes the best token.

The loop shows the tokens per second that llama.cpp and the device reach without a server. It runs in a process of its
own, `python -m benchmarks.gpu_decode GRANT`, which prints a JSON list with one rate for each number of streams.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks.client import run
from benchmarks.engine import Prompts, body
from benchmarks.gpu_bytes import MEASURED
from benchmarks.gpu_table import Row
from benchmarks.gpu_target import Target
from benchmarks.models import SHAPES, one_token_words, path_of
from benchmarks.samples import PROMPT_TOKENS, WORKER
from benchmarks.systems import BATCH, MODEL_ID, UBATCH, System
from inference import worker_link
from inference.devices.device import grants_of
from inference.devices.inventory import Inventory
from inference.worker import llama, steps
from inference.worker.llama import Context
from inference.worker.llama.llama_process import LogTail
from inference.worker.loading import load
from tests.rigs.worker_rig import WorkerRig

STREAMS = (1, 8, 32)
ANSWER_TOKENS = 128
WARM_UP_STEPS = 16
ROUNDS = 2
"""The faster round counts, because the first one allocates and compiles."""
CONTEXT = 512
LEAST = 0.7
"""The least share of the loop's rate."""
SECONDS = 100.0


def rows(target: Target) -> Iterator[Row]:
    """One row for each number of streams."""
    path = path_of(SHAPES[target.shape])
    inventory = Inventory.of(target.config().settings)
    with asyncio.Runner() as runner, tempfile.TemporaryDirectory(prefix="hg-gpu-") as directory:
        runner.run(inventory.start())
        try:
            device = next(one for one in inventory.accelerators() if one.kind in MEASURED)
            grant = worker_link.Grant(
                model_id=MODEL_ID, path=str(path), devices=grants_of([device]), gpu_layers=-1, context_length=CONTEXT,
                parallel=max(STREAMS), batch=BATCH, ubatch=UBATCH,
            )  # fmt: skip
            loop = loop_rates(grant, device.environment)
            served = worker_rates(grant, device.environment, Path(directory), Prompts(one_token_words(path), 7))
        finally:
            runner.run(inventory.close())
    yield from decode_rows(target.shape, served, loop)


def decode_rows(model: str, served: Sequence[float], loop: Sequence[float]) -> Iterator[Row]:
    """Tokens per second of all streams: of the worker, and of the loop."""
    for streams, ours, bare in zip(STREAMS, served, loop, strict=True):
        expected = f"{bare:.0f} in a loop, at least {LEAST} of it"
        yield Row(
            "decode",
            f"{model}, tokens/s of {streams} concurrent answers",
            f"{ours:.0f}",
            expected,
            ours >= LEAST * bare,
        )


def worker_rates(
    grant: worker_link.Grant, environment: Mapping[str, str], root: Path, prompts: Prompts
) -> Sequence[float]:
    """Tokens per second while all streams decode, for each of STREAMS."""
    found = []
    with WorkerRig(root, grant, dict(environment)) as rig:
        rig.expect(worker_link.Ready, SECONDS)
        system = System(WORKER, ("unix", rig.socket_path), rig.process.pid)
        for streams in STREAMS:
            rates = []
            for _ in range(ROUNDS):
                bodies = [body(prompts.text(PROMPT_TOKENS), ANSWER_TOKENS) for _ in range(streams)]
                times = [seen.times for seen in run(system.order(bodies)).streams]
                began, ended = max(each[0] for each in times), min(each[-1] for each in times)
                count = sum(began < at <= ended for each in times for at in each)
                rates.append(count / (ended - began))
            found.append(max(rates))
    return found


def loop_rates(grant: worker_link.Grant, environment: Mapping[str, str]) -> Sequence[float]:
    """The rates of the loop; raises SystemExit without an answer of its process."""
    command = [sys.executable, "-m", "benchmarks.gpu_decode", worker_link.encode(grant).decode()]
    try:
        done = subprocess.run(
            command, env={**os.environ, **environment}, stdout=subprocess.PIPE, timeout=SECONDS, check=True
        )
        rates: Sequence[float] = json.loads(done.stdout)
    except (subprocess.SubprocessError, ValueError) as error:
        raise SystemExit(f"the loop gave no answer ({type(error).__name__})") from None
    return rates


def loop_rate(context: Context, streams: int) -> float:
    """Tokens per second of a loop with that many sequences."""
    choose = random.Random(1)
    context.forget_all()
    for slot in range(streams):
        prompt = choose.choices(range(1000, 2000), k=PROMPT_TOKENS)
        context.decode([steps.Row(slot, slot, 0, prompt, True)])
    tokens = [1000] * streams
    began = time.perf_counter()
    for step in range(WARM_UP_STEPS + ANSWER_TOKENS):
        if step == WARM_UP_STEPS:
            began = time.perf_counter()
        batch = [steps.Row(slot, slot, PROMPT_TOKENS + step, [tokens[slot]], True) for slot in range(streams)]
        _status, last = context.decode(batch)
        tokens = [int(context.logits(index).argmax()) for index in last]
    return streams * ANSWER_TOKENS / (time.perf_counter() - began)


def main(grant: worker_link.Grant) -> None:
    """The process of the loop."""
    tail = LogTail(lambda _line: None)
    llama.start(tail)
    context = load(grant, tail, lambda _fraction: True).context
    print(json.dumps([max(loop_rate(context, streams) for _ in range(ROUNDS)) for streams in STREAMS]))


if __name__ == "__main__":
    wanted = worker_link.decode(sys.argv[1].encode())
    assert isinstance(wanted, worker_link.Grant)
    main(wanted)
