"""Labels of prompts: which sequences have them, when they end, and what listeners of the service learn."""

from __future__ import annotations

import json
from array import array

import pytest

from headgate.shared.kv_hint import KvHint
from inference.authority.views.event_bus import Bus
from inference.authority.views.prefix_labels import PrefixLabels
from inference.protocol import MAX_PREFIX_HASHES, prefix_hashes
from inference.worker.engine.scheduler import Scheduler
from inference.worker.kv.catalog import Catalog
from inference.worker.kv.entry_format import Progress, decode_head, encode_head, set_progress
from inference.worker.kv.labels import MAX_OF_A_SEQUENCE, Labels, with_labels
from inference.worker.kv.slots import Slots
from inference.worker.steps import Job, Limits, StoredSequence

LIMITS = Limits(slots=2, context=40, batch=4, queue=8)


def step(scheduler: Scheduler) -> None:
    scheduler.plan(0.0, 4)
    scheduler.computed()


def served(scheduler: Scheduler, id: int, prompt: tuple[int, ...], *labels: str, kv: KvHint | None = None) -> None:
    """Computes a prompt and one token, and ends the job."""
    assert scheduler.submit([Job(id, prompt, labels=labels, kv=kv)])
    for _ in range(len(prompt)):
        step(scheduler)
        if scheduler.load[0]:
            break
    scheduler.extend(id, 90)
    scheduler.finish(id)


@pytest.mark.parametrize("value", ["", "0123", "0123456789ABCDEF", "0123456789abcdef,", ",".join(["0" * 16] * 33)])
def test_malformed_header_is_refused(value: str) -> None:
    with pytest.raises(ValueError, match="1 to 32 hashes"):
        prefix_hashes(value)


def test_header_has_up_to_32_hashes() -> None:
    hashes = tuple(f"{number:016x}" for number in range(MAX_PREFIX_HASHES))
    assert prefix_hashes(",".join(hashes)) == hashes


def test_sequence_has_the_labels_of_a_prompt_once_it_is_computed_completely() -> None:
    scheduler = Scheduler(LIMITS)
    scheduler.submit([Job(1, (1, 2, 3, 4, 5, 6), labels=("a", "b"))])
    step(scheduler)
    assert not list(scheduler.slots.labels)
    step(scheduler)
    assert list(scheduler.slots.labels) == ["a", "b"]
    scheduler.abort(1)
    assert scheduler.slots.labels.take_changes() == (["a", "b"], [])
    assert scheduler.slots.labels.take_changes() == ([], [])


def test_aborted_prompt_and_dropped_sequence_leave_no_labels() -> None:
    scheduler = Scheduler(LIMITS)
    scheduler.submit([Job(1, (1, 2, 3, 4, 5, 6), labels=("a",))])
    step(scheduler)
    scheduler.abort(1)
    served(scheduler, 2, (7, 8, 9), "b", kv=KvHint("drop"))
    assert not list(scheduler.slots.labels)


def test_next_turn_keeps_the_labels_of_earlier_ones_and_another_continuation_loses_those_behind_it() -> None:
    scheduler = Scheduler(Limits(slots=1, context=40, batch=4, queue=8))
    served(scheduler, 1, (1, 2), "system")
    served(scheduler, 2, (1, 2, 90, 3), "system", "turn")
    assert list(scheduler.slots.labels) == ["system", "turn"]
    served(scheduler, 3, (1, 2, 90, 4), "other")
    assert list(scheduler.slots.labels) == ["system", "other"], "the end of the first conversation was overwritten"
    scheduler.slots.forget()
    assert scheduler.slots.labels.take_changes() == ([], []), "they came and went since the last report"


def test_copy_of_a_beginning_has_its_labels() -> None:
    scheduler = Scheduler(LIMITS)
    served(scheduler, 1, (1, 2), "system")
    served(scheduler, 2, (1, 2, 90, 3), "first")
    scheduler.submit([Job(3, (1, 2, 90, 4))])
    step(scheduler)
    labels = sorted(tuple(slot.labels) for slot in scheduler.slots.held())
    assert labels == [("system",), ("system", "first")]


