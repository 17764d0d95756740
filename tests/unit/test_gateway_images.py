"""Policy for images: allowed hosts, forms of addresses, public IP addresses, types of files."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.apis import image_policy as core
from gateway.apis.image_policy import Remote, Target, is_host_entry, is_public, remote_images, target_of
from gateway.apis.openai.generation_request import ChatRequest
from gateway.errors import RequestError
from tests.rigs.typed_bodies import chat, json_of

HOSTS = ("mill.example", "*.river.example", "weir.example:8443")


def _image(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, "detail": "low"}}


def _body(*urls: str) -> ChatRequest:
    parts = [{"type": "text", "text": "look"}, *map(_image, urls)]
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": parts}]
    return chat({"messages": messages, "n": 1})


def _target(url: str, hosts: tuple[str, ...] = HOSTS) -> Target:
    return target_of(Remote(1, 1, url), hosts)


@pytest.mark.parametrize(
    ("url", "target"),
    [
        ("https://mill.example/a.png?b=c#d", Target("mill.example", 443, "/a.png?b=c")),
        ("https://MILL.example.:443", Target("mill.example", 443, "/")),
        ("https://a.b.river.example/x", Target("a.b.river.example", 443, "/x")),
        ("https://weir.example:8443/x", Target("weir.example", 8443, "/x")),
    ],
)
def test_listed_hosts_are_allowed(url: str, target: Target) -> None:
    assert _target(url) == target
    assert _target("https://anything.example/", ("*",)).host == "anything.example"


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("https://evil.example/mill.example", "images.hosts"),
        ("https://river.example/", "images.hosts"),
        ("https://notriver.example/", "images.hosts"),
        ("https://mill.example:8443/", "images.hosts"),
        ("https://weir.example/", "images.hosts"),
        ("https://mill.example@evil.example/", "https URL with a host name"),
        ("https://evil.example\\@mill.example/", "https URL with a host name"),
        ("https://mill.example /", "https URL with a host name"),
        ("https://mill.example\n/", "https URL with a host name"),
        ("https://m\u0131ll.example/", "https URL with a host name"),
        ("https://localhost/", "https URL with a host name"),
        ("https://127.0.0.1/", "https URL with a host name"),
        ("https://0x7f.1/", "https URL with a host name"),
        ("https://2130706433/", "https URL with a host name"),
        ("https://[::1]/", "https URL with a host name"),
        ("https://mill.example:99999/", "not a valid URL"),
        ("https://[mill.example/", "not a valid URL"),
        ("https:///", "https URL with a host name"),
    ],
)
def test_unlisted_hosts_and_malformed_urls_are_rejected(url: str, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        _target(url)
    assert (caught.value.status, caught.value.param) == (400, "messages[1].content[1].image_url.url")


def test_ip_addresses_are_rejected_even_if_each_host_is_listed() -> None:
    for url in ("https://127.0.0.1/", "https://[::1]/", "https://169.254.169.254/latest", "https://1.1.1.1/"):
        with pytest.raises(RequestError):
            _target(url, ("*",))


def test_without_listed_hosts_all_addresses_are_rejected() -> None:
    with pytest.raises(RequestError, match="must be a data: URL; this gateway does not fetch images"):
        _target("https://mill.example/", ())


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.100.100.200", "168.63.129.16",
     "192.0.0.192", "0.0.0.0", "255.255.255.255", "224.0.0.1", "240.0.0.1", "198.18.0.1", "192.0.2.1", "::", "::1",
     "fe80::1%eth0", "fd00:ec2::254", "fec0::1", "ff02::1", "::ffff:127.0.0.1", "::ffff:8.8.8.8", "::127.0.0.1",
     "64:ff9b::7f00:1", "64:ff9b:1::1", "2002:7f00:1::", "2001::1", "2001:db8::1", "localhost", ""],
)  # fmt: skip
def test_private_and_reserved_ip_addresses_are_not_public(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize("address", ["1.1.1.1", "93.184.215.14", "2606:4700:4700::1111"])
def test_public_ip_addresses_are_public(address: str) -> None:
    assert is_public(address)


@pytest.mark.parametrize(
    ("entry", "is_one"),
    [
        ("mill.example", True), ("*.mill.example", True), ("mill.example:8443", True), ("*", True),
        ("mill", False), ("mill.example:", False), ("mill.example:0", False), ("mill.example:x", False),
        ("mill.example:²", False),
        ("127.0.0.1", False), ("https://mill.example", False), ("mill.*", False), ("", False), ("*:443", False),
    ],
)  # fmt: skip
def test_list_of_hosts_accepts_valid_entries_only(entry: str, is_one: bool) -> None:
    assert is_host_entry(entry) is is_one


def test_only_https_urls_are_remote_images_and_their_number_is_limited() -> None:
    body = _body("data:image/png;base64,AA==", "https://mill.example/b")
    assert remote_images(body) == (Remote(1, 2, "https://mill.example/b"),)
    with pytest.raises(RequestError, match="at most 16") as caught:
        remote_images(_body(*["https://mill.example/b"] * 17))
    assert caught.value.param == "messages[1].content[17].image_url.url"


def test_downloaded_images_replace_their_addresses() -> None:
    body = _body("https://mill.example/a", "data:x", "https://mill.example/b")
    first, second = remote_images(body)
    changed = json_of(core.inlined(body, {first: "data:1", second: "data:2"}))
    urls = [part["image_url"]["url"] for part in changed["messages"][1]["content"][1:]]
    assert urls == ["data:1", "data:x", "data:2"]
    assert changed["messages"][1]["content"][1]["image_url"]["detail"] == "low"
    assert remote_images(body) == (first, second), "the original body is not changed"


@pytest.mark.parametrize(
    ("content", "kind"),
    [(b"\x89PNG\r\n\x1a\n..", "png"), (b"\xff\xd8\xff\xe0", "jpeg"), (b"GIF89a", "gif"), (b"RIFF\n\n\n\nWEBP", "webp")],
)
def test_type_of_an_image_follows_from_its_first_bytes(content: bytes, kind: str) -> None:
    assert core.data_url(Remote(0, 0, ""), content).startswith(f"data:image/{kind};base64,")


def test_file_that_is_no_supported_image_is_rejected() -> None:
    with pytest.raises(RequestError, match="not a PNG, JPEG, GIF or WebP"):
        core.data_url(Remote(0, 0, ""), b"<svg onload=...>")
