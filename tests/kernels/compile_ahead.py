"""Compiles every launch of every Triton kernel for one NVIDIA architecture, without a GPU.

Run in a process of its own, because Triton's interpreter, once on, cannot be turned off:
    python compile_ahead.py 90
Prints one JSON object a line: case, kernel, shared (bytes of shared memory), error.
"""

import json
import sys
from collections.abc import Callable, Iterator

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from stepahead.kernels.combine_sampled_and_draft_tokens import combine_sampled_and_draft_tokens_triton
from stepahead.kernels.gumbel_sample import gumbel_sample_triton
from stepahead.kernels.kv_write import kv_write_triton
from stepahead.kernels.paged_attention import paged_attention_triton
from stepahead.kernels.post_update import post_update_triton
from stepahead.kernels.prepare_inputs import prepare_inputs_triton
from stepahead.kernels.rms_norm import add_rms_norm_triton, rms_norm_triton
from stepahead.kernels.rope import apply_rope_triton
from stepahead.kernels.silu_and_mul import silu_and_mul_triton
from stepahead.kernels.staged_write import staged_write_triton

TYPES = {
    torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.bool: "*i1",
    torch.int32: "*i32", torch.int64: "*i64",
}  # fmt: skip
Launch = tuple[JITFunction, tuple, dict]


def ints(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def attention(dtype: torch.dtype, dim: int, heads: int, kv_heads: int, max_seq_len: int) -> None:
    cache = torch.zeros(4, 16, kv_heads, dim, dtype=dtype)
    q = torch.zeros(32, heads, dim, dtype=dtype)
    paged_attention_triton(q, cache, cache, ints(2, 64), ints(3), ints(2), 0.1, 31, max_seq_len, 0)


def layers(dtype: torch.dtype) -> None:
    x, weight = torch.zeros(4, 4096, dtype=dtype), torch.zeros(4096, dtype=dtype)
    rms_norm_triton(x, weight, 1e-5)
    add_rms_norm_triton(x, x, weight, 1e-5)
    silu_and_mul_triton(x)
    q, k, v = x[:, :3072].view(4, 24, 128).split((16, 4, 4), dim=1)
    rms_norm_triton(q, weight[:128], 1e-5)
    apply_rope_triton(q, k, ints(4, dtype=torch.int64), torch.zeros(64, 128))
    cache = torch.zeros(4, 16, 4, 128, dtype=dtype)
    kv_write_triton(k, v, cache, cache, ints(4, dtype=torch.int64))


def state() -> None:
    slots, query_start, column, wide = ints(4), ints(5), ints(8), ints(8, 4096)
    positions = ints(16, dtype=torch.int64)
    prepare_inputs_triton(slots, query_start, column, wide, 16, 16, 13)
    for num_drafts in (0, 3):
        drafts = ints(8, num_drafts)
        combine_sampled_and_draft_tokens_triton(
            slots, query_start, positions, wide, column, column, ints(8, 1), drafts, 13
        )
        post_update_triton(
            slots, query_start, ints(4, num_drafts + 1), slots, slots if num_drafts else None,
            column, column, wide, ints(8, 1),
        )  # fmt: skip
    for dtype in (torch.int32, torch.float32, torch.bool, torch.int64):
        staged_write_triton(torch.zeros(8, 64, dtype=dtype), slots, slots, query_start, torch.zeros(9, dtype=dtype), 9)


def sampling() -> None:
    long = ints(4, dtype=torch.int64)
    gumbel_sample_triton(torch.zeros(4, 49152), torch.zeros(4), long, long)


CASES: dict[str, Callable[[], None]] = {
    "layers bf16": lambda: layers(torch.bfloat16),
    "layers fp32": lambda: layers(torch.float32),
    "attention bf16, d=128, split": lambda: attention(torch.bfloat16, 128, 32, 8, 8192),
    "attention bf16, d=64, group of 3": lambda: attention(torch.bfloat16, 64, 9, 3, 64),
    "attention fp16, d=256": lambda: attention(torch.float16, 256, 8, 4, 64),
    "attention fp32, d=128": lambda: attention(torch.float32, 128, 32, 8, 64),
    "attention fp32, d=256": lambda: attention(torch.float32, 256, 4, 4, 64),
    "attention fp32, d=80": lambda: attention(torch.float32, 80, 4, 4, 64),
    "batch state": state,
    "sampling": sampling,
}


def launches(case: Callable[[], None]) -> list[Launch]:
    """What a case would launch on a GPU: the same kernels, constants and warps."""
    recorded: list[Launch] = []

    def record(self: JITFunction, *args: object, grid: tuple, warmup: bool, **kwargs: object) -> None:
        recorded.append((self, args, kwargs))

    original, JITFunction.run = JITFunction.run, record
    try:
        case()
    finally:
        JITFunction.run = original
    return recorded


def compile_launch(launch: Launch, capability: int) -> int:
    """Returns the bytes of shared memory it takes."""
    function, args, kwargs = launch
    values = dict(zip(function.arg_names, args, strict=False)) | kwargs
    signature, constants, attributes = {}, {}, {}
    for param in function.params:
        value, place = values.pop(param.name), (param.num,)
        free = not param.is_constexpr and not param.do_not_specialize
        if isinstance(value, torch.Tensor):
            signature[param.name] = TYPES[value.dtype]
            if free:
                attributes[place] = [["tt.divisibility", 16]]
        elif param.is_constexpr or (free and value == 1):
            signature[param.name], constants[place] = "constexpr", value
        else:
            signature[param.name] = "fp32" if isinstance(value, float) else "i32"
            if free and isinstance(value, int) and value % 16 == 0:
                attributes[place] = [["tt.divisibility", 16]]
    source = ASTSource(function, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=values).metadata.shared


def results(capability: int) -> Iterator[dict]:
    for name, case in CASES.items():
        for launch in launches(case):
            result = {"case": name, "kernel": launch[0].__name__, "shared": 0, "error": ""}
            try:
                result["shared"] = compile_launch(launch, capability)
            except Exception as error:
                result["error"] = f"{type(error).__name__}: {error}"
            yield result


if __name__ == "__main__":
    for line in results(int(sys.argv[1])):
        print(json.dumps(line), flush=True)
