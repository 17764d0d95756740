"""Creates tiny random-weight image projectors for tests, a small vision transformer and the layer into the model.

Three kinds: LLaVA's, with sequential tokens; Qwen2-VL's, whose tokens have positions in the image; and Gemma 3's, whose
tokens attend to each other in both directions.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path

import gguf
import numpy as np

from tests.rigs import tiny_gguf


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes: an image is `image` pixels wide and high, cut into patches of `patch`; `into` is the language model's."""

    kind: str = "mlp"
    """`mlp`, `qwen2vl_merger` or `gemma3`."""
    image: int = 32
    patch: int = 8
    layers: int = 3
    width: int = 32
    heads: int = 2
    feed: int = 64
    into: int = 64
    seed: int = 5

    @property
    def patches(self) -> int:
        """How many patches an image has; with `mlp` each is a token."""
        return (self.image // self.patch) ** 2


def projector(**changes: object) -> Path:
    """Path of a projector of about 0.2 MB; with the defaults an image takes 16 tokens."""
    shape = Shape(**changes)  # type: ignore[arg-type]
    recipe = Path(__file__).read_bytes() + repr(asdict(shape)).encode()
    return tiny_gguf.cached("projector", recipe, "clip", lambda writer: _write(shape, writer))


def png(width: int = 24, height: int = 24, seed: int = 1) -> bytes:
    """A PNG file of colored noise."""
    rows = np.random.default_rng(seed).integers(0, 256, (height, width * 3), np.uint8)
    raw = b"".join(b"\0" + row.tobytes() for row in rows)

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(raw)) + chunk(b"IEND", b"")


def _write(shape: Shape, writer: gguf.GGUFWriter) -> None:
    rng = np.random.default_rng(shape.seed)
    writer.add_name("tiny")
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_bool("clip.has_vision_encoder", True)
    writer.add_string("clip.projector_type", shape.kind)
    writer.add_bool("clip.use_gelu", True)
    for name, number in (
        ("embedding_length", shape.width),
        ("feed_forward_length", shape.feed),
        ("block_count", shape.layers),
        ("projection_dim", shape.into),
        ("attention.head_count", shape.heads),
        ("image_size", shape.image),
        ("patch_size", shape.patch),
    ):
        writer.add_uint32(f"clip.vision.{name}", number)
    writer.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-5)
    writer.add_array("clip.vision.image_mean", [0.5, 0.5, 0.5])
    writer.add_array("clip.vision.image_std", [0.5, 0.5, 0.5])

    def weights(name: str, *size: int, bias: int = 0) -> None:
        fan = int(np.prod(size[1:]))
        values = rng.standard_normal(size, dtype=np.float32) * np.float32(2.0 / np.sqrt(fan))
        writer.add_tensor(f"{name}.weight", values)
        if bias:
            writer.add_tensor(f"{name}.bias", np.zeros(bias, np.float32))

    def norm(name: str) -> None:
        writer.add_tensor(f"{name}.weight", np.ones(shape.width, np.float32))
        writer.add_tensor(f"{name}.bias", np.zeros(shape.width, np.float32))

    weights("v.patch_embd", shape.width, 3, shape.patch, shape.patch)
    if shape.kind == "mlp":
        writer.add_tensor("v.class_embd", rng.standard_normal(shape.width).astype(np.float32))
        weights("v.position_embd", shape.patches + 1, shape.width)
        norm("v.pre_ln")
        weights("mm.0", shape.into, shape.width, bias=shape.into)
        weights("mm.2", shape.into, shape.into, bias=shape.into)
    elif shape.kind == "qwen2vl_merger":
        rest = rng.standard_normal((shape.width, 3, shape.patch, shape.patch), dtype=np.float32)
        writer.add_tensor("v.patch_embd.weight.1", rest / np.float32(shape.patch))
        norm("v.post_ln")
        weights("mm.0", 4 * shape.width, 4 * shape.width, bias=4 * shape.width)
        weights("mm.2", shape.into, 4 * shape.width, bias=shape.into)
    else:
        writer.add_uint32("clip.vision.projector.scale_factor", 2)
        weights("v.position_embd", shape.patches, shape.width)
        norm("v.post_ln")
        writer.add_tensor("mm.soft_emb_norm.weight", np.ones(shape.width, np.float32))
        weights("mm.input_projection", shape.width, shape.into)
    for layer in range(shape.layers):
        block = f"v.blk.{layer}"
        for part in ("attn_q", "attn_k", "attn_v", "attn_out"):
            weights(f"{block}.{part}", shape.width, shape.width, bias=shape.width)
        norm(f"{block}.ln1")
        norm(f"{block}.ln2")
        weights(f"{block}.ffn_up", shape.feed, shape.width, bias=shape.feed)
        weights(f"{block}.ffn_down", shape.width, shape.feed, bias=shape.width)
