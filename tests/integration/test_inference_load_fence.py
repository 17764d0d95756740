"""A load that a gateway decided under an ended lease is refused."""

from __future__ import annotations

import pytest

from tests.rigs.asgi import Answer, ask
from tests.rigs.authority_rig import Start


async def test_load_under_an_earlier_lease_is_refused(start: Start) -> None:
    service = await start({"a": {}, "b": {}})

    async def load(model: str, fence: str | None) -> Answer:
        more = {} if fence is None else {"x-headgate-fence": fence}
        return await ask(service.app, "POST", f"/models/{model}/load", more=more)

    assert (await load("a", "7")).status == 200
    refused = await load("b", "6")
    assert (refused.status, refused.body["error"]["code"]) == (400, "invalid_request")
    assert refused.body["error"]["param"] == "x-headgate-fence"
    assert "lease 6 has ended, because the newer lease 7 was used" in refused.body["error"]["message"]
    assert service.authority.models["b"].loads == 0
    for accepted in ("7", "8", None, "8"):
        assert (await load("b", accepted)).status == 200
    assert (await load("b", "7")).status == 400


@pytest.mark.parametrize("fence", ["", "x", "-1", "0", "1.5", "9" * 17, "9" * 5000])
async def test_malformed_fence_is_an_error_that_names_the_header(start: Start, fence: str) -> None:
    service = await start({"a": {}})
    refused = await ask(service.app, "POST", "/models/a/load", more={"x-headgate-fence": fence})
    assert (refused.status, refused.body["error"]["param"]) == (400, "x-headgate-fence")
    assert refused.body["error"]["message"].startswith("x-headgate-fence: ")
    assert service.authority.models["a"].loads == 0
