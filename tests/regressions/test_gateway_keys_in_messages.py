"""A provider's key with a stray line end once reached callers and logs inside the SDK's own error text."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.settings import load
from headgate.shared.errors import ConfigError

CANARY = "gsk_canary1234567890"


def _load(tmp_path: Path, key: str) -> str:
    (tmp_path / "gateway.yaml").write_text('providers: {oa: {kind: openai, api_key: "${env:THE_KEY}"}}\n')
    return load(tmp_path, {"THE_KEY": key}).providers["oa"].api_key


@pytest.mark.parametrize("around", ["{}\r", "{}\n", " {}\t"])
def test_white_space_around_a_key_is_dropped(tmp_path: Path, around: str) -> None:
    assert _load(tmp_path, around.format(CANARY)) == CANARY


@pytest.mark.parametrize("odd", ["{}\nsk-old", "{}\x00", "{} {}", "schlüssel-{}", "{}\x7f"])
def test_what_a_header_cannot_hold_is_refused_without_showing_it(tmp_path: Path, odd: str) -> None:
    with pytest.raises(ConfigError) as caught:
        _load(tmp_path, odd.format(CANARY, CANARY))
    (problem,) = caught.value.problems
    assert problem.key == "providers.oa.api_key"
    assert CANARY not in str(problem)


@pytest.mark.parametrize("url", ["http://[::1", "http://", "ftp://x", "http://x:99999/", "http://a b/", "nonsense"])
def test_an_address_that_cannot_be_one_is_a_problem_with_its_line(tmp_path: Path, url: str) -> None:
    (tmp_path / "gateway.yaml").write_text(f'inference:\n  url: "{url}"\n')
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, {})
    (problem,) = caught.value.problems
    assert problem.line == 2
    assert "is not an address" in problem.message
