"""An engine on two hosts: two network namespaces with a cable between them, nothing else in common but the disk."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import stepahead
from oracle import token_ids
from stepahead import LLM, SamplingParams
from stepahead.worker.link_key import write_key_file
from tiny_models import make_tiny_model

pytestmark = pytest.mark.timeout(100)

HERE, THERE = "10.213.77.1", "10.213.77.2"
PORT = 7791
PROMPTS = [[5], [7, 8, 9], list(range(10, 40))]
DEADLINE = 60


@dataclass(frozen=True)
class Hosts:
    """Names of namespaces."""

    engine: str
    other: str

    def command(self, host: str, *arguments: str) -> list[str]:
        return ["ip", "netns", "exec", host, sys.executable, *arguments]


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    if shutil.which("ip") is None:
        pytest.skip("needs the command ip (on Debian: apt-get install iproute2)")
    if os.geteuid() != 0:
        pytest.skip("needs root, to make network namespaces")
    mark = secrets.token_hex(3)
    made = Hosts(f"sa-{mark}-a", f"sa-{mark}-b")
    try:
        try:
            for name in (made.engine, made.other):
                ip("netns", "add", name)
            ip("link", "add", f"v{mark}a", "netns", made.engine, "type", "veth",
               "peer", "name", f"v{mark}b", "netns", made.other)  # fmt: skip
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces may be made here: {error.stderr.strip()}")
        for name, device, address in ((made.engine, f"v{mark}a", HERE), (made.other, f"v{mark}b", THERE)):
            ip("-n", name, "address", "add", f"{address}/24", "dev", device)
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", device, "up")
        yield made
    finally:
        for name in (made.engine, made.other):  # the cable goes with its ends
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


ENGINE = """
import json, sys
from stepahead import LLM, SamplingParams
folder, prompts, settings = json.loads(sys.argv[1])
with LLM(folder, device="cpu", skip_tokenizer_init=True, **settings) as llm:
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True), use_tqdm=False)
    print(json.dumps([list(output.outputs[0].token_ids) for output in outputs]))
"""


def test_ranks_on_two_hosts_give_the_tokens_of_one_process(hosts: Hosts, tmp_path: Path) -> None:
    folder = make_tiny_model("LlamaForCausalLM", tmp_path)
    key = tmp_path / "key"
    write_key_file(key)
    with LLM(str(folder), device="cpu", skip_tokenizer_init=True, executor="uni") as llm:
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        alone = [token_ids(output) for output in llm.generate(PROMPTS, params, use_tqdm=False)]
    address = f"tcp://{HERE}:{PORT}"
    links = {"executor": "external", "executor_address": address, "key_file": str(key), "tensor_parallel_size": 2}
    worker = ["-m", "stepahead.worker", "--connect", address, "--key-file", str(key), "--rank"]
    environment = {**os.environ, "PYTHONPATH": str(Path(stepahead.__file__).parent.parent), "OMP_NUM_THREADS": "1"}
    commands = [
        hosts.command(hosts.engine, "-c", ENGINE, json.dumps([str(folder), PROMPTS, links])),
        hosts.command(hosts.engine, *worker, "0"),
        hosts.command(hosts.other, *worker, "1"),
    ]
    processes: list[subprocess.Popen[str]] = []
    try:
        for command in commands:
            processes.append(
                subprocess.Popen(
                    command, env=environment, cwd="/tmp", text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
                )
            )
        said = [process.communicate(timeout=DEADLINE) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    errors = "\n".join(error for _, error in said)
    assert [process.returncode for process in processes] == [0, 0, 0], errors
    assert json.loads(said[0][0]) == alone
