"""Ranks that divide a model compute what one rank computes."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

from paged_run import PagedRun
from stepahead.errors import ConfigError
from stepahead.worker.layers import ParallelLMHead, Placement, VocabParallelEmbedding
from stepahead.worker.loader import checkpoint_weights
from stepahead.worker.model_config import ModelConfig, read_model_config
from stepahead.worker.models.transformer import Transformer
from stepahead.worker.parallel import ParallelGroup, PipelineStage
from stepahead.worker.weights import WeightSlot, fill_slots
from tiny_models import make_tiny_model

T = TypeVar("T")
CPU = torch.device("cpu")


class Exchange:
    """What the threads of one group share."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=20)
        self.tensors: dict[int, torch.Tensor] = {}


@dataclass(frozen=True)
class ThreadGroup(ParallelGroup):
    """Ranks that are threads of this process."""

    exchange: Exchange | None = None

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.copy_(torch.stack(self.collect(tensor)).sum(0))

    def all_gather(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        return torch.cat(self.collect(tensor), dim)

    def collect(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        assert self.exchange is not None
        self.exchange.tensors[self.rank] = tensor.clone()
        self.exchange.barrier.wait()
        tensors = [self.exchange.tensors[rank] for rank in range(self.size)]
        self.exchange.barrier.wait()
        return tensors


def on_every_rank(size: int, work: Callable[[ParallelGroup], T]) -> list[T]:
    exchange = Exchange(size)
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda rank: work(ThreadGroup(rank, size, None, exchange)), range(size)))


@pytest.mark.parametrize(
    ("architecture", "overrides", "size"),
    [
        ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}, 2),
        ("LlamaForCausalLM", {"tie_word_embeddings": True, "vocab_size": 321}, 2),
        ("Qwen2ForCausalLM", {}, 4),
        ("Qwen3ForCausalLM", {"head_dim": 24, "num_key_value_heads": 1}, 4),
    ],
)
def test_ranks_together_compute_the_logits_of_one(
    tmp_path: Path, architecture: str, overrides: dict[str, Any], size: int
) -> None:
    folder = make_tiny_model(architecture, tmp_path, **overrides)
    config = read_model_config(folder)

    def logits(group: ParallelGroup) -> torch.Tensor:
        model = Transformer(config, torch.float32, CPU, group)
        model.load_weights(checkpoint_weights(folder))
        run = PagedRun(model)
        return torch.cat([run.step([[3, 1, 4, 1, 5]])[0], run.step([[9]])[0]])

    expected = logits(ParallelGroup())
    for actual in on_every_rank(size, logits):
        torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


class Chain:
    """The stages of a pipeline as one model."""

    def __init__(self, stages: list[Transformer]) -> None:
        self.stages = stages

    def allocate_kv_cache(self, num_blocks: int, block_size: int) -> list[Any]:
        return [stage.allocate_kv_cache(num_blocks, block_size) for stage in self.stages]

    def forward(self, inputs: torch.Tensor, positions: torch.Tensor, kv_cache: list[Any], attention: Any) -> Any:
        for stage, kv in zip(self.stages, kv_cache, strict=True):
            inputs = stage.forward(inputs, positions, kv, attention)
        return inputs

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.stages[-1].compute_logits(hidden)


@pytest.mark.parametrize(
    ("architecture", "overrides", "size", "num_stages"),
    [
        ("LlamaForCausalLM", {"tie_word_embeddings": True}, 1, 3),
        ("LlamaForCausalLM", {"tie_word_embeddings": True, "num_key_value_heads": 1}, 2, 2),
        ("MistralForCausalLM", {"sliding_window": 3}, 1, 2),
        ("Qwen2ForCausalLM", {"use_sliding_window": True, "max_window_layers": 3, "sliding_window": 3}, 1, 4),
        ("Qwen3ForCausalLM", {}, 2, 3),
    ],
)
def test_stages_one_after_another_compute_the_logits_of_the_whole(
    tmp_path: Path, architecture: str, overrides: dict[str, Any], size: int, num_stages: int
) -> None:
    folder = make_tiny_model(architecture, tmp_path, num_hidden_layers=5, **overrides)
    config = read_model_config(folder)

    def logits(group: ParallelGroup, num_stages: int) -> torch.Tensor:
        stages = []
        for index in range(num_stages):
            stages.append(Transformer(config, torch.float32, CPU, group, PipelineStage(index, num_stages)))
            stages[-1].load_weights(checkpoint_weights(folder))
        run = PagedRun(Chain(stages))  # type: ignore[arg-type]
        return torch.cat([run.step([[3, 1, 4, 1, 5]])[0], run.step([[9]])[0]])

    expected = logits(ParallelGroup(), 1)
    for actual in on_every_rank(size, lambda group: logits(group, num_stages)):
        torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("num_layers", "num_stages"), [(5, 2), (5, 3), (4, 4), (7, 4)])
