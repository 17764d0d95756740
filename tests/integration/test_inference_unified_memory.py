"""An accelerator without memory of its own: one account with the host, one limit, one set of figures."""

from __future__ import annotations

from pathlib import Path

from inference.authority.handlers.queries import device_view
from inference.authority.state import Devices, State
from inference.devices.device import Reading
from inference.environment_settings import InferenceSettings
from inference.settings import InferenceConfig
from tests.rigs.authority_rig import MIB, FakeAccelerator, Start

HOST = 16 * 1024 * MIB


class UnifiedAccelerator(FakeAccelerator):
    """A GPU that may use two thirds of the host's memory."""

    def readings(self) -> tuple[Reading, ...]:
        total = HOST * 2 // 3
        return (Reading("gpu-0", "mtl", "fake", total, total, 0, unified=True),)


class FakeHost(FakeAccelerator):
    """Host memory of 16 GiB, a quarter in use."""

    def readings(self) -> tuple[Reading, ...]:
        return (Reading("cpu", "cpu", "fake", HOST, HOST * 3 // 4, HOST // 4),)


def shown(*probes: FakeAccelerator) -> tuple[Reading, ...]:
    """Readings as decisions see them."""
    config = InferenceConfig(InferenceSettings(), {}, {}, Path())
    state = State(config, devices=Devices(measured=tuple(item for probe in probes for item in probe.readings())))
    return device_view.readings(state, 0.0)


async def test_readings_of_unified_memory_are_those_of_the_host() -> None:
    """The free memory of the host, limited to the share that the accelerator may use."""
    accelerator, _host = shown(UnifiedAccelerator(), FakeHost())
    assert accelerator.total_bytes == HOST * 2 // 3
    assert accelerator.free_bytes == HOST * 2 // 3
    full = FakeHost()
    full.readings = lambda: (Reading("cpu", "cpu", "fake", HOST, MIB, HOST - MIB),)  # type: ignore[method-assign]
    accelerator, _host = shown(UnifiedAccelerator(), full)
    assert (accelerator.free_bytes, accelerator.used_bytes) == (MIB, HOST * 2 // 3 - MIB)


async def test_model_on_unified_memory_is_booked_on_the_host(start: Start) -> None:
    """The device has no account; its bytes are on the account of the host and are released at its end."""
    service = await start({"a": {}}, accelerator=UnifiedAccelerator())
    authority = service.authority
    assert set(authority.ledger.accounts) == {"cpu"}
    await authority.load(authority.models["a"])
    assert authority.status(authority.models["a"]).devices == ("gpu-0",)
    assert authority.ledger.balance("cpu").resident_bytes > 0
    assert authority.ledger.balance("gpu-0") == authority.ledger.balance("cpu")
    assert set(authority.ledger.owned_by("a")) == {"cpu"}
    await authority.unload(authority.models["a"], now=True)
    await authority.emptied()


async def test_host_limit_is_at_least_that_of_its_accelerator(start: Start) -> None:
    """Half of the host memory is for models; with unified memory it is the larger limit of the accelerator."""
    for accelerator, budget in ((UnifiedAccelerator(), int(HOST * 2 // 3 * 0.9)), (FakeAccelerator(), HOST // 2)):
        service = await start({}, accelerator=accelerator, probes=[accelerator, FakeHost()])
        service.authority.observe()
        assert service.authority.ledger.accounts["cpu"].budget_bytes == budget
