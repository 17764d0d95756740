"""A listing of models in Anthropic's form."""

from __future__ import annotations

from gateway.apis.messages.messages_models import entry, listing


def test_a_page_names_its_ends_and_what_each_model_holds() -> None:
    demo = {"id": "demo", "object": "model", "headgate": {"context_length": 4096}}
    page = listing([demo, {"id": "cloud", "object": "model"}])
    assert (page["first_id"], page["last_id"], page["has_more"]) == ("demo", "cloud", False)
    assert page["data"] == [entry(demo), entry({"id": "cloud"})]
    assert (entry(demo)["max_tokens"], entry({"id": "cloud"})["max_tokens"]) == (4096, None)
    assert listing([]) == {"data": [], "has_more": False, "first_id": None, "last_id": None}
