"""A worker that is held back: fewer sequences at once, nothing retained, and nobody's answer changes by it."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from inference import worker_link
from tests.rigs import tiny_gguf
from tests.rigs.engine_rig import EngineRig, engine_rig
from tests.rigs.processes import wait_until
from tests.rigs.worker_rig import WorkerRig, grant_for

PROMPTS = [[5 + number, 6, 7, 8] for number in range(4)]
LONG = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 300, "ignore_eos": True}


def most_at_once(rig: EngineRig) -> int:
    """The largest number of sequences that hold a slot while everything runs to its end."""
    most = 0
    while rig.engine._iterate():
        most = max(most, rig.engine._scheduler.active)
    return most


def test_a_limit_holds_back_who_waits_and_is_lifted_again() -> None:
    with engine_rig(tiny_gguf.generative()) as rig:
        free = [rig.answer(prompt) for prompt in PROMPTS]
        rig.engine.limit(1)
        held_back = [rig.ask(prompt) for prompt in PROMPTS]
        assert most_at_once(rig) == 1
        assert [rig.outputs(ticket)[-1].finish for ticket in held_back] == [said[-1].finish for said in free]
        rig.engine.limit(4)
        for prompt in PROMPTS:
            rig.ask(prompt)
        assert most_at_once(rig) == 4


def test_who_has_a_slot_keeps_it_when_the_limit_falls() -> None:
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


def test_what_is_retained_is_forgotten_when_told_and_not_what_runs() -> None:
    with engine_rig(tiny_gguf.generative()) as rig:
        prompt = list(range(5, 45))
        rig.answer(prompt)
        assert rig.answer(prompt)[-1].cached > 0
        rig.engine.forget()
        running = rig.ask(PROMPTS[0])
        assert rig.answer(prompt)[-1].cached == 0
        assert rig.outputs(running)[-1].finish


def test_a_worker_does_as_the_link_says(tmp_path: Path) -> None:
    with WorkerRig(tmp_path, grant_for(tiny_gguf.slow())) as rig:
        rig.ready()
        rig.send(worker_link.Limit(1))
        rig.fresh_beat()
        said: list[Any] = []
        seen = threading.Event()

        def ask() -> None:
            """One question after the other: an answer may be over before the next beat."""
            while not seen.is_set():
                said.append(rig.post("/v1/chat/completions", LONG)[0])

        threads = [threading.Thread(target=ask) for _ in range(3)]
        for thread in threads:
            thread.start()
        wait_until("one runs", lambda: (beat := rig.fresh_beat()).active == 1 and beat.queued == 2)
        rig.send(worker_link.Limit(4))
        wait_until("all run", lambda: rig.fresh_beat().active == 3)
        seen.set()
        for thread in threads:
            thread.join(60)
        assert len(said) >= 3
        assert set(said) == {200}
        short = {**LONG, "max_tokens": 1}

        def cached() -> int:
            usage = rig.post("/v1/chat/completions", short)[1]["usage"]
            return int(usage["prompt_tokens_details"]["cached_tokens"])

        assert cached() > 0
        rig.send(worker_link.Forget())
        rig.fresh_beat()
        assert cached() == 0


def test_a_model_that_pools_is_told_and_goes_on(tmp_path: Path) -> None:
    with WorkerRig(tmp_path, grant_for(tiny_gguf.embedding())) as rig:
        rig.ready()
        rig.send(worker_link.Limit(1))
        rig.send(worker_link.Forget())
        rig.fresh_beat()
        assert rig.post("/v1/embeddings", {"input": "x"})[0] == 200
