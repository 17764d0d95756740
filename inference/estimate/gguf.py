"""Reads the facts for the size formula from the header of a GGUF file, without llama.cpp.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3, little endian).
"""

from __future__ import annotations

import math
import re
import struct
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from inference.estimate.header_formula import Facts
from inference.file_stamp import parts_of
from inference.worker_link import EXPERT_TENSOR

MAGIC = b"GGUF"
MAX_ENTRIES = 1_000_000
MAX_DIMENSIONS = 8
MAX_STRING_BYTES = 64 * 2**20
_LAYER = re.compile(r"blk\.(\d{1,5})\.")
_EXPERTS = re.compile(EXPERT_TENSOR)
_MOST = 2**32 - 1
"""llama.cpp stores the dimensions of models in 32 bits."""
_MAX_OF_A_TOKEN = 2**32
"""Limit of keys and values of one token over all layers; large models have some hundred thousand."""
_LONGEST_NAME = 256
_SCALARS = {0: "B", 1: "b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9

# ggml type -> (values per block, bytes per block), from ggml's type traits.
_BLOCKS: dict[int, tuple[int, int]] = {
    0: (1, 4), 1: (1, 2), 2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34), 9: (32, 36),
    10: (256, 84), 11: (256, 110), 12: (256, 144), 13: (256, 176), 14: (256, 210), 15: (256, 292),
    16: (256, 66), 17: (256, 74), 18: (256, 98), 19: (256, 50), 20: (32, 18), 21: (256, 110), 22: (256, 82),
    23: (256, 136), 24: (1, 1), 25: (1, 2), 26: (1, 4), 27: (1, 8), 28: (1, 8), 29: (256, 56), 30: (1, 2),
    34: (256, 54), 35: (256, 66), 39: (32, 17),
}  # fmt: skip


class BadGgufError(ValueError):
    """The file is not a usable GGUF file."""


def read_facts(path: Path) -> Facts:
    """The facts in the header of `path`. Raises BadGgufError, or OSError when the file cannot be read.

    Pipes and devices are not opened, because reading them could block.
    """
    metadata, lengths, weights, layers, experts = _read_part(path)
    for part in _later_parts(path, metadata):
        try:
            *_, weights_here, layers_here, experts_here = _read_part(part)
        except BadGgufError as error:
            raise BadGgufError(f"its part {part.name} is unusable: {error}") from error
        weights += weights_here
        layers += layers_here
        experts += experts_here
    if not weights:
        raise BadGgufError("it has no tensors")
    return _facts(metadata, lengths, weights, layers, experts)


def _later_parts(path: Path, metadata: dict[str, Any]) -> tuple[Path, ...]:
    """The other files of a split model, in order. `path` must be the first part."""
    count, number = metadata.get("split.count", 0), metadata.get("split.no", 0)
    if not isinstance(count, int) or not isinstance(number, int):
        raise BadGgufError(
            f"its split.count is {_shown(count)} and its split.no {_shown(number)}; both must be numbers"
        )
    if count <= 1:
        return ()
    parts = parts_of(path)
    if number != 0:
        first = f": {parts[0].name}" if len(parts) > 1 else ""
        raise BadGgufError(f"it is part {number + 1} of {count}; configure the first part{first}")
    if len(parts) != count:
        raise BadGgufError(f"it is the first of {count} parts; its name must be NAME-00001-of-{count:05d}.gguf")
    return parts[1:]


def _read_part(path: Path) -> tuple[dict[str, Any], dict[str, int], int, Counter[int], Counter[int]]:
    """Metadata, lengths of arrays, bytes of tensors, bytes per layer, and bytes of experts per layer of one file."""
    if path.exists() and not path.is_file():
        raise BadGgufError("it is not a regular file")
    with path.open("rb") as file:
        metadata, lengths, tensors = _header(file)
        data_begins = file.tell()
    size = path.stat().st_size
    alignment = _alignment(metadata)
    weights = end = 0
    layers: Counter[int] = Counter()
    experts: Counter[int] = Counter()
    for name, kind, count, offset in tensors:
        per_block, block_bytes = _BLOCKS.get(kind, (1, 4))
        here = math.ceil(count / per_block) * block_bytes
        weights += here
        if match := _LAYER.match(name):
            layers[int(match[1])] += here
            if _EXPERTS.search(name):
                experts[int(match[1])] += here
        end = max(end, offset + here)
    begin = math.ceil(data_begins / alignment) * alignment
    if begin + end > size:
        raise BadGgufError(f"it is cut short: {size} bytes, and its tensors end at {begin + end}; copy it again")
    return metadata, lengths, weights, layers, experts


