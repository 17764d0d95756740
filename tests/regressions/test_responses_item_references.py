"""References to items of stored responses, as the AI SDK sends them from the second turn on."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.rigs.fake_inference import FakeInference
from tests.rigs.gateway_rig import ADMIN, CONFIG, KEY, Gateway

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
async def gateway(tmp_path: Path, fake: FakeInference) -> AsyncIterator[Gateway]:
    async with Gateway(tmp_path, fake.url, CONFIG) as gateway:
        yield gateway


@pytest.fixture
async def client(gateway: Gateway) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=KEY, max_retries=0) as client:
        yield client


def user(text: str) -> Any:
    return {"role": "user", "content": [{"type": "input_text", "text": text}]}


def reference(id: str) -> Any:
    return {"type": "item_reference", "id": id}


@pytest.mark.parametrize("stream", [False, True])
async def test_conversation_of_references_shows_the_model_every_item(
    client: openai.AsyncOpenAI, fake: FakeInference, stream: bool
) -> None:
    """Items of the first turn are found in later responses, even if the first response is deleted."""
    sent, ids, responses = [], [], []
    for text in ("One", "Two", "Three"):
        sent = [*sent, user(text)]
        if stream:
            events: Any = await client.responses.create(model="demo", input=sent, stream=True)
            answer = [event async for event in events][-1].response
        else:
            answer = await client.responses.create(model="demo", input=sent)
        responses.append(answer.id)
        ids.append(answer.output[0].id)
        sent.append(reference(ids[-1]))
    answered = {"role": "assistant", "content": "Hello there!"}
    shown = [
        {"role": "user", "content": "One"}, answered, {"role": "user", "content": "Two"}, answered,
        {"role": "user", "content": "Three"},
    ]  # fmt: skip
    assert fake.seen[-1].body["messages"] == shown
    await client.responses.delete(responses[0])
    await client.responses.create(model="demo", input=[*sent, user("Four")])
    assert fake.seen[-1].body["messages"] == [*shown, answered, {"role": "user", "content": "Four"}]


async def test_reference_works_with_the_token_count_and_a_previous_response(
    client: openai.AsyncOpenAI, fake: FakeInference
) -> None:
    first = await client.responses.create(model="demo", input="One")
    fake.counts["demo"] = 42
    sent: dict[str, Any] = {"model": "demo", "input": [reference(first.output[0].id), user("Two")]}
    await client.responses.input_tokens.count(**sent)
    assert len(fake.counted[-1]["messages"]) == 2
    await client.responses.create(**sent, previous_response_id=first.id)
    assert len(fake.seen[-1].body["messages"]) == 4


async def test_reference_to_an_item_of_another_key_or_an_unstored_response_is_not_found(
    client: openai.AsyncOpenAI,
) -> None:
    first = await client.responses.create(model="demo", input="One")
    unstored = await client.responses.create(model="demo", input="One", store=False)
    other = client.with_options(api_key=ADMIN)
    for sender, id in ((other, first.output[0].id), (client, unstored.output[0].id), (client, "msg_unknown")):
        with pytest.raises(openai.NotFoundError) as caught:
            await sender.responses.create(model="demo", input=[reference(id or ""), user("Two")])
        assert caught.value.param == "input[0]"
        assert "store: false" in caught.value.message


async def test_references_count_as_bytes_of_the_body(gateway: Gateway, fake: FakeInference) -> None:
    gateway.write(CONFIG + "max_body: 3KB\n")
    await gateway.runtime.reload()
    body = {"model": "demo", "input": "mill " * 200}
    first = (await gateway.client.post("/v1/responses", json=body)).json()
    items = (await gateway.client.get(f"/v1/responses/{first['id']}/input_items")).json()
    references = [reference(items["data"][0]["id"])] * 3
    answer = await gateway.client.post("/v1/responses", json={"model": "demo", "input": references})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (413, "body_too_large", "input")


# --- GET /v1/responses/{id}/input_items -------------------------------------------------------------------------------
async def test_input_items_of_a_response_are_those_sent_to_the_model(client: openai.AsyncOpenAI) -> None:
    first = await client.responses.create(model="demo", input="One", instructions="Be brief.")
    second = await client.responses.create(model="demo", input=[user("Two")], previous_response_id=first.id)
    newest = await client.responses.input_items.list(second.id)
    texts = [item.content[0].text for item in newest.data]  # type: ignore[union-attr, index]
    assert texts == ["Two", "Hello there!", "One"]
    assert [item.role for item in newest.data] == ["user", "assistant", "user"]  # type: ignore[union-attr]
    oldest = client.responses.input_items.list(second.id, order="asc", limit=1, include=["reasoning.encrypted_content"])
    assert [item.id async for item in oldest] == [item.id for item in reversed(newest.data)], "page by page"
    behind = await client.responses.input_items.list(second.id, after=newest.data[1].id or "")
    assert [item.id for item in behind.data] == [newest.data[2].id]
    assert newest.data[1].id == first.output[0].id


async def test_input_items_are_visible_to_their_key_only(client: openai.AsyncOpenAI) -> None:
    first = await client.responses.create(model="demo", input="One")
    with pytest.raises(openai.NotFoundError):
        await client.with_options(api_key=ADMIN).responses.input_items.list(first.id)
    with pytest.raises(openai.AuthenticationError):
        await client.with_options(api_key="wrong").responses.input_items.list(first.id)
    with pytest.raises(openai.NotFoundError):
        await client.responses.input_items.list("resp_unknown")


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("limit=0", "limit"),
        ("limit=101", "limit"),
        ("limit=x", "limit"),
        ("order=up", "order"),
        ("after=msg_unknown", "after"),
        ("after=", "after"),
        ("include=odd", "include"),
        ("include[]=odd", "include"),
    ],
)
async def test_bad_queries_for_input_items_name_the_parameter(gateway: Gateway, query: str, param: str) -> None:
    first = (await gateway.client.post("/v1/responses", json={"model": "demo", "input": "One"})).json()
    answer = await gateway.client.get(f"/v1/responses/{first['id']}/input_items?{query}")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
