"""Responses are stored per key, for a limited time, within a limit of memory."""

from __future__ import annotations

from gateway.apis.responses.responses_store import ITEM_BYTES, Store


def put(store: Store, owner: str, id: str, size: int, now: float = 0.0) -> None:
    store.put(owner, id, b"x" * (size - 2), b"[]", now)


def test_response_is_visible_to_its_owner_until_it_expires() -> None:
    store = Store(100, 60.0)
    store.put("a", "r1", b"{}", b"[1]", 0.0)
    found = store.get("a", "r1", 59.9)
    assert found is not None
    assert (found.response, found.items, found.size_bytes) == (b"{}", b"[1]", 5)
    assert store.get("b", "r1", 0.0) is None
    assert store.get("a", "r2", 0.0) is None
    assert store.get("a", "r1", 60.0) is None


def test_expired_responses_are_removed_by_the_next_put() -> None:
    store = Store(100, 60.0)
    put(store, "a", "r1", 40)
    put(store, "a", "r2", 40, 30.0)
    put(store, "b", "r3", 10, 61.0)
    assert store.size_bytes == 50
    put(store, "b", "r4", 10, 200.0)
    assert store.size_bytes == 10


def test_response_that_is_stored_again_counts_once() -> None:
    store = Store(100, 60.0)
    put(store, "a", "r1", 40)
    put(store, "a", "r1", 30)
    assert store.size_bytes == 30


def test_over_the_limit_the_largest_owner_loses_its_oldest_response() -> None:
    store = Store(100, 60.0)
    put(store, "small", "s", 20)
    for number in range(4):
        put(store, "large", f"l{number}", 30)
    assert [store.get("large", f"l{number}", 1.0) is not None for number in range(4)] == [False, False, True, True]
    assert store.get("small", "s", 1.0) is not None
    assert store.size_bytes == 80


def test_response_larger_than_the_limit_is_not_stored() -> None:
    store = Store(100, 60.0)
    put(store, "a", "r1", 60)
    put(store, "a", "huge", 101)
    assert store.get("a", "huge", 0.0) is None
    assert store.get("a", "r1", 0.0) is not None


def test_deleted_response_is_not_found() -> None:
    store = Store(100, 60.0)
    put(store, "a", "r1", 60)
    assert not store.delete("b", "r1", 0.0)
    assert store.delete("a", "r1", 0.0)
    assert not store.delete("a", "r1", 0.0)
    assert store.size_bytes == 0


def test_item_is_found_in_the_latest_response_with_it() -> None:
    store = Store(10_000, 60.0)
    store.put("a", "r1", b"1", b"[]", 0.0, ids=("msg_1",))
    store.put("a", "r2", b"2", b"[]", 30.0, ids=("msg_1", "msg_2"))
    found = store.find_by_item("a", "msg_1", 80.0)
    assert found is not None and found.response == b"2", "the first response has expired"
    assert store.find_by_item("b", "msg_1", 0.0) is None
    assert store.find_by_item("a", "msg_3", 0.0) is None
    assert store.find_by_item("a", "msg_2", 90.0) is None
    store.delete("a", "r1", 40.0)
    assert store.find_by_item("a", "msg_1", 40.0) is not None
    store.delete("a", "r2", 40.0)
    assert store.find_by_item("a", "msg_1", 40.0) is None


def test_ids_of_items_count_as_memory() -> None:
    store = Store(10_000, 60.0)
    store.put("a", "r1", b"1", b"[]", 0.0, ids=("msg_1", "msg_2"))
    assert store.size_bytes == 3 + 2 * ITEM_BYTES


def test_deleted_response_leaves_the_items_of_earlier_ones() -> None:
    store = Store(10_000, 60.0)
    store.put("a", "r1", b"1", b"[]", 0.0, ids=("msg_1",))
    store.put("a", "r2", b"2", b"[]", 0.0, ids=("msg_1", "msg_2"))
    store.put("a", "r3", b"3", b"[]", 0.0, ids=("msg_1", "msg_2", "msg_3"))
    assert store.delete("a", "r3", 1.0)
    found = store.find_by_item("a", "msg_1", 1.0)
    assert found is not None and found.response == b"2"
    assert store.find_by_item("a", "msg_3", 1.0) is None
    assert store.delete("a", "r2", 1.0)
    found = store.find_by_item("a", "msg_1", 1.0)
    assert found is not None and found.response == b"1"
    assert store.delete("a", "r1", 1.0)
    assert store.find_by_item("a", "msg_1", 1.0) is None


def test_response_copied_from_another_gateway_keeps_its_expiry() -> None:
    store = Store(100, 60.0)
    store.put("a", "r1", b"{}", b"[1]", 10.0, until=15.0)
    assert store.get("a", "r1", 14.9) is not None
    assert store.get("a", "r1", 15.0) is None