def _alignment(metadata: dict[str, Any]) -> int:
    """The alignment of tensors in bytes, a power of two."""
    value = metadata.get("general.alignment", 32)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= _MOST or value & (value - 1):
        raise BadGgufError(f"its alignment (general.alignment) is {_shown(value)}, and must be a power of two")
    return value


def _facts(
    metadata: dict[str, Any],
    lengths: dict[str, int],
    weights: int,
    layer_bytes: Mapping[int, int],
    expert_bytes: Mapping[int, int],
) -> Facts:
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str) or not architecture:
        raise BadGgufError("its header has no architecture (general.architecture)")
    if len(architecture) > _LONGEST_NAME:
        raise BadGgufError(f"its architecture has {len(architecture)} characters; the maximum is {_LONGEST_NAME}")
    if not architecture.isprintable():
        raise BadGgufError(f"its architecture {_shown(architecture)} has unprintable characters")
    if architecture == "clip":
        raise BadGgufError("it is an image projector; configure it as `mmproj` of a model")
    if metadata.get("general.type") == "adapter":
        raise BadGgufError("it is a LoRA adapter; configure it under `lora` of a model")
    prefix = f"{architecture}."
    header = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    if problem := header_problem(architecture, header):
        raise BadGgufError(problem)

    def numbers(key: str, default: int = 0) -> list[int]:
        """The value, or the values of all layers."""
        name = f"{architecture}.{key}"
        value = metadata.get(name, default)
        found = value if isinstance(value, list) else [value]
        for item in found:
            if not isinstance(item, int) or isinstance(item, bool) or not 0 <= item <= _MOST:
                raise BadGgufError(f"{name} is {_shown(value)}, and must be a whole number from 0 to {_MOST}")
        return found

    def number(key: str, default: int = 0) -> int:
        return max(numbers(key, default), default=0)

    layers, embedding, heads = number("block_count"), number("embedding_length"), number("attention.head_count")
    per_head = embedding // heads if heads else 0
    keys = number("attention.key_length", per_head)
    values = number("attention.value_length", per_head)
    kv_heads = numbers("attention.head_count_kv", heads)
    is_listed = isinstance(metadata.get(f"{architecture}.attention.head_count_kv"), list)
    heads_of = dict(enumerate(kv_heads)) if is_listed else dict.fromkeys(range(layers), kv_heads[0])
    by_layer = tuple(
        (layer_bytes.get(layer, 0), (keys + values) * heads_of.get(layer, 0), expert_bytes.get(layer, 0))
        for layer in range(layers)
    )
    if (of_a_token := sum(count for _weights, count, _experts in by_layer)) > _MAX_OF_A_TOKEN:
        raise BadGgufError(
            f"it has {of_a_token} keys and values per token of its context; the maximum is {_MAX_OF_A_TOKEN}"
        )
    return Facts(
        architecture=architecture,
        layers=layers,
        embedding=embedding,
        feed_forward=number("feed_forward_length"),
        vocabulary=number("vocab_size", lengths.get("tokenizer.ggml.tokens", 0)),
        context_trained=number("context_length"),
        kv_values_per_cell=of_a_token,
        weight_bytes=weights,
        layer_bytes=sum(layer_bytes.values()),
        quantization=quantization_name(metadata),
        by_layer=by_layer,
        experts=number("expert_count"),
        experts_used=number("expert_used_count"),
    )


