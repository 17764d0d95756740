"""Models in use at the same time share the cores; a model that is alone gets all of them again."""

from __future__ import annotations

from pathlib import Path

from inference import worker_link
from tests.rigs.authority_rig import Start
from tests.rigs.instant_workers import InstantSupervisor
from tests.rigs.tiny_gguf import generative
from tests.rigs.worker_rig import WorkerRig, grant_for


async def test_threads_are_divided_between_busy_models(start: Start) -> None:
    service = await start(
        {"a": {}, "b": {}, "fixed": {"threads": 3}}, parts={"supervisor": InstantSupervisor(), "cores": 8}
    )
    authority = service.authority
    a, b, fixed = (authority.resolve(name) for name in ("a", "b", "fixed"))
    leases = [await authority.ask(a).wait(10)]
    assert a.running.worker.threads is None, "a model that is busy alone keeps the threads of its start"
    leases.append(await authority.ask(b).wait(10))
    assert (a.running.worker.threads, b.running.worker.threads) == (4, 4)
    leases.append(await authority.ask(fixed).wait(10))
    assert fixed.running.worker.threads is None
    assert (a.running.worker.threads, b.running.worker.threads) == (3, 2)
    for lease in leases[1:]:
        lease.release()
    assert a.running.worker.threads == 3, "a neighbor that pauses for a moment changes nothing"
    await authority.reached(lambda: a.running.worker.threads == 8)
    again = await authority.ask(b).wait(10)
    assert (a.running.worker.threads, b.running.worker.threads) == (4, 4)
    again.release()
    leases[0].release()
    alone = await authority.ask(b).wait(10)
    assert b.running.worker.threads == 8, "a model that is busy alone gets its cores at once"
    alone.release()


def test_answer_does_not_change_with_the_number_of_threads(tmp_path: Path) -> None:
    ask = {"prompt": "once upon", "max_tokens": 8, "temperature": 0}
    with WorkerRig(tmp_path, grant_for(generative())) as rig:
        rig.ready()
        texts = []
        for count in (1, 2, 1):
            rig.send(worker_link.Threads(count))
            rig.fresh_beat()
            status, answer = rig.post("/v1/completions", {"model": "tiny", **ask})
            assert status == 200
            texts.append(answer["choices"][0]["text"])
        assert len(set(texts)) == 1
