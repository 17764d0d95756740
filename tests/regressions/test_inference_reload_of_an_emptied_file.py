"""A models.yaml that was empty for a moment (an editor, a full disk) made a reload drop every model."""

from __future__ import annotations

from pathlib import Path

import pytest

from inference import settings


@pytest.mark.parametrize("text", ["", "\n", "# models: {}\n"], ids=["nothing", "a blank line", "a comment"])
def test_an_empty_file_is_a_mistake_while_models_are_served(tmp_path: Path, text: str) -> None:
    (tmp_path / "models.yaml").write_text(text)
    config = settings.load(tmp_path, {}, {})
    (problem,) = settings.check_emptied(config, served=2)
    assert str(problem) == f"{tmp_path}/models.yaml: it is empty; `models: {{}}` removes every model"
    assert settings.check_emptied(config, served=0) == []


def test_no_models_may_be_asked_for(tmp_path: Path) -> None:
    (tmp_path / "models.yaml").write_text("models: {}\n")
    assert settings.check_emptied(settings.load(tmp_path, {}, {}), served=2) == []
