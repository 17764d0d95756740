"""Records of the dashboard's event stream with plausible values, for the fake gateway and for screenshots."""

from __future__ import annotations

from typing import Any

MIB = 2**20
GIB = 2**30

Json = dict[str, Any]


def model(id: str, state: str = "cold", **changes: Any) -> Json:
    """A `Model` record (see `types.js`); `changes` replace fields of the status, or parts of `figures` and `blocks`."""
    loaded = state in ("ready", "busy")
    figures = {
        "tokens_per_second": 42.5 if state == "busy" else (0.0 if loaded else None),
        "ttft_p50": 0.182 if loaded else None,
        "ttft_p99": 1.31 if loaded else None,
        "prefix_hit_ratio": 0.63 if loaded else None,
        "kv": {"hot": 311, "ram": 42, "disk": 7} if loaded else None,
        "idle_deadline_seconds": 290.0 if state == "ready" else None,
    }
    status: Json = {
        "state": state,
        "aliases": [],
        "context_length": 4096,
        "parallel": 4,
        "devices": ["gpu-0"] if loaded else [],
        "predicted_bytes": 310 * MIB,
        "actual_bytes": 318 * MIB if loaded else None,
        "in_flight": 1 if state == "busy" else 0,
        "queued": 0,
        "loads": 1 if loaded else 0,
        "capabilities": ["chat", "completions"],
        "fits": True,
        "reason": None,
        "pid": 4711 if loaded else None,
        "reduced": [],
        "replicas": [],
        "growth": [],
    }
    blocks = changes.pop("blocks", {"gpu-0": _parts(318 * MIB)} if loaded else {})
    figures |= changes.pop("figures", {})
    progress = changes.pop("progress", None)
    headgate = status | changes
    return {
        "id": id,
        "object": "model",
        "headgate": headgate,
        "figures": figures,
        "blocks": blocks,
        "progress": progress,
    }


def _parts(total: int) -> Json:
    kv, compute, other = total // 5, total // 10, total // 20
    return {"weights": total - kv - compute - other, "kv": kv, "compute": compute, "other": other}


def device(id: str, total: int, models: dict[str, int], **changes: Any) -> Json:
    """A `Device` record on which `models` hold bytes."""
    accounts = {
        "foreign": 0,
        "reserved": 0,
        "resident": sum(models.values()),
        "releasing": 0,
        "cached": 0,
        "shortfall": 0,
    }
    accounts |= changes.pop("accounts", {})
    used = sum(accounts.values()) - accounts["cached"] - accounts["shortfall"]
    by_model = {name: {"resident": size, "reserved": 0, **_parts(size)} for name, size in models.items()}
    by_model |= changes.pop("by_model", {})
    record: Json = {
        "id": id,
        "name": "NVIDIA L4" if id != "cpu" else "host memory",
        "kind": "gpu" if id != "cpu" else "cpu",
        "state": "healthy",
        "total_bytes": total,
        "usable_bytes": int(total * 0.9),
        "limit_bytes": total,
        "used_bytes": used,
        "free_bytes": total - used,
        "accounts": accounts,
        "by_model": by_model,
        "warm": {},
        "pressure": "low",
        "pressure_ratio": used / total,
        "pressure_levels": {"moderate": 0.6, "high": 0.8, "critical": 0.9, "emergency": 0.98},
        "reason": "",
    }
    return record | changes


def breaker(name: str, state: str = "closed", **changes: Any) -> Json:
    """A `Breaker` record."""
    provider, _, of_model = name.partition("/")
    record: Json = {
        "name": name,
        "provider": provider,
        "model": of_model or None,
        "state": state,
        "failures": 0 if state == "closed" else 5,
        "window": {"succeeded": 12, "failed": 0 if state == "closed" else 5},
        "probing": False,
        "retry_after": None,
        "opens_until": None,
        "source": None if state == "closed" else "requests",
        "ramp": None,
        "last_failure": None if state == "closed" else "connection refused",
        "last_probe": None,
    }
    return record | changes


def request(id: str, started: float, phase: str = "done", **changes: Any) -> Json:
    """A `RequestRow` record; a finished one has succeeded."""
    done = phase == "done"
    record: Json = {
        "id": id,
        "started": started,
        "endpoint": "/v1/chat/completions",
        "route": "demo",
        "model": "demo",
        "key": "team-a",
        "stream": True,
        "phase": phase,
        "done": None,
        "total": None,
        "tier": "local" if done else "none",
        "answered_by": "local/demo" if done else None,
        "attempts": 1,
        "reason": "none",
        "outcome": "success" if done else None,
        "status": 200 if done else None,
        "ttft_seconds": 0.182 if done else None,
        "total_seconds": 2.34 if done else None,
        "prompt_tokens": 128,
        "completion_tokens": 96 if done else None,
        "tokens_per_second": 44.1 if done else None,
    }
    return record | changes


