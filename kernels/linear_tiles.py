"""bfloat16 matrix products on CPUs with AMX: one pass over the weights, in the order in which they lie in memory.

Up to 32 tokens cost what reading the weights costs. A task is 32 output features of a chunk of tokens: its weights
stay in the cache while the tokens pass. Results do not depend on the other tokens.
"""

from __future__ import annotations

import ctypes
import functools
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ._numba import NumbaFunction, NumbaKernel, numba_is_here

if TYPE_CHECKING:
    from . import _numba_language as nl

_CHUNK = 512
"""Tokens of a task: their inputs are to stay in what the weights leave of the caches."""

_AHEAD = 2
"""How many pairs of tiles before their use weights are asked for."""

_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18


@dataclass(frozen=True)
class TileWeight:
    """A matrix [out, in], in tiles: bfloat16 [out / 32, in / 32, 2, 16, 16, 2], in the order of use.

    gated: a block's first tile is of the gate, its second of as many rows of `up`.
    """

    tiles: torch.Tensor
    gated: bool


def fits_tiles(weight: torch.Tensor) -> bool:
    """weight: [out, in]."""
    is_right = weight.is_cpu and weight.dtype == torch.bfloat16 and not any(size % 32 for size in weight.shape)
    return is_right and numba_is_here() and tiles_are_here()


@functools.cache
def tiles_are_here() -> bool:
    """Whether this CPU multiplies tiles of bfloat16, and Linux lets this process. Asks it to."""
    information = Path("/proc/cpuinfo")
    if platform.machine() != "x86_64" or not information.is_file():
        return False
    flags = information.read_text().partition("\nflags")[2].partition("\n")[0].split()
    if not {"amx_bf16", "avx512_bf16"} <= set(flags):
        return False
    return ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) == 0


def to_tiles(weight: torch.Tensor, gated: bool) -> TileWeight:
    """weight: [out, in], see fits_tiles; gated: the gate's rows first, then those of `up`."""
    out_features, in_features = weight.shape
    halves = (2, out_features // 32) if gated else (out_features // 32, 2)
    tiles = weight.view(*halves, 16, in_features // 32, 16, 2)
    order = (1, 3, 0, 4, 2, 5) if gated else (0, 3, 1, 4, 2, 5)
    return TileWeight(tiles.permute(order).contiguous(), gated)


def linear_tiles(x: torch.Tensor, weight: TileWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """x: [t, in]. Returns [t, out], of a gated weight [t, out / 2]: silu(gate) * up."""
    num_tokens, in_features = x.shape
    blocks = weight.tiles.shape[0]
    assert x.dtype == weight.tiles.dtype
    assert in_features == weight.tiles.shape[1] * 32
    assert bias is None or (bias.dtype == x.dtype and bias.is_contiguous())
    if x.stride(1) != 1:
        x = x.contiguous()
    out = torch.empty((num_tokens, blocks * (16 if weight.gated else 32)), dtype=x.dtype)
    words = (
        x.data_ptr(), x.stride(0), weight.tiles.data_ptr(), out.data_ptr(), num_tokens, in_features, blocks,
        out.data_ptr() if bias is None else bias.data_ptr(),
    )  # fmt: skip
    constants = {
        "one": 1, "gated": int(weight.gated), "has_bias": int(bias is not None), "chunk": _CHUNK, "ahead": _AHEAD
    }  # fmt: skip
    num_tasks, work = blocks * -(-num_tokens // _CHUNK), weight.tiles.numel() * -(-num_tokens // 32)
    _multiply_loop.launch(x.dtype, words, num_tasks, work, constants)
    return out


@NumbaKernel
def _multiply_loop(args: nl.Args) -> None:
    config, sums = nl.int64_buffer(args, "one", 8), nl.float32_buffer(args, "one", 1024)
    blocks, chunk = nl.integer(args, 6), nl.constant(args, "chunk")
    has_rows = 0
    task = nl.next_task(args)
    while task >= 0:
        block, first = task % blocks, task // blocks * chunk
        end = min(nl.integer(args, 4), first + chunk)
        for token in range(first, end, 32):
            rows = min(32, end - token)
            if rows != has_rows:
                nl.tiles.config(config, min(rows, 16), max(rows - 16, 1))
                has_rows = rows
            _multiply(args, block, token, rows, token == first, sums)
            _write(args, block, token, rows, sums)
        task = nl.next_task(args)
    nl.tiles.release()


@NumbaFunction
def _multiply(args: nl.Args, block: int, token: int, rows: int, is_first: bool, sums: nl.Pointer) -> None:
    """Up to 32 tokens by 32 output features, into sums: float32 [rows, 32]. is_first: the weights are not cached."""
    x, stride, weight, size = nl.elements(args, 0), nl.integer(args, 1), nl.elements(args, 2), nl.integer(args, 5)
    start, ahead = block * size * 32, nl.constant(args, "ahead") * 1024
    nl.tiles.zero(0)
    nl.tiles.zero(1)
    if rows > 16:
        nl.tiles.zero(2)
        nl.tiles.zero(3)
        for k in range(0, size, 32):
            nl.tiles.load(4, x, token * stride + k, stride * 2)
            nl.tiles.load(6, weight, start + k * 32, 64)
            nl.tiles.load(5, x, (token + 16) * stride + k, stride * 2)
            nl.tiles.load(7, weight, start + k * 32 + 512, 64)
            nl.tiles.dot(0, 4, 6)
            nl.tiles.dot(1, 4, 7)
            nl.tiles.dot(2, 5, 6)
            nl.tiles.dot(3, 5, 7)
            if is_first:
                _ask_for(weight, start + k * 32 + ahead)
        nl.tiles.store(2, sums, 512, 128)
        nl.tiles.store(3, sums, 528, 128)
    else:
        for k in range(0, size, 32):
            nl.tiles.load(4, x, token * stride + k, stride * 2)
            nl.tiles.load(6, weight, start + k * 32, 64)
            nl.tiles.load(7, weight, start + k * 32 + 512, 64)
            nl.tiles.dot(0, 4, 6)
            nl.tiles.dot(1, 4, 7)
            if is_first:
                _ask_for(weight, start + k * 32 + ahead)
    nl.tiles.store(0, sums, 0, 128)
    nl.tiles.store(1, sums, 16, 128)


@NumbaFunction
def _write(args: nl.Args, block: int, token: int, rows: int, sums: nl.Pointer) -> None:
    """With the bias. Of a gate rounded after each step, as three operations of torch would."""
    out, bias, blocks = nl.elements(args, 3), nl.elements(args, 7), nl.integer(args, 6)
    gated = nl.constant(args, "gated")
    column, width = (block * 16, blocks * 16) if gated else (block * 32, blocks * 32)
    for row in range(rows):
        low, high = nl.load(sums, row * 32), nl.load(sums, row * 32 + 16)
        if nl.constant(args, "has_bias"):
            low, high = low + nl.load(bias, column), high + nl.load(bias, column + (width if gated else 16))
        place = (token + row) * width + column
        if gated:
            gate, up = nl.rounded(out, low), nl.rounded(out, high)
            nl.store(out, place, nl.rounded(out, nl.silu(gate)) * up)
        else:
            nl.tiles.store_pair(out, place, low, high)


@NumbaFunction
def _ask_for(weight: nl.Pointer, place: int) -> None:
    """Two tiles."""
    for i in range(0, 1024, 32):
        nl.prefetch(weight, place + i)