def _header(file: BinaryIO) -> tuple[dict[str, Any], dict[str, int], list[tuple[str, int, int, int]]]:
    """Scalars and short arrays by key, the lengths of all arrays, and (name, type, values, offset) of each tensor."""
    magic = file.read(4)
    if magic != MAGIC:
        raise BadGgufError(
            f"it begins with {magic!r} instead of GGUF" if magic else "it is empty instead of beginning with GGUF"
        )
    version, tensor_count, entry_count = _numbers(file, "<IQQ")
    if version not in (2, 3):
        raise BadGgufError(f"its GGUF version is {version}; supported versions are 2 and 3")
    if tensor_count > MAX_ENTRIES or entry_count > MAX_ENTRIES:
        raise BadGgufError(
            f"it has {tensor_count} tensors and {entry_count} metadata entries; the maximum is {MAX_ENTRIES} of each"
        )
    metadata: dict[str, Any] = {}
    lengths: dict[str, int] = {}
    for _ in range(entry_count):
        key = _string(file)
        (kind,) = _numbers(file, "<I")
        metadata[key] = _value(file, kind, key, lengths)
    tensors = []
    for _ in range(tensor_count):
        name = _string(file)
        (dimensions,) = _numbers(file, "<I")
        if dimensions > MAX_DIMENSIONS:
            raise BadGgufError(f"tensor {_shown(name)} has {dimensions} dimensions; the maximum is {MAX_DIMENSIONS}")
        shape = _numbers(file, f"<{dimensions}Q")
        kind, offset = _numbers(file, "<IQ")
        tensors.append((name, kind, math.prod(shape), offset))
    return metadata, lengths, tensors


def _value(file: BinaryIO, kind: int, key: str, lengths: dict[str, int]) -> Any:
    if kind == _STRING:
        return _string(file)
    if kind != _ARRAY:
        return _scalar(file, kind)
    inner, count = _numbers(file, "<IQ")
    if count > 100 * MAX_ENTRIES:
        raise BadGgufError(f"{_shown(key)} has {count} values; the maximum is {100 * MAX_ENTRIES}")
    lengths[key] = count
    if inner == _STRING:
        for _ in range(count):
            _skip_string(file)
        return None
    if inner == _ARRAY:
        raise BadGgufError(f"{_shown(key)} is an array of arrays")
    if count > 4096:  # scores and token types, which are not needed
        file.seek(count * struct.calcsize(_format(inner)), 1)
        return None
    return [_scalar(file, inner) for _ in range(count)]


def _shown(value: Any) -> str:
    """`value` for a message: short and printable."""
    return ascii(value)[:80]


def _format(kind: int) -> str:
    try:
        return _SCALARS[kind]
    except KeyError:
        raise BadGgufError(f"a value in its header has the unknown type {kind}") from None


def _scalar(file: BinaryIO, kind: int) -> Any:
    return _numbers(file, _format(kind))[0]


def _length(file: BinaryIO) -> int:
    (length,) = _numbers(file, "<Q")
    if length > MAX_STRING_BYTES:
        raise BadGgufError(f"a text in its header has {length} bytes; the maximum is {MAX_STRING_BYTES}")
    return int(length)


def _string(file: BinaryIO) -> str:
    return _bytes(file, _length(file)).decode("utf-8", "replace")


def _skip_string(file: BinaryIO) -> None:
    file.seek(_length(file), 1)


def _numbers(file: BinaryIO, form: str) -> tuple[Any, ...]:
    return struct.unpack(form, _bytes(file, struct.calcsize(form)))


def _bytes(file: BinaryIO, count: int) -> bytes:
    data = file.read(count)
    if len(data) < count:
        raise BadGgufError("it ends inside its header: the file is incomplete, copy it again")
    return data


_QUANTIZATION_NAMES: Mapping[int, str] = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 10: "Q2_K", 11: "Q3_K_S", 12: "Q3_K_M",
    13: "Q3_K_L", 14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S", 17: "Q5_K_M", 18: "Q6_K", 19: "IQ2_XXS", 20: "IQ2_XS",
    21: "Q2_K_S", 22: "IQ3_XS", 23: "IQ3_XXS", 24: "IQ1_S", 25: "IQ4_NL", 26: "IQ3_S", 27: "IQ3_M", 28: "IQ2_S",
    29: "IQ2_M", 30: "IQ4_XS", 31: "IQ1_M", 32: "BF16", 36: "TQ1_0", 37: "TQ2_0", 38: "MXFP4_MOE", 39: "NVFP4",
    40: "Q1_0", 41: "Q2_0",
}  # fmt: skip


