"""GGUF files below INFERENCE_MODELS_DIR as models, and the files of `hf:` sources."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headgate.shared.errors import ConfigError
from inference import models_dir, settings
from inference.models_dir import HubSource, models_below


def put(root: Path, *names: str) -> None:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"GGUF")


def load(root: Path, text: str = "models: {}", **environ: str) -> Any:
    (root / "models.yaml").write_text(text)
    return settings.load(root, {"INFERENCE_MODELS_DIR": str(root / "models"), **environ}, {})


def problems(root: Path, text: str, **environ: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(root, text, **environ)
    return str(caught.value)


def test_files_without_an_entry_are_models_by_their_names(tmp_path: Path) -> None:
    put(
        tmp_path / "models",
        "qwen-q4.gguf",
        "org/repo/llama-q8.gguf",
        "listed.gguf",
        "notes.txt",
        ".cache/x.gguf",
        "d.gguf",
        "eye.gguf",
    )
    config = load(tmp_path, "models:\n  mine: {path: listed.gguf, aliases: [x], draft: d.gguf, mmproj: eye.gguf}")
    assert list(config.models) == ["mine", "qwen-q4", "llama-q8"]
    assert config.found == {"qwen-q4", "llama-q8"}
    assert config.names["org/repo/llama-q8.gguf"] == "llama-q8"
    assert config.names["qwen-q4.gguf"] == "qwen-q4"
    assert config.models["qwen-q4"].context_length == 4096


def test_files_with_equal_names_are_told_apart_by_their_folders(tmp_path: Path) -> None:
    put(tmp_path / "models", "a/m.gguf", "b/m.gguf", "demo.gguf", "b/demo.gguf")
    config = load(tmp_path, "models:\n  demo: {path: bundled:demo}\n  a/m: {path: bundled:demo-mini}")
    assert list(config.models) == ["demo", "a/m", "demo.gguf", "a/m.gguf", "b/demo", "b/m"]


def test_split_files_are_one_model(tmp_path: Path) -> None:
    put(tmp_path / "models", *(f"big/big-Q4-0000{part}-of-00003.gguf" for part in (1, 2, 3)))
    config = load(tmp_path)
    assert list(config.models) == ["big-Q4"]
    assert len(config.models["big-Q4"].files) == 3


def test_projector_belongs_to_the_models_of_its_folder(tmp_path: Path) -> None:
    root = tmp_path / "models"
    put(root, "mmproj-x.gguf", "plain.gguf", "vis/a.gguf", "vis/q8/b.gguf", "vis/mmproj-F16.gguf")
    put(root, "two/c.gguf", "two/mmproj-1.gguf", "two/mmproj-2.gguf")
    found = {file.path.name: file.mmproj and file.mmproj.name for file in models_below(root)}
    assert found == {"plain.gguf": None, "a.gguf": "mmproj-F16.gguf", "b.gguf": "mmproj-F16.gguf", "c.gguf": None}
    assert str(load(tmp_path).models["a"].mmproj).endswith("vis/mmproj-F16.gguf")


def test_names_that_cannot_be_ids_are_left_out(tmp_path: Path) -> None:
    put(tmp_path / "models", " .gguf", "line\nbreak.gguf", "ok.gguf")
    (tmp_path / "models" / "latin-\udce9.gguf").write_bytes(b"GGUF")
    (tmp_path / "models" / "folder.gguf").mkdir()
    (tmp_path / "models" / "broken.gguf").symlink_to("nowhere")
    assert list(load(tmp_path).models) == ["ok"]


def test_link_to_a_folder_that_contains_it_adds_no_models(tmp_path: Path) -> None:
    put(tmp_path, "a/x.gguf", "b/y.gguf")
    (tmp_path / "a" / "loop").symlink_to(tmp_path)
    (tmp_path / "c").symlink_to("b")
    found = [str(model.path.relative_to(tmp_path)) for model in models_below(tmp_path)]
    assert found == ["a/x.gguf", "b/y.gguf", "c/y.gguf"]


def test_directory_may_be_missing_or_huge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load(tmp_path).models == {}
    put(tmp_path / "models", *(f"m{number}.gguf" for number in range(9)), "a/b/c/d/e/deep.gguf")
    assert len(load(tmp_path).models) == 9
    monkeypatch.setattr(models_dir, "MAX_FILES", 4)
    assert len(load(tmp_path).models) == 4
    monkeypatch.setattr(models_dir, "MAX_ENTRIES", 3)
    assert len(load(tmp_path).models) == 2


def test_defaults_that_do_not_agree_are_reported_once(tmp_path: Path) -> None:
    put(tmp_path / "models", "a.gguf", "b.gguf")
    text = problems(tmp_path, "models: {}", INFERENCE_UBATCH="4096")
    assert text == "INFERENCE_MODELS_DIR: a.gguf: ubatch 4096 is larger than batch 2048; make it 2048 or less"


def test_hub_source_is_the_downloaded_file_with_its_projector(tmp_path: Path) -> None:
    put(tmp_path / "models/o/r", "r-Q4_K_M.gguf", "r-Q8_0.gguf", "mmproj-r-f16.gguf")
    config = load(tmp_path, "models:\n  r: {path: 'hf:o/r:q8_0'}")
    assert config.models["r"].path == tmp_path / "models/o/r/r-Q8_0.gguf"
    assert str(config.models["r"].mmproj).endswith("mmproj-r-f16.gguf")
    assert list(config.models) == ["r", "r-Q4_K_M"]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("hf:o/r:Q6_K", "hf:o/r:Q6_K is not in {}; download it: headgate pull hf:o/r:Q6_K"),
        ("hf:o/r", "not in {}; download it: headgate pull hf:o/r"),
        ("hf:o/r/big-00001-of-00002.gguf", "big-00002-of-00002.gguf is missing; continue the download"),
        ("hf:o", "write hf:ORGANIZATION/REPOSITORY:QUANTIZATION"),
        ("hf:../r:Q4", "write hf:ORGANIZATION/REPOSITORY:QUANTIZATION"),
        ("hf:o/r/../../x.gguf", "write hf:ORGANIZATION/REPOSITORY:QUANTIZATION"),
    ],
)
def test_hub_source_that_is_missing_incomplete_or_malformed_is_an_error_that_says_what_to_do(
    tmp_path: Path, source: str, message: str
) -> None:
    put(tmp_path / "models/o/r", "r-Q5_0.gguf", "r-Q8_0.gguf", "big-00001-of-00002.gguf")
    text = problems(tmp_path, f"models:\n  r: {{path: '{source}'}}")
    assert message.format(tmp_path / "models/o/r") in text
    assert "models.yaml:2" in text


NAMES = [
    "M-Q4_K_M.gguf", "M-Q4_K_S.gguf", "M-UD-Q4_K_M.gguf", "Q6_K/M-Q6_K-00001-of-00002.gguf",
    "Q6_K/M-Q6_K-00002-of-00002.gguf", "mmproj-M-Q6_K.gguf", "README.md",
]  # fmt: skip


@pytest.mark.parametrize(
    ("source", "file"),
    [
        ("hf:o/r:Q4_K_M", "M-Q4_K_M.gguf"),
        ("hf:o/r:q4_k_s", "M-Q4_K_S.gguf"),
        ("hf:o/r:UD-Q4_K_M", "M-UD-Q4_K_M.gguf"),
        ("hf:o/r:Q6_K", "Q6_K/M-Q6_K-00001-of-00002.gguf"),
        ("hf:o/r", "M-Q4_K_M.gguf"),
        ("hf:o/r/M-Q4_K_S.gguf", "M-Q4_K_S.gguf"),
    ],
)
def test_quantization_names_one_file(source: str, file: str) -> None:
    assert HubSource.parse(source).choose(NAMES) == file
    assert str(HubSource.parse(source)) == source


@pytest.mark.parametrize(
    ("source", "names", "message"),
    [
        ("hf:o/r:Q2_K", NAMES, "no quantization Q2_K; its models: M-Q4_K_M.gguf, M-Q4_K_S.gguf"),
        ("hf:o/r:K_M", [f"a{at}.gguf" for at in range(30)], " ..."),
        ("hf:o/r", ["a.gguf", "b.gguf"], "several quantizations; name one of them"),
        ("hf:o/r", ["a.safetensors"], "o/r has no GGUF model; look for a repository"),
        ("hf:o/r:Q4_K_M", ["mmproj.gguf"], "o/r has no GGUF model; look for a repository"),
        ("hf:o/r/c.gguf", [], "o/r has no GGUF model; look for a repository"),
        ("hf:o/r/c.gguf", NAMES, "has no model c.gguf"),
    ],
)
def test_choice_that_is_not_clear_names_the_models(source: str, names: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=r"its models|no GGUF") as caught:
        HubSource.parse(source).choose(names)
    assert message in str(caught.value)
