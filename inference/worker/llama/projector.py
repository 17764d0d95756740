"""A vision projector over a model, through llama.cpp's mtmd: image files in, embedding rows out; decides nothing."""

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
"""Where mtmd looks for ffmpeg. It hands whatever it cannot decode to that program; here is none."""


class Projector:
    """Reads images for one model. `read` and `encode` are called from one thread."""

    def __init__(self, path: str, model: Model, device: int | None, threads: int) -> None:
        """Allocates, and encodes once to see that it works; `device` None: on the CPU.

        Raises LoadError(OOM_LOAD) when mtmd returns NULL, whose log says why.
        """
        from llama_cpp import mtmd_cpp as mtmd

        self._mtmd = mtmd
        self._model = model
        self.width = int(lib.llama_model_n_embd_inp(model.handle))
        """Numbers of one embedding row."""
        mtmd.mtmd_helper_log_set(library_log_callback(), ctypes.c_void_p(0))
        self.handle = mtmd.mtmd_init_from_file(path.encode(), model.handle, _params(device, threads))
        if not self.handle:
            raise LoadError(ExitCause.OOM_LOAD, f"mtmd could not load the projector {path} for this model")
        if not mtmd.mtmd_support_vision(self.handle):
            raise LoadError(ExitCause.STARTUP, f"the projector {path} reads no images")
        if model.metadata.get("general.architecture", "").startswith("hunyuan"):
            raise LoadError(
                ExitCause.STARTUP, "images of this model are numbered across a prompt, which is not supported"
            )
        self._uses_mrope = bool(mtmd.mtmd_decode_use_mrope(self.handle))
        self._marker = mtmd.mtmd_default_marker()
        self._options = mtmd.mtmd_helper_init_opt_default()
        self._options.video_params.ffmpeg_bin_dir = _NO_PROGRAMS

    def close(self) -> None:
        """Frees the projector; before the model."""
        self._mtmd.mtmd_free(self.handle)

    def read(self, data: bytes) -> list[Sequence[int] | ImageTile]:
        """What stands in a prompt for an image file: runs of text tokens and pictures, in order.

        Raises ValueError for a file that is no image, whatever its beginning claims.
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
                raise ValueError("it cannot be cut into what the projector reads")
            return [
                self._part(mtmd.mtmd_input_chunks_get(chunks, index))
                for index in range(mtmd.mtmd_input_chunks_size(chunks))
            ]
        finally:
            mtmd.mtmd_input_chunks_free(chunks)
            mtmd.mtmd_bitmap_free(bitmap)

    def encode(self, tile: ImageTile) -> None:
        """Computes the embedding rows of a picture that was read; raises RuntimeError when mtmd fails."""
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
        """Where the tokens are when the image begins at `start`: time, row, column and a fourth section."""
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
