"""Weights load completely, or one line says which weight or file is at fault."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from paged_run import PagedRun
from stepahead.config import parse_settings, resolve
from stepahead.errors import ConfigError
from stepahead.worker.loader import checkpoint_weights, dummy_weights, load_model
from stepahead.worker.model_config import read_model_config
from stepahead.worker.models.base import Model
from stepahead.worker.parallel import ParallelGroup
from tiny_models import make_tiny_model

CPU = torch.device("cpu")
INDEX = "model.safetensors.index.json"


def load(folder: Path, **settings: Any) -> Model:
    config = resolve(parse_settings(str(folder), settings), read_model_config(folder), executor_supports_async=True)
    return load_model(config, CPU, ParallelGroup())


def logits(model: Model) -> torch.Tensor:
    return PagedRun(model).step([[5, 6, 7, 8]])[0]


def rewrite(folder: Path, change: Any) -> None:
    path = folder / "model.safetensors"
    weights = load_file(path)
    change(weights)
    save_file(weights, path)


def failure(folder: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        load(folder)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_tiny_model("LlamaForCausalLM", tmp_path / "model")


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    folder = make_tiny_model("LlamaForCausalLM", tmp_path / "sharded", max_shard_size="50KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 1
    return folder


def test_sharded_checkpoint_is_the_single_one(folder: Path, sharded: Path) -> None:
    torch.testing.assert_close(logits(load(sharded)), logits(load(folder)), rtol=0, atol=0)


def test_checkpoint_is_cast_to_the_dtype_asked_for(tmp_path: Path) -> None:
    folder = make_tiny_model("LlamaForCausalLM", tmp_path, dtype="bfloat16")
    as_stored: Any = load(folder)
    widened: Any = load(folder, dtype="float32")
    assert as_stored.norm.weight.dtype == torch.bfloat16
    assert torch.equal(widened.norm.weight, as_stored.norm.weight.float())


def test_missing_weight_is_named(folder: Path) -> None:
    rewrite(folder, lambda weights: weights.pop("model.layers.1.mlp.up_proj.weight"))
    assert "'model.layers.1.mlp.up_proj.weight' is missing" in failure(folder)


def test_unexpected_weight_is_named(folder: Path) -> None:
    rewrite(folder, lambda weights: weights.update({"model.layers.0.self_attn.q_norm.weight": torch.ones(8)}))
    assert "unexpected weight 'model.layers.0.self_attn.q_norm.weight'" in failure(folder)


def test_misshapen_weight_is_named_with_both_shapes(folder: Path) -> None:
    rewrite(folder, lambda weights: weights.update({"model.norm.weight": torch.ones(31)}))
    message = failure(folder)
    assert "'model.norm.weight'" in message
    assert "[31]" in message
    assert "[32]" in message


def test_weight_of_integers_is_named(folder: Path) -> None:
    rewrite(folder, lambda weights: weights.update({"model.norm.weight": torch.ones(32, dtype=torch.int8)}))
    assert "'model.norm.weight' has dtype torch.int8" in failure(folder)


def test_stored_rope_frequencies_of_old_checkpoints_are_ignored(folder: Path) -> None:
    expected = logits(load(folder))
    rewrite(folder, lambda weights: weights.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}))
    assert torch.equal(logits(load(folder)), expected)


def test_stored_copy_of_tied_embeddings_is_ignored(tmp_path: Path) -> None:
    folder = make_tiny_model("LlamaForCausalLM", tmp_path, tie_word_embeddings=True)
    expected = logits(load(folder))
    rewrite(
        folder,
        lambda weights: weights.update({"lm_head.weight": weights["model.embed_tokens.weight"].clone()}),
    )
    assert torch.equal(logits(load(folder)), expected)


@pytest.mark.parametrize("keep", [0, 4, 100, -10])
def test_truncated_file_is_named(folder: Path, keep: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    assert f"cannot read weights {path}" in failure(folder)


def test_file_that_is_no_safetensors_is_named(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_text("version https://git-lfs.github.com/spec/v1\n" * 10)
    assert f"cannot read weights {path}" in failure(folder)


def test_shard_named_by_the_index_but_missing_is_named(sharded: Path) -> None:
    shard = sorted(sharded.glob("model-*.safetensors"))[1]
    shard.unlink()
    message = failure(sharded)
    assert str(shard) in message
    assert "missing" in message


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": 3}'])
def test_damaged_index_is_named(sharded: Path, text: str) -> None:
    (sharded / INDEX).write_text(text)
    assert f"cannot read {sharded / INDEX}" in failure(sharded)


def test_weight_in_two_shards_is_named(sharded: Path) -> None:
    shards = sorted(sharded.glob("model-*.safetensors"))
    save_file({**load_file(shards[1]), "model.norm.weight": torch.ones(32)}, shards[1])
    save_file({**load_file(shards[0]), "model.norm.weight": torch.ones(32)}, shards[0])
    assert "'model.norm.weight' is in the checkpoint twice" in failure(sharded)


def test_folder_without_weights_is_named(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert f"no weights in '{folder}'" in failure(folder)


def test_weights_are_read_only_when_indexed(folder: Path) -> None:
    for _, source in checkpoint_weights(folder):
        assert not isinstance(source, torch.Tensor)
        assert source[tuple(slice(0, 1) for _ in source.shape)].numel() == 1


def test_dummy_weights_need_no_file_and_do_not_change(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    first, second = logits(load(folder, load_format="dummy")), logits(load(folder, load_format="dummy"))
    assert torch.equal(first, second)
    assert not torch.equal(first, logits(load(folder, load_format="dummy", seed=1)))
    assert 0.1 < first.std() < 10


def test_dummy_norms_are_one_and_biases_zero() -> None:
    shapes = {"norm.weight": (4,), "q_proj.bias": (4,), "q_proj.weight": (4, 4)}
    weights = dict(dummy_weights(shapes, torch.float32, CPU, seed=0))
    assert torch.equal(weights["norm.weight"], torch.ones(4))
    assert torch.equal(weights["q_proj.bias"], torch.zeros(4))
    assert weights["q_proj.weight"].unique().numel() == 16


def test_index_that_names_no_shard_twice_reads_each_once(sharded: Path) -> None:
    names = [name for name, _ in checkpoint_weights(sharded)]
    assert sorted(names) == sorted(json.loads((sharded / INDEX).read_text())["weight_map"])
