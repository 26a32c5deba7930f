"""HashLM reads every token of its context, in place, and nothing else."""

from __future__ import annotations

import time

import torch

from step_driver import CPU, VOCAB_SIZE, context_logits, hash_model
from stepahead.worker.attention import AttentionMetadata

TOKENS = [5, 9, 9, 31, 2, 0, 77, 12]


def test_any_changed_token_changes_every_later_logit_and_no_earlier_one() -> None:
    model = hash_model()
    base = context_logits(model, TOKENS)
    for i in range(len(TOKENS)):
        changed = [*TOKENS[:i], (TOKENS[i] + 1) % VOCAB_SIZE, *TOKENS[i + 1 :]]
        same = (context_logits(model, changed) == base).all(1)
        assert same.tolist() == [p < i for p in range(len(TOKENS))]


def test_the_order_of_tokens_matters() -> None:
    model = hash_model()
    swapped = [TOKENS[1], TOKENS[0], *TOKENS[2:]]
    assert not torch.equal(context_logits(model, swapped)[-1], context_logits(model, TOKENS)[-1])


def test_swapped_blocks_in_the_table_change_the_logits() -> None:
    model = hash_model()
    (cache,) = model.allocate_kv_cache(num_blocks=5, block_size=4)

    def last_logits(table: list[int]) -> torch.Tensor:
        attention = AttentionMetadata(
            query_start=torch.tensor([0, 1], dtype=torch.int32),
            seq_lens=torch.tensor([8], dtype=torch.int32),
            block_tables=torch.tensor([table], dtype=torch.int32),
            slot_mapping=torch.tensor([4 * table[-1] + 3]),
            max_query_len=1,
            max_seq_len=8,
        )
        return model.compute_logits(model.forward(torch.tensor([12]).int(), torch.tensor([7]), [cache], attention))[0]

    cache[0].view(-1)[12:16] = torch.tensor(TOKENS[:4]).int()
    cache[0].view(-1)[4:8] = torch.tensor(TOKENS[4:]).int()
    assert torch.equal(last_logits([3, 1]), context_logits(model, TOKENS)[-1])
    assert not torch.equal(last_logits([1, 3]), context_logits(model, TOKENS)[-1])


def test_sampling_at_temperature_one_has_real_variety() -> None:
    logits = torch.cat([context_logits(hash_model(), [i, *TOKENS]) for i in range(20)])
    entropy = torch.distributions.Categorical(logits=logits).entropy()
    assert logits.min() >= 0
    assert logits.max() < 8
    assert 1.0 < entropy.mean() < 4.0
    assert len(logits.argmax(1).unique()) > 60


def test_step_ms_is_how_long_a_forward_takes_at_least() -> None:
    model = hash_model(step_ms=20)
    began = time.monotonic()
    context_logits(model, TOKENS)
    assert time.monotonic() - began >= 0.02


def test_it_has_no_weights_and_looks_for_none() -> None:
    model = hash_model()
    assert model.weight_shapes() == {}
    model.load_weights(iter(()))
    assert model.allocate_kv_cache(3, 16)[0][0].nbytes == 3 * model.kv_bytes_per_block(16)
    assert model.allocate_kv_cache(1, 16)[0][0].device == CPU
