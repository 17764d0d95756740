"""Values in GGUF headers on which llama.cpp would abort are rejected."""

from __future__ import annotations

import math

import pytest

from inference.estimate.header_limits import MOST_CONTEXT, MOST_EXPERTS, MOST_LAYERS, header_problem

GOOD = {"block_count": 32, "context_length": 4096, "embedding_length": 4096}
MIXTURE = {"expert_count": 8, "expert_used_count": 2}


def problem(architecture: str = "llama", **changes: object) -> str | None:
    """The problem of a valid header with `changes`; `__` in a name stands for a dot."""
    return header_problem(architecture, GOOD | {key.replace("__", "."): value for key, value in changes.items()})


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"block_count": 1, "context_length": 1, "embedding_length": 1},
        {"block_count": MOST_LAYERS, "context_length": MOST_CONTEXT},
        {"attention__head_count": 0},
        MIXTURE,
        MIXTURE | {"expert_used_count": [2] * 32},
        MIXTURE | {"expert_group_count": 1},
        MIXTURE | {"expert_group_count": 4, "expert_group_used_count": 2},
        {"expert_count": MOST_EXPERTS, "expert_used_count": MOST_EXPERTS},
        {"nextn_predict_layers": 32},
        {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0, "rope__freq_base": 1e6},
        {"attention__layer_norm_rms_epsilon": 1e-5},
    ],
)
def test_header_that_llama_cpp_accepts_is_not_rejected(changes: dict[str, object]) -> None:
    """The limits themselves are valid, and so are models without attention (head_count 0)."""
    assert problem(**changes) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_count": 0}, "llama.block_count is 0, but must be a whole number from 1 to 512"),
        ({"block_count": MOST_LAYERS + 1}, "block_count is 513"),
        ({"block_count": "two"}, "block_count is 'two'"),
        ({"block_count": True}, "block_count is True"),
        ({"context_length": 0}, "context_length is 0, but must be a whole number from 1 to 134217728"),
        ({"context_length": 2**32 - 1}, "context_length is 4294967295"),
        ({"embedding_length": 0}, "embedding_length is 0"),
        ({"nextn_predict_layers": 33}, "nextn_predict_layers is 33, but there are 32 layers"),
        ({"expert_count": MOST_EXPERTS + 1, "expert_used_count": 1}, "expert_count is 1025; the limit is 1024"),
        ({"expert_count": 8}, "expert_used_count is 0, but there are 8 experts"),
        ({"expert_used_count": 1}, "expert_used_count is 1, but there are 0 experts"),
        (MIXTURE | {"expert_used_count": [2, 9]}, "expert_used_count is 9, but there are 8 experts"),
        ({"expert_group_count": 1}, "expert_group_count is 1, but there are 0 experts"),
        (MIXTURE | {"expert_group_count": 8}, "expert_group_count is 8, but there are 8 experts"),
        (MIXTURE | {"expert_group_count": 3, "expert_group_used_count": 1}, "expert_group_count is 3"),
        (MIXTURE | {"expert_group_count": 4}, "of which 0 are used"),
        (MIXTURE | {"expert_group_count": 4, "expert_group_used_count": 4}, "of which 4 are used"),
        ({"attention__layer_norm_rms_epsilon": -1.0}, "attention.layer_norm_rms_epsilon is -1.0"),
        ({"rope__freq_base": math.nan}, "rope.freq_base is nan"),
        ({"rope__scaling__factor": math.inf}, "rope.scaling.factor is inf"),
        ({"rope__scaling__type": "rubber"}, "supported values: none, linear, yarn, longrope"),
    ],
)
def test_header_that_llama_cpp_aborts_on_is_rejected_with_its_field(changes: dict[str, object], message: str) -> None:
    found = problem(**changes)
    assert found is not None
    assert message in found


@pytest.mark.parametrize("key", GOOD)
def test_missing_field_is_named(key: str) -> None:
    header = {name: value for name, value in GOOD.items() if name != key}
    assert header_problem("qwen3", header) == f"qwen3.{key} is missing in its header"


def test_one_expert_is_valid_for_hunyuan_models() -> None:
    assert problem("hunyuan-dense", expert_count=1) is None
    assert problem("llama", expert_count=1) is not None
