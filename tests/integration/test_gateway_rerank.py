"""/v1/rerank of the gateway: answers and refusals of local models; clouds have no reranking."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gateway.apis.openai.frames import Endpoint, Flavor
from gateway.errors import UpstreamError
from inference.protocol import Code, ModelState, ModelStatus
from tests.rigs.fake_inference import Answer, FakeInference
from tests.rigs.gateway_rig import Gateway
from tests.rigs.typed_bodies import to_openai
from tests.rigs.typed_bodies import unsupported_by_openai as unsupported_params

pytestmark = pytest.mark.timeout(60)

BODY = {"model": "judge", "query": "water", "documents": ["mill", {"text": "gate"}], "top_n": 2}


@pytest.fixture
async def fake() -> AsyncIterator[FakeInference]:
    async with FakeInference("token") as fake:
        fake.models["judge"] = ModelStatus(id="judge", state=ModelState.READY, capabilities=("rerank",))
        yield fake


@pytest.fixture
async def gateway(tmp_path: Path, fake: FakeInference) -> AsyncIterator[Gateway]:
    async with Gateway(tmp_path, fake.url) as gateway:
        yield gateway


async def test_answer_of_the_model_is_passed_on_unchanged(gateway: Gateway, fake: FakeInference) -> None:
    answer = await gateway.client.post("/v1/rerank", json=BODY)
    assert answer.status_code == 200
    assert [result["index"] for result in answer.json()["results"]] == [0, 1]
    assert answer.headers["x-headgate-model"] == "local/judge"
    (seen,) = fake.seen
    assert (seen.path, seen.body) == ("/v1/rerank", BODY)


async def test_refusal_of_the_model_is_passed_on(gateway: Gateway, fake: FakeInference) -> None:
    fake.answers["judge"] = Answer(refuse=Code.CONTEXT_LENGTH_EXCEEDED, message="20 tokens, and it takes 30")
    answer = await gateway.client.post("/v1/rerank", json=BODY)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert "takes 30" in answer.json()["error"]["message"]


async def test_model_without_reranking_is_skipped(gateway: Gateway, fake: FakeInference) -> None:
    answer = await gateway.client.post("/v1/rerank", json={**BODY, "model": "demo"})
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "unsupported_parameter"
    assert fake.seen == []


@pytest.mark.parametrize("flavor", Flavor)
def test_openai_clouds_are_skipped_for_reranking(flavor: Flavor) -> None:
    assert tuple(unsupported_params(BODY, flavor, Endpoint.RERANK)) == ("model",)
    with pytest.raises(UpstreamError, match="/v1/rerank"):
        to_openai(Endpoint.RERANK, BODY, "judge", flavor)
