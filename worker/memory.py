"""How many KV blocks fit."""

from __future__ import annotations

import psutil
import torch

from ..config import ResolvedConfig
from ..errors import ConfigError
from ..kernels.gumbel_sample import gumbel_sample
from ..kernels.top_k_top_p import mask_top_k_top_p_min_p
from .models.base import Model
from .parallel import ONLY_STAGE, PipelineStage
from .warm_up import run_blank_step

_GIB = 1 << 30
_CPU_SHARE = 4
_CPU_MOST = 4 * _GIB

_BATCH_BYTES_PER_TOKEN = 8
"""The persistent batch holds an int32 token id for each place of each slot; the rest of it is smaller."""


def kv_capacity(config: ResolvedConfig, device: torch.device, model: Model, stage: PipelineStage = ONLY_STAGE) -> int:
    """KV blocks there is memory for, and no more than max_num_seqs requests of max_model_len can hold.

    num_kv_blocks decides, else kv_cache_memory_bytes, else the device's memory (on CUDA a profile run finds
    what a step needs besides). On a CPU the ranks share its memory. Raises: ConfigError when not even
    one block fits.
    """
    settings = config.settings
    if settings.num_kv_blocks is not None:
        return settings.num_kv_blocks
    if settings.kv_cache_memory_bytes is not None:
        memory, source = settings.kv_cache_memory_bytes, "kv_cache_memory_bytes"
    elif device.type == "cuda":
        memory, source = cuda_kv_bytes(config, device, model, stage), "gpu_memory_utilization"
    else:
        share = min(psutil.virtual_memory().available // _CPU_SHARE, _CPU_MOST)
        memory, source = share // settings.world_size, "free memory"
    per_block = model.kv_bytes_per_block(settings.block_size)
    if memory < per_block:
        raise ConfigError(
            f"no room for the KV cache: {source} leaves {max(memory, 0)} bytes, one block of "
            f"block_size={settings.block_size} tokens takes {per_block}"
        )
    useful = settings.max_num_seqs * -(-config.max_model_len // settings.block_size)
    return min(memory // per_block, useful)


def cuda_kv_bytes(config: ResolvedConfig, device: torch.device, model: Model, stage: PipelineStage = ONLY_STAGE) -> int:
    """What gpu_memory_utilization leaves after weights, the largest step, and what others hold on this GPU."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    _profile_step(config, device, model, stage)
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    outside = max(0, total - free - torch.cuda.memory_reserved(device))
    batch = config.settings.max_num_seqs * config.max_model_len * _BATCH_BYTES_PER_TOKEN
    return int(total * config.settings.gpu_memory_utilization) - peak - outside - batch


@torch.inference_mode()
def _profile_step(
    config: ResolvedConfig, device: torch.device, model: Model, stage: PipelineStage = ONLY_STAGE
) -> None:
    """The forward pass and logits of the largest step, and what sampling it takes at most."""
    settings = config.settings
    tokens = min(settings.max_num_batched_tokens, settings.max_num_seqs * config.max_model_len)
    query_len = -(-tokens // min(settings.max_num_seqs, tokens))
    logits = run_blank_step(model, device, settings.block_size, tokens, query_len, stage)
    if logits is None:
        return
    raw = logits.log_softmax(1)  # lives until the sampled tokens' log-probabilities are gathered
    ones = torch.ones(len(logits), device=device)
    places = torch.zeros(len(logits), dtype=torch.int64, device=device)
    gumbel_sample(mask_top_k_top_p_min_p(logits / ones[:, None], ones.int(), ones / 2, ones / 2), ones, places, places)
    del raw