def minute(start: float, **changes: Any) -> Json:
    """A `Minute` record."""
    record: Json = {
        "start": int(start // 60 * 60),
        "by_tier": {"local": 0, "local-fallback": 0, "cloud": 0, "none": 0},
        "errors": {},
        "fallbacks": {},
        "ttft_p50": None,
        "tokens": 0,
    }
    return record | changes


def entry(at: float, kind: str, subject: str, text: str, severity: str = "info") -> Json:
    """An `Entry` of the timeline."""
    return {"at": at, "kind": kind, "subject": subject, "text": text, "severity": severity}


def line(at: float, text: str, level: str = "warning", logger: str = "inference.authority") -> Json:
    """A log line."""
    return {"at": at, "level": level, "logger": logger, "text": text}


def explain(id: str, started: float) -> Json:
    """An explain record of a request that a second candidate answered."""
    return {
        "id": id,
        "started": started,
        "endpoint": "/v1/chat/completions",
        "model": "qwen-7b",
        "stream": True,
        "route": "qwen-7b",
        "key": "team-a",
        "priority": "normal",
        "retries": 0,
        "chain": ["local/qwen-7b", "local/demo", "openai/gpt-5-mini"],
        "chosen": {},
        "needs": ["chat"],
        "size_bytes": 412,
        "max_tokens": 256,
        "cloud_allowed": True,
        "considered": {
            "local/qwen-7b": {"fits": False, "fit_reason": "needs 5.1 GiB, 2.3 GiB are free on gpu-0"},
            "local/demo": {"prompt_tokens": 91, "context_length": 4096, "expected_seconds": 0.2},
        },
        "dropped": {"local/qwen-7b": "cannot_fit"},
        "attempts": [
            {
                "name": "local/demo",
                "outcome": "success",
                "message": "",
                "seconds": 1.9,
                "restored": [{"tier": "ram", "tokens": 64, "milliseconds": 3.1, "choice": 0}],
            },
        ],
        "answered_by": "local/demo",
        "tier": "local-fallback",
        "hops": [],
        "breaks": [],
        "reason": "cannot_fit",
        "outcome": "success",
        "status": 200,
        "first_token_seconds": 0.21,
        "overhead_seconds": 0.002,
        "total_seconds": 1.93,
        "error": None,
        "param": None,
    }


def snapshot(now: float, **parts: Any) -> Json:
    """A snapshot of a small machine in ordinary use; `parts` replace its fields."""
    gpu0 = device(
        "gpu-0",
        600 * MIB,
        {"demo": 318 * MIB},
        accounts={"foreign": 60 * MIB},
        pressure="moderate",
    )
    loading = {"resident": 0, "reserved": 140 * MIB, "weights": 0, "kv": 0, "compute": 0, "other": 0}
    gpu1 = device(
        "gpu-1",
        600 * MIB,
        {},
        accounts={"reserved": 140 * MIB},
        by_model={"demo-mini": loading},
    )
    host = device(
        "cpu",
        16 * GIB,
        {"embed": 900 * MIB},
        accounts={"foreign": 5 * GIB, "cached": 2 * GIB},
        warm={"embed": 900 * MIB},
    )
    base: Json = {
        "gateway": {"version": "0.1.0", "uptime_seconds": 5400.0, "in_flight": 2, "queued": 0, "now": now},
        "inference": {"reachable": True, "since": now - 5000},
        "models": [
            model("demo", "busy"),
            model("demo-mini", "loading", progress=0.4, devices=["gpu-1"]),
            model("embed", "warm", predicted_bytes=900 * MIB, capabilities=["embeddings"]),
            model(
                "qwen-7b",
                "cold",
                predicted_bytes=5 * GIB,
                fits=False,
                reason="needs 5.1 GiB, 2.3 GiB are free on gpu-0",
            ),
            model("broken", "failed", reason="the model file is damaged: /models/broken.gguf"),
        ],
        "devices": [gpu0, gpu1, host],
        "breakers": [breaker("local"), breaker("openai", "open", opens_until=now + 25, retry_after=25.0)],
        "requests": [
            request("req-done-1", now - 60),
            request(
                "req-done-2",
                now - 30,
                tier="cloud",
                answered_by="openai/gpt-5-mini",
                reason="cannot_fit",
                attempts=2,
                model="qwen-7b",
                route="qwen-7b",
            ),
            request(
                "req-done-3",
                now - 20,
                tier="none",
                answered_by=None,
                outcome="queue_full",
                status=429,
                completion_tokens=None,
            ),
            request("req-live-1", now - 2, "prefill", done=512, total=2048),
            request("req-live-2", now - 1, "queued", done=3),
        ],
        "minutes": [
            minute(
                now - 60 * back,
                by_tier={"local": 9 + back, "local-fallback": 2, "cloud": 1, "none": int(back == 1)},
                errors={"queue_full": 1} if back == 1 else {},
                fallbacks={"cannot_fit": 2, "breaker_open": 1},
                ttft_p50=0.2,
                tokens=1200,
            )
            for back in range(4, -1, -1)
        ],
        "timeline": [
            entry(now - 900, "load", "demo", "loaded on gpu-0 in 1.4 s, 318 MiB"),
            entry(now - 600, "eviction", "embed", "offloaded: idle for 300 s, 900 MiB freed"),
            entry(now - 120, "crash", "broken", "the worker ended with SIGSEGV while loading", "error"),
            entry(now - 45, "breaker", "openai", "open for 30 s after 5 failures: connection refused", "warning"),
        ],
        "log": [
            line(now - 120, "worker of broken ended: SIGSEGV", "error"),
            line(now - 45, "breaker openai: open", logger="gateway.breaker"),
        ],
    }
    return base | parts


def node(name: str, now: float, reachable: bool = True) -> Json:
    """A `Node` record."""
    return {"name": name, "url": f"http://{name}:8085", "reachable": reachable, "since": now - 60}


def snapshot_of_nodes(now: float) -> Json:
    """A snapshot of two nodes: `demo` is loaded on `east` and cold on `west`, where a device is on trial."""
    cards = [
        device("gpu-0", 600 * MIB, {"demo": 318 * MIB}) | {"node": "east"},
        device("gpu-0", 600 * MIB, {}, state="probing", reason="on trial") | {"node": "west"},
        device("gpu-1", 600 * MIB, {}) | {"node": "west"},
    ]
    models = [model("demo", "ready") | {"node": "east"}, model("demo", "cold") | {"node": "west"}]
    nodes = [node("east", now), node("west", now)]
    return snapshot(now, devices=cards, models=models, inference={"reachable": True, "since": now - 60, "nodes": nodes})
