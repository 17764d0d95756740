"""A throttled worker computes fewer sequences at once, drops retained prefixes, and gives the same answers."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from inference import worker_link
from inference.worker.answers.generation import Output
from tests.rigs import tiny_gguf
from tests.rigs.engine_rig import EngineRig, engine_rig
from tests.rigs.processes import wait_until
from tests.rigs.worker_rig import WorkerRig, grant_for

PROMPTS = [[5 + number, 6, 7, 8] for number in range(4)]
LONG = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 300, "ignore_eos": True}


def max_at_once(rig: EngineRig) -> int:
    """The largest number of sequences with a slot until all requests end."""
    most = 0
    while rig.engine._iterate():
        most = max(most, rig.engine._scheduler.active)
    return most


def text_of(outputs: list[Output]) -> str:
    assert outputs[-1].finish
    return "".join(output.text for output in outputs)


def test_limit_delays_waiting_requests_and_can_be_lifted() -> None:
    with engine_rig(tiny_gguf.generative()) as rig:
        alone = [text_of(rig.answer(prompt)) for prompt in PROMPTS]
        rig.engine.limit(1)
        held_back = [rig.ask(prompt) for prompt in PROMPTS]
        assert max_at_once(rig) == 1
        assert [text_of(rig.outputs(ticket)) for ticket in held_back] == alone
        rig.engine.limit(4)
        for prompt in PROMPTS:
            rig.ask(prompt)
        assert max_at_once(rig) == 4


def test_running_request_keeps_its_slot_when_the_limit_is_lowered() -> None:
    with engine_rig(tiny_gguf.generative()) as rig:
        tickets = [rig.ask(prompt) for prompt in PROMPTS]
        rig.engine._iterate()
        assert rig.engine._scheduler.active == 4
        rig.engine.limit(2)
        late = rig.ask([9, 9, 9])
        rig.engine._iterate()
        assert rig.engine._scheduler.active == 4
        rig.run()
        assert all(rig.outputs(ticket)[-1].finish for ticket in [*tickets, late])


def test_retained_prefixes_are_dropped_and_running_sequences_are_not() -> None:
    with engine_rig(tiny_gguf.generative()) as rig:
        prompt = list(range(5, 45))
        alone = text_of(rig.answer(PROMPTS[0]))
        rig.answer(prompt)
        assert rig.answer(prompt)[-1].cached > 0
        running = rig.ask(PROMPTS[0])
        while not rig.outputs(running):
            rig.engine._iterate()
        assert not rig.outputs(running)[-1].finish
        rig.engine.forget()
        rig.engine._run_commands()
        assert [slot.taken for slot in rig.engine._scheduler.slots.held()] == [True]
        assert rig.answer(prompt)[-1].cached == 0
        assert text_of(rig.outputs(running)) == alone


def test_worker_applies_limits_from_its_link(tmp_path: Path) -> None:
    with WorkerRig(tmp_path, grant_for(tiny_gguf.slow())) as rig:
        rig.ready()
        rig.send(worker_link.Limit(1))
        rig.fresh_beat()
        results: list[Any] = []
        seen = threading.Event()

        def ask() -> None:
            """One request after the other: an answer may end before the next heartbeat."""
            while not seen.is_set():
                results.append(rig.post("/v1/chat/completions", LONG)[0])

        threads = [threading.Thread(target=ask) for _ in range(3)]
        for thread in threads:
            thread.start()
        wait_until("one request runs", lambda: (beat := rig.fresh_beat()).active == 1 and beat.queued == 2)
        rig.send(worker_link.Limit(4))
        wait_until("all requests run", lambda: rig.fresh_beat().active == 3)
        seen.set()
        for thread in threads:
            thread.join(60)
        assert len(results) >= 3
        assert set(results) == {200}
        short = {**LONG, "max_tokens": 1}

        def cached() -> int:
            usage = rig.post("/v1/chat/completions", short)[1]["usage"]
            return int(usage["prompt_tokens_details"]["cached_tokens"])

        assert cached() > 0
        rig.send(worker_link.Forget())
        rig.fresh_beat()
        assert cached() == 0


def test_pooling_model_ignores_limits(tmp_path: Path) -> None:
    with WorkerRig(tmp_path, grant_for(tiny_gguf.embedding())) as rig:
        rig.ready()
        rig.send(worker_link.Limit(1))
        rig.send(worker_link.Forget())
        rig.fresh_beat()
        assert rig.post("/v1/embeddings", {"input": "x"})[0] == 200
