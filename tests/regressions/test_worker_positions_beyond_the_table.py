"""A context longer than an encoder's table of positions let a request end the worker: llama.cpp aborts beyond it."""

from __future__ import annotations

from pathlib import Path

from tests.rigs import tiny_bert
from tests.rigs.worker_rig import WorkerRig, grant_for


def test_the_context_ends_where_the_positions_do(tmp_path: Path) -> None:
    """128 positions, a context of 512 asked for: 128 tokens are read, 129 are a 400 with both lengths."""
    with WorkerRig(tmp_path, grant_for(tiny_bert.embedding(positions=128), context_length=512)) as worker:
        assert worker.ready().context_length == 128
        status, said = worker.post("/v1/embeddings", {"input": [5] * 129})
        assert (status, said["error"]["code"]) == (400, "context_length_exceeded")
        assert said["error"]["headgate"] == {"context_length": 128, "prompt_tokens": 129, "max_tokens": None}
        assert worker.post("/v1/embeddings", {"input": [5] * 128})[0] == 200
