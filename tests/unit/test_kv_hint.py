"""The header `x-headgate-kv`: its values, and its way to the jobs of a worker."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from headgate.shared.kv_hint import KvHint, parse_kv_hint
from headgate.shared.parameters import Sampling
from inference.protocol import H_KV
from inference.worker.api.worker_app import App
from inference.worker.engine.engine_work import Work
from inference.worker.worker_errors import UnloadedError
from tests.rigs.asgi import ask
from tests.unit.test_worker_priority import BODIES, TellingEngine, apps

PATH = "/v1/completions"


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("keep", KvHint("keep")),
        (" Drop ", KvHint("drop")),
        ("pin:60s", KvHint("pin", 60.0)),
        ("pin: 5m", KvHint("pin", 300.0)),
        ("pin:250ms", KvHint("pin", 0.25)),
        ("PIN:1h", KvHint("pin", 3600.0)),
        ("pin:90", KvHint("pin", 90.0)),
    ],
)
def test_hint_is_read(text: str, hint: KvHint) -> None:
    assert parse_kv_hint(text) == hint


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must be keep, drop or pin with a duration"),
        ("forever", "it is 'forever'"),
        ("keep:60s", "must be keep, drop or pin"),
        ("pin", "for example pin:60s"),
        ("pin:", "for example pin:60s"),
        ("pin:soon", "for example pin:60s"),
        ("pin:-1s", "for example pin:60s"),
        ("pin:0s", "more than 0 s and at most 60m"),
        ("pin:61m", "more than 0 s and at most 60m"),
        ("pin:never", "more than 0 s and at most 60m"),
    ],
)
def test_invalid_hint_is_refused_with_what_is_allowed(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_kv_hint(text)


def test_every_job_of_a_request_carries_its_hint() -> None:
    work = Work(([1, 2], [3]), 2, Sampling(), 1, kv=KvHint("drop"))
    assert {job.kv for job in work.jobs([1, 2, 3, 4], 0.0)} == {KvHint("drop")}
    assert [job.kv for job in Work(([1],), 1, Sampling(), 1).jobs([1], 0.0)] == [None]


async def ask_with(app: App, hint: str | None) -> int:
    return (await ask(app, "POST", PATH, BODIES[PATH], more={} if hint is None else {H_KV: hint})).status


async def test_worker_passes_the_hint_to_its_engine() -> None:
    with ThreadPoolExecutor(1) as executor:
        app, engine = apps(executor, PATH)
        assert isinstance(engine, TellingEngine)
        engine.start()
        for sent, hint in (("pin:2m", KvHint("pin", 120.0)), (None, None)):
            assert await ask_with(app, sent) == 200
            assert engine.work.kv == hint
        assert await ask_with(app, "always") == 400
    assert engine.stop(UnloadedError())
