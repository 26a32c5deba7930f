"""Real ranks over gloo compute together what one process computes, and read only their own part of the weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist

from paged_run import PagedRun
from stepahead.worker.layers import ParallelLMHead, Placement, VocabParallelEmbedding
from stepahead.worker.loader import checkpoint_weights
from stepahead.worker.model_config import read_model_config
from stepahead.worker.models.transformer import Transformer
from stepahead.worker.parallel import Link, ParallelGroup
from stepahead.worker.weights import fill_slots
from tiny_models import make_tiny_model

if TYPE_CHECKING:
    from conftest import Ranks

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("gloo")]

CPU = torch.device("cpu")


def test_all_reduce_sums_in_place_and_all_gather_keeps_the_order_of_ranks(ranks: Ranks) -> None:
    group = ParallelGroup(ranks.rank, ranks.size)
    mine = torch.full((2, 3), float(ranks.rank + 1))
    total = group.all_reduce(mine)
    assert total is mine
    assert torch.equal(mine, torch.full((2, 3), float(sum(range(1, ranks.size + 1)))))
    gathered = group.all_gather(torch.tensor([[ranks.rank], [10 + ranks.rank]]), -1)
    assert gathered.tolist() == [list(range(ranks.size)), [10 + rank for rank in range(ranks.size)]]


def test_a_link_carries_tensors_in_the_order_they_were_sent(ranks: Ranks) -> None:
    link = Link(1 - ranks.rank, dist.new_group([0, 1])) if ranks.rank < 2 else None
    sent = [torch.arange(4) + n for n in range(3)]
    if link is not None and ranks.rank == 0:
        for transfer in [link.send(tensor) for tensor in sent]:
            transfer.finish()
    elif link is not None:
        received = [link.receive(torch.zeros(4, dtype=torch.int64)) for _ in sent]
        assert [transfer.finish().tolist() for transfer in received] == [tensor.tolist() for tensor in sent]


def test_embedding_and_head_with_a_divided_vocabulary_are_whole_again(ranks: Ranks) -> None:
    weight = torch.randn(7, 3, generator=torch.Generator().manual_seed(0))
    place = Placement(torch.float32, CPU, ParallelGroup(ranks.rank, ranks.size))
    embedding = VocabParallelEmbedding(7, 3, place)
    fill_slots(embedding.slots(""), [("weight", weight)])
    head = ParallelLMHead(7, 3, place, shared=embedding.weight)
    rows = embedding(torch.arange(7, dtype=torch.int32))
    assert torch.equal(rows, weight)
    torch.testing.assert_close(head(rows), weight @ weight.T)


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3ForCausalLM"])
def test_a_divided_model_gives_the_logits_of_the_whole_from_its_share_of_the_weights(
    ranks: Ranks, architecture: str
) -> None:
    folder = ranks.folder / architecture
    if ranks.rank == 0:
        make_tiny_model(architecture, folder)
    ranks.meet()
    config = read_model_config(folder)

    def logits(group: ParallelGroup) -> tuple[torch.Tensor, int]:
        read = 0

        class Counted:
            def __init__(self, source: torch.Tensor) -> None:
                self.source = source
                self.shape = source.shape

            def __getitem__(self, part: tuple[slice, ...]) -> torch.Tensor:
                nonlocal read
                read += self.source[part].numel()
                return self.source[part]

        model = Transformer(config, torch.float32, CPU, group)
        model.load_weights((name, Counted(source[...])) for name, source in checkpoint_weights(folder))
        run = PagedRun(model)
        return torch.cat([run.step([[3, 1, 4, 1, 5]])[0], run.step([[9]])[0]]), read

    whole, all_weights = logits(ParallelGroup())
    mine, my_weights = logits(ParallelGroup(ranks.rank, ranks.size))
    torch.testing.assert_close(mine, whole, atol=1e-4, rtol=1e-4)
    assert my_weights < 0.7 * all_weights, "the norms are on every rank, the rest is divided"