def test_stored_sequence_takes_its_labels_along_and_gives_them_back() -> None:
    catalog = Catalog()
    scheduler = Scheduler(LIMITS, catalog)
    served(scheduler, 1, (1, 2, 3), "a")
    store = scheduler.slots.store_one()
    assert store is not None
    catalog.add(store.sequence)
    scheduler.slots.forget()
    assert list(scheduler.slots.labels) == ["a"], "the stored sequence still has it"
    store.sequence.in_ram = True
    served(scheduler, 2, (1, 2, 3, 90, 5), "b")
    assert scheduler.slots.held()[0].labels == {"a": 3, "b": 5}
    catalog.remove(store.sequence)
    catalog.remove(store.sequence)
    scheduler.slots.forget()
    assert not list(scheduler.slots.labels)


def test_labels_of_a_stored_sequence_are_part_of_its_entry() -> None:
    sequence = StoredSequence(array("i", (1, 2, 3)), "", labels={"a": 2, "b": 3})
    head, _sizes = encode_head(sequence, {}, 0, [])
    set_progress(head, Progress.COMPLETE)
    assert decode_head(head).sequence.labels == {"a": 2, "b": 3}


def test_longest_beginnings_keep_their_labels() -> None:
    labels = with_labels({"known": 1}, ["known", "new"], 5)
    assert labels == {"known": 1, "new": 5}
    many = [f"{number}" for number in range(MAX_OF_A_SEQUENCE)]
    assert list(with_labels(labels, many, 9)) == many


def test_oldest_labels_of_a_model_are_forgotten() -> None:
    labels = Labels(max_labels=2)
    labels.add(["a", "b"])
    labels.add(["b"])
    assert labels.take_changes() == (["a", "b"], [])
    labels.add(["c"])
    assert (list(labels), len(labels)) == (["b", "c"], 2)
    assert labels.take_changes() == (["c"], ["a"])
    labels.remove(["a", "b"])
    assert labels.take_changes() == ([], []), "another sequence has b, and a was forgotten"
    labels.remove(["b"])
    assert labels.take_changes() == ([], ["b"])


def test_slots_without_labels_report_nothing() -> None:
    slots = Slots(LIMITS)
    served(scheduler := Scheduler(LIMITS), 1, (1, 2))
    scheduler.slots.forget()
    assert not list(slots.labels)
    assert scheduler.slots.labels.take_changes() == ([], [])


def test_model_has_the_labels_of_all_its_workers_until_the_last_one_ends() -> None:
    events: list[tuple[str, list[str], list[str]]] = []
    labels = PrefixLabels(lambda *event: events.append(event))
    labels.change("worker 1", "m", ("a", "b"), ())
    labels.change("worker 2", "m", ("b",), ("unknown",))
    labels.change("worker 1", "m", ("a",), ())
    assert events == [("m", ["a", "b"], [])]
    labels.change("worker 1", "m", ("c",), ("b",))
    assert events[1:] == [("m", ["c"], [])]
    assert labels.all() == {"m": ["a", "b", "c"]}
    labels.forget("worker 1")
    labels.forget("worker 1")
    labels.forget("worker without labels")
    assert events[2:] == [("m", [], ["a", "c"])]
    labels.forget("worker 2")
    assert events[3:] == [("m", [], ["b"])]
    assert labels.all() == {}


async def test_only_listeners_that_request_them_get_labels() -> None:
    bus = Bus()
    labels = PrefixLabels(bus.publish_labels)
    bus.labels = labels.all
    labels.change("worker", "m", ("a",), ())
    plain, with_kv = bus.listen(), bus.listen(kv=True)
    first, snapshot = await anext(plain), await anext(with_kv)
    assert b'"kv"' not in first
    assert json.loads(snapshot.split(b"data: ")[1]) == {"number": 0, "kv": {"m": ["a"]}}
    labels.change("worker", "m", ("b",), ("a",))
    bus.publish("load", {"id": "m"})
    assert (await anext(plain)).startswith(b"event: load\n")
    event = await anext(with_kv)
    assert event.startswith(b"event: kv\n")
    assert json.loads(event.split(b"data: ")[1]) == {"number": 0, "model": "m", "added": ["b"], "removed": ["a"]}