def quantization_name(metadata: Mapping[str, Any]) -> str:
    """The name of the type in `general.file_type` (`enum llama_ftype` in llama.h); empty when missing or unknown."""
    kind = metadata.get("general.file_type")
    return _QUANTIZATION_NAMES.get(kind, "") if isinstance(kind, int) else ""


# --- limits of llama.cpp ----------------------------------------------------------------------------------------------
# llama.cpp checks many numbers with GGML_ASSERT, which aborts the process. The limits here are those of
# `llama_model_base::load_hparams` (llama.cpp 0c1e57098), so that a damaged file gives an error message.
MAX_LAYERS = 512
"""LLAMA_MAX_LAYERS."""
MAX_EXPERTS = 1024
"""LLAMA_MAX_EXPERTS."""
MAX_CONTEXT = 2**27
"""Tokens. The longest contexts of published models are about 10 million tokens; the field allows 4,294,967,295."""
ROPE_SCALINGS = ("none", "linear", "yarn", "longrope")
_REAL = (
    "attention.layer_norm_epsilon", "attention.layer_norm_rms_epsilon", "attention.group_norm_epsilon",
    "rope.freq_base", "rope.scaling.factor",
)  # fmt: skip
"""Negative values and NaN abort a step or make all probabilities NaN."""

Header = Mapping[str, object]
"""Values by key without the architecture (`block_count`); a list for one value per layer."""


def header_problem(architecture: str, header: Header) -> str | None:
    """The first invalid value as a message for the user, or None."""
    found = (
        _range(header, "block_count", 1, MAX_LAYERS)
        or _range(header, "context_length", 1, MAX_CONTEXT)
        or _range(header, "embedding_length", 1, 2**32 - 1)
        or _predicted_layers(header)
        or _experts(architecture, header)
        or _real_numbers(header)
        or _rope_scaling(header)
    )
    return None if found is None else f"{architecture}.{found}"


def _range(header: Header, key: str, least: int, most: int) -> str | None:
    if key not in header:
        return f"{key} is missing in its header"
    value = header[key]
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        return f"{key} is {_shown(value)}, but must be a whole number from {least} to {most}"
    return None


def _predicted_layers(header: Header) -> str | None:
    count, layers = _most(header, "nextn_predict_layers"), _most(header, "block_count")
    return None if count <= layers else f"nextn_predict_layers is {count}, but there are {layers} layers"


def _experts(architecture: str, header: Header) -> str | None:
    """llama.cpp aborts unless 0 < used <= experts, or both are 0; and the groups divide the experts."""
    experts, used = _most(header, "expert_count"), _most(header, "expert_used_count")
    groups, groups_used = _most(header, "expert_group_count"), _most(header, "expert_group_used_count")
    if architecture.startswith("hunyuan") and experts <= 1:  # llama.cpp treats these as models without experts
        experts = used = 0
    if experts > MAX_EXPERTS:
        return f"expert_count is {experts}; the limit is {MAX_EXPERTS}"
    if used > experts or (experts and not used):
        return f"expert_used_count is {used}, but there are {experts} experts"
    if groups and groups >= experts:
        return f"expert_group_count is {groups}, but there are {experts} experts"
    if groups > 1 and (experts % groups or not 0 < groups_used < groups):
        return f"expert_group_count is {groups}, of which {groups_used} are used, but there are {experts} experts"
    return None


def _real_numbers(header: Header) -> str | None:
    for key in _REAL:
        value = header.get(key)
        if isinstance(value, float) and not (math.isfinite(value) and value >= 0):
            return f"{key} is {value}, but must be a finite number of at least 0"
    return None


def _rope_scaling(header: Header) -> str | None:
    value = header.get("rope.scaling.type")
    if not isinstance(value, str) or value in ROPE_SCALINGS:
        return None
    return f"rope.scaling.type is {_shown(value)}; supported values: {', '.join(ROPE_SCALINGS)}"


def _most(header: Header, key: str) -> int:
    """The value, or the largest value of all layers; 0 when it is missing or not a number."""
    value = header.get(key)
    values = value if isinstance(value, list) else [value]
    return max((item for item in values if isinstance(item, int)), default=0)
