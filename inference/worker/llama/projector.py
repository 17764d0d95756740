"""A vision projector (llama.cpp's mtmd): converts image files to embeddings for a model."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from inference.protocol import ExitCause
from inference.worker.backend import ImageTile
from inference.worker.llama.binding import lib
from inference.worker.llama.llama_model import Model
from inference.worker.llama.llama_process import library_log_callback
from inference.worker.worker_errors import LoadError

_NO_PROGRAMS = b"/dev/null"
"""The directory in which mtmd looks for ffmpeg, to which it passes undecodable files; it contains no program."""


class Projector:
    """Reads images for one model. Call `read` and `encode` on one thread."""

    def __init__(self, path: str, model: Model, device: int | None, threads: int) -> None:
        """Loads the projector; mtmd encodes once as a test. `device` None means the CPU.

        Raises LoadError: OOM_LOAD if mtmd returns NULL (its log has the reason), STARTUP if it cannot be used for
        images of this model.
        """
        from llama_cpp import mtmd_cpp as mtmd

        self._mtmd = mtmd
        self._model = model
        self.width = int(lib.llama_model_n_embd_inp(model.handle))
        """Length of one embedding."""
        mtmd.mtmd_helper_log_set(library_log_callback(), ctypes.c_void_p(0))
        self.handle = mtmd.mtmd_init_from_file(path.encode(), model.handle, _params(device, threads))
        if not self.handle:
            raise LoadError(ExitCause.OOM_LOAD, f"mtmd could not load the projector {path} for this model")
        if not mtmd.mtmd_support_vision(self.handle):
            raise LoadError(ExitCause.STARTUP, f"the projector {path} does not support images")
        if model.metadata.get("general.architecture", "").startswith("hunyuan"):
            raise LoadError(
                ExitCause.STARTUP,
                "image positions of this model depend on the whole prompt, which is not supported; remove mmproj",
            )
        self._uses_mrope = bool(mtmd.mtmd_decode_use_mrope(self.handle))
        self._marker = mtmd.mtmd_default_marker()
        self._options = mtmd.mtmd_helper_init_opt_default()
        self._options.video_params.ffmpeg_bin_dir = _NO_PROGRAMS

    def close(self) -> None:
        """Frees the projector. Call it before the model is closed."""
        self._mtmd.mtmd_free(self.handle)

    def read(self, data: bytes) -> list[Sequence[int] | ImageTile]:
        """The prompt parts of an image file: text tokens and image tiles, in order.

        Raises ValueError if the file cannot be decoded as an image.
        """
        mtmd = self._mtmd
        buffer = (ctypes.c_uint8 * len(data)).from_buffer_copy(data)
        bitmap = mtmd.mtmd_helper_bitmap_init_from_buf(self.handle, buffer, len(data), False, self._options)
        if not bitmap:
            raise ValueError("it cannot be decoded")
        chunks = mtmd.mtmd_input_chunks_init()
        try:
            text = mtmd.mtmd_input_text(self._marker, len(self._marker), False, True)
            images = (ctypes.c_void_p * 1)(bitmap)
            if mtmd.mtmd_tokenize(self.handle, chunks, ctypes.byref(text), images, 1) != 0:
                raise ValueError("the projector cannot divide it into tiles")
            return [
                self._part(mtmd.mtmd_input_chunks_get(chunks, index))
                for index in range(mtmd.mtmd_input_chunks_size(chunks))
            ]
        finally:
            mtmd.mtmd_input_chunks_free(chunks)
            mtmd.mtmd_bitmap_free(bitmap)

    def encode(self, tile: ImageTile) -> None:
        """Computes the embedding rows of a tile that was read; raises RuntimeError when mtmd fails."""
        mtmd = self._mtmd
        if mtmd.mtmd_encode_chunk(self.handle, tile.source) != 0:
            raise RuntimeError("the projector could not encode an image")
        rows = mtmd.mtmd_get_output_embd(self.handle)
        tile.rows = np.ctypeslib.as_array(rows, shape=(tile.n_tokens, self.width)).copy()

    def _part(self, chunk: Any) -> Sequence[int] | ImageTile:
        mtmd = self._mtmd
        if mtmd.mtmd_input_chunk_get_type(chunk) == mtmd.MTMD_INPUT_CHUNK_TYPE_TEXT:
            count = ctypes.c_size_t()
            tokens = mtmd.mtmd_input_chunk_get_tokens_text(chunk, ctypes.byref(count))
            return [int(token) for token in tokens[: count.value]]
        n_tokens = int(mtmd.mtmd_input_chunk_get_n_tokens(chunk))
        kept = mtmd.mtmd_input_chunk_copy(chunk)
        tile = ImageTile(
            n_tokens=n_tokens,
            n_positions=int(mtmd.mtmd_input_chunk_get_n_pos(chunk)),
            non_causal=bool(mtmd.mtmd_decode_use_non_causal(self.handle, chunk)),
            source=kept,
        )
        if self._uses_mrope:
            tile.positions = self._positions(chunk, n_tokens, 0)
            tile.moves = self._positions(chunk, n_tokens, 1) - tile.positions
        weakref.finalize(tile, mtmd.mtmd_input_chunk_free, kept)
        return tile

    def _positions(self, chunk: Any, n_tokens: int, start: int) -> np.ndarray:
        """Positions of the tokens for an image that starts at `start`: time, row, column and a fourth section."""
        mtmd = self._mtmd
        places = (mtmd.mtmd_decoder_pos * n_tokens)()
        mtmd.mtmd_helper_image_get_decoder_pos(mtmd.mtmd_input_chunk_get_tokens_image(chunk), start, places)
        found = np.ctypeslib.as_array(places).view(np.uint32).reshape(n_tokens, 4).astype(np.int32)
        return np.ascontiguousarray(found[:, [0, 2, 1, 3]].T)


def _params(device: int | None, threads: int) -> Any:
    from llama_cpp import mtmd_cpp as mtmd

    params = mtmd.mtmd_context_params_default()
    params.use_gpu = device is not None
    params.device = device
    params.n_threads = threads
    params.print_timings = False
    return params
