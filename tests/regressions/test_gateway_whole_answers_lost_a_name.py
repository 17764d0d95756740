"""A whole answer through the gateway lacked `logprobs.refusal`, which OpenAI's schema requires and the worker says."""

from __future__ import annotations

import json

from gateway.apis.openai.assemble import Assembly
from inference.worker.answers.generation import Output, TokenLogprob
from inference.worker.api import response_writer
from inference.worker.api.response_writer import Answer, Stream, Usage
from inference.worker.dialects.answer_parts import Content

SCORED = TokenLogprob(b"b", -0.5, ((b"b", -0.5), (b"\xc3", -1.0)), 0)
OUTPUTS = [
    Output(0, "", 1, logprobs=(SCORED,), parts=(Content("a"),)),
    Output(0, "", 2, logprobs=(SCORED, SCORED), parts=(Content("b"),)),
    Output(0, "", 2, finish="stop"),
]


def test_the_chunks_of_a_worker_add_up_to_its_whole_answer() -> None:
    stream, answer, assembly = Stream("chat", "tiny", 5, with_usage=False, divided=True), Answer("chat"), Assembly()
    for output in OUTPUTS:
        answer.add(output)
        for frame in stream.frames(output).split(b"\n\n")[:-1]:
            assembly.add(json.loads(frame.removeprefix(b"data: ")))
    whole = json.loads(response_writer.whole("chat", "tiny", 5, [answer], Usage(1, 2, 0, 0), with_logprobs=True))
    assert assembly.result()["choices"] == whole["choices"]
    assert whole["choices"][0]["logprobs"]["refusal"] is None
