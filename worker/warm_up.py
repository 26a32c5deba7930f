"""The first steps of a model compile its kernels and build its matrix products: done at start-up, on no data."""

from __future__ import annotations

import numpy as np
import torch

from .attention import AttentionMetadata
from .messages import NewRequest, SamplingOptions, StepPlan
from .model_runner import ModelRunner
from .models.base import Model
from .parallel import ONLY_STAGE, PipelineStage


def run_whole_steps(runner: ModelRunner, block_size: int, max_model_len: int) -> None:
    """Steps of a request in slot 0 and block 0, which the first real ones overwrite: prefill that ends in a random
    draw; prefill and decode that are greedy; decode planned for the longest context, for which attention takes other
    kernels. Waits. Does nothing when max_model_len has no room for them. Raises: what a step raises."""
    if max_model_len < 4:
        return
    nothing, row = np.zeros(0, np.int32), np.zeros(1, np.int32)
    blocks = np.zeros(-(-4 // block_size), np.int32)
    drawn, greedy = (
        NewRequest(0, np.zeros(2, np.int32), 2, 0, blocks, options)
        for options in (SamplingOptions(seed=0, top_k=2, top_p=0.5), SamplingOptions(seed=0, temperature=0.0))
    )
    steps = ((drawn, 2, 2), (greedy, 2, 2), (None, 1, 3), (None, 1, max_model_len))
    for step, (request, num_query, max_seq_len) in enumerate(steps):
        new = [] if request is None else [request]
        runner.execute(
            StepPlan(step, new, nothing, nothing, nothing, row, row + num_query, np.ones(1, bool), nothing, max_seq_len)
        )
        runner.sample(step, None).get_output()


@torch.inference_mode()
def run_blank_step(
    model: Model,
    device: torch.device,
    block_size: int,
    num_tokens: int,
    query_len: int,
    stage: PipelineStage = ONLY_STAGE,
) -> torch.Tensor | None:
    """Launched work: a forward pass of rows of query_len tokens (the last may have fewer), without computed
    tokens, on one KV block that nothing is written to. Returns the logits of as many tokens as there are rows, None
    on a stage that has none; nothing goes from stage to stage."""
    rows = -(-num_tokens // query_len)
    start = [min(row * query_len, num_tokens) for row in range(rows + 1)]
    query_start = torch.tensor(start, dtype=torch.int32, device=device)
    attention = AttentionMetadata(
        query_start=query_start,
        seq_lens=query_start.diff(),
        block_tables=torch.zeros((rows, -(-query_len // block_size)), dtype=torch.int32, device=device),
        slot_mapping=torch.full((num_tokens,), -1, dtype=torch.int64, device=device),
        max_query_len=query_len,
        max_seq_len=query_len,
    )
    width, dtype = model.hidden
    inputs = torch.zeros(num_tokens, dtype=torch.int32, device=device)
    if not stage.first:
        inputs = torch.zeros((num_tokens, width), dtype=dtype, device=device)
    positions = torch.arange(num_tokens, dtype=torch.int64, device=device) % query_len
    hidden = model.forward(inputs, positions, model.allocate_kv_cache(1, block_size), attention)
    return model.compute_logits(hidden[:rows]) if stage.last else None
