"""Reading parts of stored tensors, plain or in FP8 blocks, a slab at a time."""

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from dsa_compile.errors import CheckpointError
from dsa_compile.weights.block_fp8 import BLOCK, blocks, quantize_rows
from dsa_compile.weights.layout import Matrix, Part
from dsa_compile.weights.safetensors_file import SafetensorsFile
from dsa_compile.weights.validation import FP8
from dsa_compile.weights.windows import Window, sizes

# Bytes of stored data held at once when they cannot be read straight into place.
_SLAB = 8 << 20


class StoredReader:
    """Reads tensors of checkpoint files; not for several threads at once.

    Args:
        homes: for each key the file that holds it.
        block: rows and columns of FP8 blocks; None where nothing is stored in FP8.
    """

    def __init__(self, homes: Mapping[str, SafetensorsFile], block: tuple[int, int] | None) -> None:
        self._homes = homes
        self._block = block
        self._raw, self._values = _Scratch(), _Scratch()

    def read(self, part: Part, window: Window, out: Tensor) -> None:
        """Fill ``out`` (of the window's shape, any strides, dtype or device) from one tensor.

        Only what the window shows is read, of FP8 blocks the rows of their scales too.
        """
        if self._homes[part.key].tensors[part.key].dtype == FP8:
            self._read_blocks(part, window, out)
        else:
            self._read_plain(part.key, part.shape, window, 0, out)

    def _read_plain(
        self, key: str, shape: Sequence[int], window: Window, first: int, out: Tensor
    ) -> None:
        """Copy and convert a part of the tensor that begins at element ``first``."""
        if len(shape) > 2:
            inner = math.prod(shape[1:])
            for number, matrix in enumerate(out):
                start = first + (window[0].start + number) * inner
                self._read_plain(key, shape[1:], window[1:], start, matrix)
            return
        home = self._homes[key]
        dtype = home.tensors[key].dtype
        stride = shape[1] if len(shape) == 2 else 1
        first += window[0].start * stride + (window[1].start if len(shape) == 2 else 0)
        if dtype == out.dtype and out.is_contiguous() and out.device.type == "cpu":
            home.read_rows(key, first, stride, out)
            return
        step = max(1, _SLAB // (math.prod(out.shape[1:]) * dtype.itemsize))
        for row in range(0, len(out), step):
            target = out[row : row + step]
            slab = self._raw.take(target.shape, dtype)
            home.read_rows(key, first + row * stride, stride, slab)
            target.copy_(slab)

    def _read_blocks(self, part: Part, window: Window, out: Tensor) -> None:
        """Dequantise a part of a matrix in FP8 blocks."""
        assert self._block is not None
        rows, columns = window
        height, width = self._block[0], part.shape[1]
        base = rows.start // height
        scales = self._spread_scales(part, slice(base, -(-rows.stop // height)), columns)
        step = max(height, _SLAB // sizes(window)[1] // height * height)
        for start in range(rows.start, rows.stop, step):
            stop = min(start + step, rows.stop)
            slab = self._raw.take((stop - start, columns.stop - columns.start), FP8)
            self._homes[part.key].read_rows(part.key, start * width + columns.start, width, slab)
            for first, last in _block_rows(start, stop, height):
                stored = slab[first - start : last - start]
                values = self._values.take(stored.shape, torch.float32).copy_(stored)
                values *= scales[first // height - base]
                out[first - rows.start : last - rows.start].copy_(values)

    def read_matrix(
        self,
        part: Part,
        matrix: Matrix,
        window: Window,
        values: Tensor | None,
        scales: Tensor | None,
    ) -> None:
        """Fill e4m3 values and fp32 scales, where given, with blocks of 128×128 of a matrix.

        What is stored in such blocks is copied; anything else is quantised so. Only what the window
        shows is read, and of stored scales the rows.

        Args:
            part: the stored tensor.
            matrix: of it.
            window: rows and columns of the matrix.
            values: of the window's shape.
            scales: one a block of the window.

        Raises:
            CheckpointError: see :meth:`check_blocks`.
        """
        self.check_blocks(part)
        home = self._homes[part.key]
        if home.tensors[part.key].dtype != FP8:
            self._quantize(part, matrix, window, values, scales)
            return
        rows, columns = window
        if scales is not None:
            across = slice(columns.start // BLOCK, blocks(columns.stop))
            down = slice(rows.start // BLOCK, blocks(rows.stop))
            scales.copy_(self._scales(part, down)[:, across])
        if values is None:
            return
        tall, wide = sizes(window)
        step = max(BLOCK, _SLAB // wide)
        for row in range(0, tall, step):
            target = values[row : row + step]
            slab = self._raw.take(target.shape, FP8)
            start = matrix.first + (rows.start + row) * matrix.width + columns.start
            home.read_rows(part.key, start, matrix.width, slab)
            target.copy_(slab)

    def check_blocks(self, part: Part) -> None:
        """Refuse a tensor that :meth:`read_matrix` cannot give in blocks of 128×128.

        Raises:
            CheckpointError: stored in blocks of another size.
        """
        home = self._homes[part.key]
        if home.tensors[part.key].dtype == FP8 and self._block != (BLOCK, BLOCK):
            raise CheckpointError(
                f"{home.path}: {part.key} is quantised in blocks of {self._block}, recipe fp8 "
                f"takes {BLOCK}x{BLOCK}; compile with --recipe bf16"
            )

    def _quantize(
        self,
        part: Part,
        matrix: Matrix,
        window: Window,
        values: Tensor | None,
        scales: Tensor | None,
    ) -> None:
        """Quantise the blocks in which a window lies; scales take one that begins a block."""
        home = self._homes[part.key]
        dtype = home.tensors[part.key].dtype
        rows, columns = window
        left = columns.start // BLOCK * BLOCK
        wide = min(blocks(columns.stop) * BLOCK, matrix.width) - left
        across = slice(columns.start - left, columns.stop - left)
        top, bottom = rows.start // BLOCK * BLOCK, min(blocks(rows.stop) * BLOCK, matrix.height)
        step = max(BLOCK, _SLAB // wide // BLOCK * BLOCK)
        for row in range(top, bottom, step):
            stop = min(row + step, bottom)
            slab = self._raw.take((stop - row, wide), dtype)
            home.read_rows(part.key, matrix.first + row * matrix.width + left, matrix.width, slab)
            quantized, scale = quantize_rows(slab.float())
            first, last = max(row, rows.start), min(stop, rows.stop)
            if values is not None:
                target = values[first - rows.start : last - rows.start]
                target.copy_(quantized[first - row : last - row, across])
            if scales is not None:
                scales[(row - top) // BLOCK : blocks(stop - top)].copy_(scale)

    def _spread_scales(self, part: Part, rows: slice, columns: slice) -> Tensor:
        """Scales of rows of blocks, spread over some columns: fp32 [block rows, columns]."""
        assert self._block is not None
        return self._scales(part, rows).repeat_interleave(self._block[1], dim=1)[:, columns]

    def _scales(self, part: Part, rows: slice) -> Tensor:
        """fp32 [block rows, block columns]."""
        assert self._block is not None
        home = self._homes[part.scale_key]
        width = home.tensors[part.scale_key].shape[-1]
        first = part.first_scales(self._block) + rows.start
        dtype = home.tensors[part.scale_key].dtype
        scale = torch.empty((rows.stop - rows.start, width), dtype=dtype)
        home.read_elements(part.scale_key, first * width, scale)
        if dtype == torch.uint8:  # exponents as bytes
            scale = scale.view(torch.float8_e8m0fnu)
        return scale.float()


def _block_rows(start: int, stop: int, height: int) -> Iterator[tuple[int, int]]:
    """Rows from ``start`` to ``stop``, cut where blocks begin."""
    while start < stop:
        end = min(stop, (start // height + 1) * height)
        yield start, end
        start = end


class _Scratch:
    """Memory kept between reads; taken and freed each time, it would fragment the heap."""

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A contiguous tensor of undefined content, valid until the next call."""
        size = math.prod(shape) * dtype.itemsize
        if size > len(self._bytes):
            self._bytes = torch.empty(max(size, _SLAB), dtype=torch.uint8)
        return self._bytes[:size].view(dtype).view(*shape)
