"""Messages sent back as the official client holds them (`annotations`, `parsed`) made the next request a 400."""

from __future__ import annotations

import pytest

from gateway.apis.openai.frames import Endpoint, Flavor
from inference.worker.prompt.template_messages import messages_of
from tests.rigs.typed_bodies import to_openai

ANSWER = {"role": "assistant", "content": "Hi", "annotations": [], "parsed": None}


@pytest.mark.parametrize("flavor", Flavor)
def test_an_answer_sent_back_is_a_question_that_clouds_take(flavor: Flavor) -> None:
    sent = to_openai(Endpoint.CHAT, {"messages": [{"role": "user", "content": "Hi"}, ANSWER]}, "m", flavor)
    assert sent["messages"] == [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hi"}]


def test_an_answer_sent_back_is_a_question_that_a_local_model_takes() -> None:
    assert messages_of([ANSWER]) == ({"role": "assistant", "content": "Hi"},)
