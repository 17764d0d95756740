"""The pure modules of the page: the state from events, texts of numbers, blocks of the memory map, streamed answers."""

from __future__ import annotations

import re
import time
from typing import Any

from tests.rigs import page_records
from tests.rigs.page_records import GIB, MIB

REDUCE = """async ([events, names]) => {
    const { initial, reduce, recent } = await import("./core/reducer.js");
    const before = JSON.stringify(initial());
    let state = initial();
    const freeze = (value) => Object.values(Object.freeze(value)).forEach((part) => part && Object.freeze(part));
    for (const event of events) {
        freeze(state);
        state = reduce(state, [event]);
    }
    const plain = (value) => (value instanceof Map ? [...value.values()] : value);
    return names.map((name) => (name === "recent" ? recent(state.minutes, 1000) : plain(state[name])));
}"""

DASH = "\u2013"


def reduce(page: Any, events: list[tuple[str, Any]], *names: str) -> list[Any]:
    """The parts `names` of the state after these events, which arrive at second 100 of the browser's clock."""
    wire = [{"kind": kind, "data": data, "at": 100} for kind, data in events]
    return list(page.evaluate(REDUCE, [wire, list(names)]))


def test_state_follows_the_events_and_stays_bounded(page: Any) -> None:
    request = page_records.request
    events: list[tuple[str, Any]] = [
        ("snapshot", page_records.snapshot(1000.0, models=[page_records.model("a", "ready")], requests=[])),
        ("removed", {"id": "a"}),
        ("model", {"model": page_records.model("b", "ready", figures={"idle_deadline_seconds": 30})}),
        ("request", {"request": request("again", 1.0, "queued")}),
        ("request", {"request": request("again", 1.0)}),
        ("request", {"request": request("again", 2.0, "decoding")}),
        ("breaker", {"breaker": {"name": "openai", "state": None}}),
        ("unheard", {}),
    ]
    models, live, finished, breakers, offset = reduce(page, events, "models", "live", "finished", "breakers", "offset")
    assert [(model["id"], model["idle_until"]) for model in models] == [("b", 1030)], "by the server's clock"
    assert offset == 900
    assert [(one["id"], one["phase"]) for one in live] == [("again", "decoding")]
    assert [one["id"] for one in finished] == ["again"]
    assert [one["name"] for one in breakers] == ["local"]

    many: list[tuple[str, Any]] = [
        ("timeline", {"entry": page_records.entry(n, "state", "x", str(n))}) for n in range(600)
    ]
    many += [("request", {"request": request(f"r{n}", n)}) for n in range(300)]
    timeline, finished = reduce(page, many, "timeline", "finished")
    assert [timeline[0]["text"], timeline[-1]["text"], len(timeline)] == ["100", "599", 500]
    assert [finished[0]["id"], len(finished)] == ["r100", 200]


def test_lost_stream_keeps_the_state_and_the_time_of_the_loss(page: Any) -> None:
    events: list[tuple[str, Any]] = [("snapshot", page_records.snapshot(1000.0)), ("down", None), ("down", None)]
    models, connected, since = reduce(page, events, "models", "connected", "down_since")
    assert (len(models), connected, since) == (5, False, 1000)
    connected, since = reduce(page, [*events, ("snapshot", page_records.snapshot(1000.0))], "connected", "down_since")
    assert (connected, since) == (True, None)


def test_sums_of_the_last_five_minutes_leave_out_older_ones(page: Any) -> None:
    minutes = [
        page_records.minute(start, by_tier={"local": n}, errors={"queue_full": n}, ttft_p50=n / 10, tokens=n)
        for start, n in ((600, 50), (720, 1), (960, 3))
    ]
    events: list[tuple[str, Any]] = [("minute", {"minute": minute}) for minute in minutes]
    (sums,) = reduce(page, events, "recent")
    assert (sums["total"], sums["errors"], sums["tokens"]) == (4, {"queue_full": 4}, 4)
    assert sums["ttft_p50"] == (0.1 + 3 * 0.3) / 4