def test_every_layer_is_on_one_stage_and_the_last_one_has_no_more_than_others(num_layers: int, num_stages: int) -> None:
    shares = [PipelineStage(index, num_stages).layers(num_layers) for index in range(num_stages)]
    assert [layer for share in shares for layer in share] == list(range(num_layers))
    assert min(map(len, shares)) == len(shares[-1]) >= max(map(len, shares)) - 1


def test_a_stage_reads_only_its_own_weights_and_misses_those_that_are_not_there(tmp_path: Path) -> None:
    folder = make_tiny_model("LlamaForCausalLM", tmp_path, num_hidden_layers=3)
    config = read_model_config(folder)
    weights = {name: source[...] for name, source in checkpoint_weights(folder)}

    class Recorded:
        def __init__(self, name: str) -> None:
            self.name = name
            self.shape = weights[name].shape

        def __getitem__(self, part: tuple[slice, ...]) -> torch.Tensor:
            read.append(self.name)
            return weights[self.name][part]

    held: list[str] = []
    for index in range(3):
        read: list[str] = []
        model = Transformer(config, torch.float32, CPU, ParallelGroup(), PipelineStage(index, 3))
        expected = set(model.weight_shapes())
        model.load_weights((name, Recorded(name)) for name in weights)
        assert set(read) == expected
        held += read
        lost = min(name for name in read if "layers" in name)
        with pytest.raises(ConfigError, match=f"weight '{lost}' is missing"):
            Transformer(config, torch.float32, CPU, ParallelGroup(), PipelineStage(index, 3)).load_weights(
                item for item in weights.items() if item[0] != lost
            )
    assert sorted(held) == sorted(weights)


def tiny_config(**fields: Any) -> ModelConfig:
    sizes: dict[str, Any] = {
        "vocab_size": 10, "max_position": 8, "hidden_size": 8, "intermediate_size": 12,
        "num_heads": 4, "num_kv_heads": 2, "head_dim": 2,
    }  # fmt: skip
    return ModelConfig(architecture="LlamaForCausalLM", **{**sizes, **fields})


@pytest.mark.parametrize(
    ("fields", "size", "named"),
    [
        ({"num_heads": 6}, 4, "6 attention heads"),
        ({"num_heads": 12, "num_kv_heads": 3}, 2, "3 KV heads"),
        ({"num_heads": 12, "num_kv_heads": 3, "intermediate_size": 12}, 4, "3 KV heads"),
        ({"intermediate_size": 13}, 2, "13 rows of gate_proj"),
    ],
)
def test_sizes_that_do_not_divide_are_refused_naming_both(fields: dict[str, Any], size: int, named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Transformer(tiny_config(**fields), torch.float32, CPU, ParallelGroup(0, size))
    assert named in str(caught.value)
    assert f"tensor_parallel_size={size}" in str(caught.value)


def test_each_rank_reads_only_its_part() -> None:
    class Recorded:
        shape = (10, 8)

        def __init__(self) -> None:
            self.parts: list[tuple[slice, ...]] = []

        def __getitem__(self, part: tuple[slice, ...]) -> torch.Tensor:
            self.parts.append(part)
            return torch.zeros(self.shape)[part]

    source = Recorded()
    place = Placement(torch.float32, CPU, ParallelGroup(1, 2))
    fill_slots(VocabParallelEmbedding(10, 8, place).slots("e."), [("e.weight", source)])
    assert source.parts == [(slice(5, 10), slice(None))]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_vocabulary_is_divided_even_when_it_does_not_divide(size: int) -> None:
    weight = torch.randn(5, 3)

    def work(group: ParallelGroup) -> tuple[torch.Tensor, torch.Tensor]:
        place = Placement(torch.float32, CPU, group)
        embedding = VocabParallelEmbedding(5, 3, place)
        fill_slots(embedding.slots(""), [("weight", weight)])
        head = ParallelLMHead(5, 3, place, shared=embedding.weight)
        rows = embedding(torch.arange(5, dtype=torch.int32))
        return rows, head(rows)

    for rows, logits in on_every_rank(size, work):
        assert torch.equal(rows, weight)
        torch.testing.assert_close(logits, weight @ weight.T)


def test_slot_casts_into_its_target() -> None:
    target = torch.empty(2, dtype=torch.bfloat16)
    WeightSlot.whole(target).fill("norm", torch.tensor([1.0, 2.0]))
    assert target.tolist() == [1.0, 2.0]


DISTRIBUTED_RANK = """
import sys, torch
from stepahead.worker.parallel import ParallelGroup
rank, store = int(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)
torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
group = ParallelGroup(rank, 2)
print(group.all_reduce(torch.full((2, 2), rank + 1)).tolist(), group.all_gather(torch.full((2, 1), rank), -1).tolist())
torch.distributed.destroy_process_group()
"""


def test_collectives_work_over_torch_distributed(tmp_path: Path) -> None:
    def run(rank: int) -> str:
        command = [sys.executable, "-c", DISTRIBUTED_RANK, str(rank), str(tmp_path / "store")]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(run, range(2))) == ["[[3, 3], [3, 3]] [[0, 1], [0, 1]]\n"] * 2
