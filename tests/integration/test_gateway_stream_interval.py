"""`stream_interval`: how often an answer's text is asked of our own service, and where it must come token by token."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from gateway import settings
from headgate.shared.errors import ConfigError
from inference.protocol import H_STREAM_INTERVAL
from tests.rigs.fake_inference import FakeInference
from tests.rigs.gateway_rig import CONFIG, Gateway

TEAM = "key-of-a-team"
HASH = hashlib.sha256(TEAM.encode()).hexdigest()


@pytest.mark.parametrize(
    ("said", "asked"), [("", "16"), ("stream_interval: 40ms\n", "40"), ("stream_interval: 0\n", None)]
)
async def test_a_stream_is_asked_for_in_pieces_of_so_much_time(
    tmp_path: Path, fake: FakeInference, said: str, asked: str | None
) -> None:
    async with Gateway(tmp_path, fake.url, f"{CONFIG}\n{said}") as gateway:
        assert (await gateway.chat(stream=True)).status_code == 200
    assert fake.seen[-1].headers.get(H_STREAM_INTERVAL) == asked


async def test_an_answer_that_nobody_reads_as_it_comes_is_asked_for_in_larger_pieces(
    tmp_path: Path, fake: FakeInference
) -> None:
    async with Gateway(tmp_path, fake.url, CONFIG) as gateway:
        assert (await gateway.chat()).status_code == 200
    assert fake.seen[-1].headers[H_STREAM_INTERVAL] == "250"


@pytest.mark.parametrize(("limits", "asked"), [("tokens_per_minute: 100000", None), ("requests_per_minute: 9", "16")])
async def test_answers_whose_pieces_are_charged_come_token_by_token(
    tmp_path: Path, fake: FakeInference, limits: str, asked: str | None
) -> None:
    """One that is cut is charged what came of it, and a piece is taken for a token."""
    config = f"{CONFIG}\nkeys:\n  - {{name: team, hash: 'sha256:{HASH}', limits: {{{limits}}}}}\n"
    async with Gateway(tmp_path, fake.url, config) as gateway:
        for stream in (True, False):
            answer = await gateway.chat(stream=stream, headers={"authorization": f"Bearer {TEAM}"})
            assert answer.status_code == 200
    assert fake.seen[-2].headers.get(H_STREAM_INTERVAL) == asked
    assert fake.seen[-1].headers.get(H_STREAM_INTERVAL) == (asked and "250")


async def test_waiting_for_more_is_never_taken_for_silence(tmp_path: Path, fake: FakeInference) -> None:
    config = f"{CONFIG}\nstream_interval: 1s\ndeadlines: {{inter_token: 200ms}}\n"
    async with Gateway(tmp_path, fake.url, config) as gateway:
        for stream in (True, False):
            assert (await gateway.chat(stream=stream)).status_code == 200
            assert fake.seen[-1].headers[H_STREAM_INTERVAL] == "50"


@pytest.mark.parametrize("said", ["never", "2s", "-1"])
def test_an_interval_that_would_stop_a_stream_is_refused(tmp_path: Path, said: str) -> None:
    (tmp_path / "gateway.yaml").write_text(f"stream_interval: {said}\n")
    with pytest.raises(ConfigError, match="stream_interval"):
        settings.load(tmp_path, {})