def test_numbers_bytes_and_times_are_shown_with_units(page: Any) -> None:
    texts = page.evaluate(
        """async ([MIB, GIB]) => {
            const f = await import("./core/format.js");
            return [
                [0, 5 * MIB, 310 * MIB, 1.5 * GIB, 43 * GIB, 128 * GIB, null].map(f.bytes),
                [0.0004, 0.182, 1.306, 12.34, 75, 3700, 200000, null].map(f.duration),
                [0, 999, 1234567, null].map(f.count),
                [0, 0.014, 0.63, 1, null].map(f.percent),
                [f.ago(90, 100), f.ago(100, 100.2), f.until(130, 100), f.until(99, 100)],
            ];
        }""",
        [MIB, GIB],
    )
    assert texts == [
        ["0 MiB", "5.0 MiB", "310 MiB", "1.50 GiB", "43.0 GiB", "128 GiB", DASH],
        ["1 ms", "182 ms", "1.31 s", "12.3 s", "1 min 15 s", "1 h 1 min", "2 d 7 h", DASH],
        ["0", "999", "1,234,567", DASH],
        ["0 %", "1.4 %", "63 %", "100 %", DASH],
        ["10 s ago", "now", "in 30 s", "due"],
    ]


def test_blocks_of_a_device_add_up_to_its_memory(page: Any) -> None:
    device = page_records.device(
        "cpu",
        16 * GIB,
        {"warm-one": GIB, "big": 2 * GIB},
        warm={"warm-one": GIB},
        accounts={"foreign": 3 * GIB, "cached": GIB},
        by_model={
            "grown": {"resident": 50 * MIB, "reserved": 0, "weights": 40 * MIB, "kv": 0, "compute": 0, "other": 0}
        },
    )
    blocks = page.evaluate('async (device) => (await import("./core/blocks.js")).blocksOf(device)', device)
    assert [model["id"] for model in blocks["models"]] == ["big", "warm-one", "grown"]
    assert blocks["models"][1]["parts"]["warm"] == GIB
    assert blocks["models"][2]["parts"]["other"] == 10 * MIB
    taken = sum(model["bytes"] for model in blocks["models"]) + sum(one["bytes"] for one in blocks["accounts"])
    assert taken + blocks["free"] == blocks["scale"] == 16 * GIB


def test_streamed_answer_is_read_in_any_pieces(page: Any) -> None:
    calls = [{"index": 0, "id": "c", "function": {"name": "f", "arguments": "{"}}]
    frames = (
        ": headgate prefill 1/2\r\n\r\n"
        'data: {"choices": [{"delta": {"reasoning_content": "hm", "content": "Grüße"}}]}\n\n'
        f'data: {{"choices": [{{"delta": {{"tool_calls": {calls}}}}}]}}\n\n'.replace("'", '"')
        + 'data: {"choices": [], "usage": {"completion_tokens": 3}}\n\n'
        + 'data: {"error": {"message": "cut"}}\n\ndata: [DONE]\n\n'
    )
    answer = page.evaluate(
        """async (text) => {
            const { emptyAnswer, streamReader } = await import("./core/chat_stream.js");
            const answer = emptyAnswer();
            const take = streamReader(answer);
            for (const letter of text) take(letter);
            return answer;
        }""",
        frames,
    )
    assert (answer["content"], answer["reasoning"], answer["error"]) == ("Grüße", "hm", "cut")
    assert answer["tool_calls"] == [{"id": "c", "name": "f", "arguments": "{"}]
    assert answer["usage"] == {"completion_tokens": 3}


def test_each_1000_events_of_a_hidden_page_are_applied_without_a_frame(page: Any) -> None:
    sizes = page.evaluate(
        """async () => {
            const { createStore } = await import("./core/store.js");
            const store = createStore((state, events) => state + events.length, 0, () => undefined);
            for (let n = 0; n < 2500; n += 1) store.dispatch({});
            return store.state;
        }"""
    )
    assert sizes == 2000


def test_times_on_the_page_follow_the_clock(page: Any, gateway: Any) -> None:
    gateway.push("timeline", {"entry": page_records.entry(time.time(), "state", "x", "just happened")})
    page.locator('nav a[href="#/timeline"]').click()
    row = page.get_by_role("row", name="just happened")
    row.get_by_text(re.compile(r"^[2-9] s ago$")).wait_for()
    assert row.locator("time").get_attribute("title").startswith("20")
