"""`stream_interval`: how often the local service sends text, and when it sends every token."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from gateway import settings_loading
from headgate.shared.errors import ConfigError
from inference.protocol import H_STREAM_INTERVAL
from tests.rigs.fake_inference import FakeInference
from tests.rigs.gateway_rig import CONFIG, Gateway

TEAM = "key-of-a-team"
HASH = hashlib.sha256(TEAM.encode()).hexdigest()


@pytest.mark.parametrize(
    ("setting", "interval"), [("", "16"), ("stream_interval: 40ms\n", "40"), ("stream_interval: 0\n", None)]
)
async def test_stream_interval_is_sent_to_the_service(
    tmp_path: Path, fake: FakeInference, setting: str, interval: str | None
) -> None:
    async with Gateway(tmp_path, fake.url, f"{CONFIG}\n{setting}") as gateway:
        assert (await gateway.chat(stream=True)).status_code == 200
    assert fake.seen[-1].headers.get(H_STREAM_INTERVAL) == interval


async def test_whole_answers_use_a_longer_stream_interval(tmp_path: Path, fake: FakeInference) -> None:
    async with Gateway(tmp_path, fake.url, CONFIG) as gateway:
        assert (await gateway.chat()).status_code == 200
    assert fake.seen[-1].headers[H_STREAM_INTERVAL] == "250"


@pytest.mark.parametrize(
    ("setting", "interval"),
    [
        ("limits: {tokens_per_minute: 100000}", None),
        ("budget: {tokens_per_month: 100000}", None),
        ("limits: {requests_per_minute: 9}", "16"),
    ],
)
async def test_answers_of_keys_with_a_token_limit_are_sent_token_by_token(
    tmp_path: Path, fake: FakeInference, setting: str, interval: str | None
) -> None:
    """A cut answer is charged by its pieces, and each piece counts as a token."""
    config = f"{CONFIG}\nkeys:\n  - {{name: team, hash: 'sha256:{HASH}', {setting}}}\n"
    async with Gateway(tmp_path, fake.url, config) as gateway:
        for stream in (True, False):
            answer = await gateway.chat(stream=stream, headers={"authorization": f"Bearer {TEAM}"})
            assert answer.status_code == 200
    assert fake.seen[-2].headers.get(H_STREAM_INTERVAL) == interval
    assert fake.seen[-1].headers.get(H_STREAM_INTERVAL) == (interval and "250")


async def test_stream_interval_is_limited_by_the_allowed_silence(tmp_path: Path, fake: FakeInference) -> None:
    config = f"{CONFIG}\nstream_interval: 1s\ndeadlines: {{inter_token: 200ms}}\n"
    async with Gateway(tmp_path, fake.url, config) as gateway:
        for stream in (True, False):
            assert (await gateway.chat(stream=stream)).status_code == 200
            assert fake.seen[-1].headers[H_STREAM_INTERVAL] == "50"


@pytest.mark.parametrize("setting", ["never", "2s", "-1"])
def test_invalid_stream_interval_is_refused(tmp_path: Path, setting: str) -> None:
    (tmp_path / "gateway.yaml").write_text(f"stream_interval: {setting}\n")
    with pytest.raises(ConfigError, match="stream_interval"):
        settings_loading.load(tmp_path, {})
