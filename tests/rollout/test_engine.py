"""A real engine: it starts from a model without weights, gets them by sync, and says of tokens what the model says."""

from __future__ import annotations

import http.client
import os
import re
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from time import sleep
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed import BroadcastOptions, ProcessGroupGloo

from engines import SECRET, Engine
from moejob_api.contract.answers import EngineAnswer
from moejob_api.contract.engines import CLIENT_IDLE_SECONDS, SERVER_IDLE_SECONDS
from moejob_api.contract.group_rendezvous import cancel_rendezvous, join_rendezvous
from moejob_api.contract.pods import HttpPath, engine_key, weights_key
from moejob_rollout.listener import HEAD_BYTES
from ports import free_port
from rollout.doors import opened
from rollout.references import log_probabilities, make_model, published_tensors, save_published, without

Start = Callable[..., Engine]
PROMPTS = [[(7 * number + place) % 512 for place in range(20)] for number in range(8)]
CLOSE = 1e-4
LOOK_SECONDS = 0.1
VLLM_IDLE_SECONDS = 5.0
FORKED = 0x40  # PF_FORKNOEXEC


@pytest.fixture(scope="module")
def moe(start: Start) -> Engine:
    return start("qwen3_moe").await_ready()


def updated(engine: Engine, version: str, *paths: Path) -> None:
    engine.post_or_fail("/pause", mode="keep")
    engine.post_or_fail("/start_weight_update")
    engine.post_or_fail("/update_weights", {"update_info": {"paths": [str(path) for path in paths]}})
    engine.post_or_fail("/finish_weight_update", {"weight_version": version})
    engine.post_or_fail("/reset_prefix_cache")
    engine.post_or_fail("/resume")


def distance(engine: Engine, reference: Any, temperature: float = 1.0) -> float:
    """Mean |log-probability of the engine - of Transformers| over answers that the engine samples."""
    apart: list[float] = []
    for seed, prompt in enumerate(PROMPTS):
        choice = engine.generate(prompt, max_tokens=24, seed=seed, temperature=temperature)["choices"][0]
        theirs = log_probabilities(reference, prompt, choice["token_ids"], temperature)
        mine = [token["logprob"] for token in choice["logprobs"]["content"]]
        apart += [abs(a - b) for a, b in zip(mine, theirs, strict=True)]
    return sum(apart) / len(apart)


@pytest.mark.parametrize("path", ["/v1/models", "/weight_info", "/pause", "/health", "/ping", "/metrics", "/nowhere"])
def test_every_path_asks_for_the_secret(moe: Engine, path: str) -> None:
    assert moe.get(path, secret=None).status == 401
    assert moe.get(path, secret="another").status == 401


def test_readiness_needs_no_secret(moe: Engine) -> None:
    assert moe.get("/ready", secret=None).status == 200


def test_an_engine_starts_without_a_traceback_in_its_log(moe: Engine) -> None:
    # Updates of other tests are meant to fail.
    begin, served, _ = moe.log.partition("Starting vLLM server")
    assert served
    assert "Traceback" not in begin
    assert "Chat template warmup failed" not in begin


def test_the_core_of_an_engine_is_a_fork_of_its_server_without_its_port(moe: Engine) -> None:
    lines = Path("/proc/net/tcp").read_text().splitlines()
    listening = {f"socket:[{line.split()[9]}]" for line in lines if f"{moe.port:04X} 00000000:0000 0A" in line}
    assert len(listening) == 1
    assert not listening & {str(path.readlink()) for path in Path(f"/proc/{core_of(moe)}/fd").iterdir()}


def core_of(engine: Engine) -> int:
    """The process that is a fork and has run no other program since."""
    (core,) = (pid for pid in engine.workers() if flags(pid) & FORKED)
    return core


def flags(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[6])


def test_a_stranger_is_bounded_by_the_whole_server_too(moe: Engine) -> None:
    ready = b"GET /ready HTTP/1.1\r\nHost: a\r\n\r\n"
    assert answered(moe, 3 * ready).count(b"HTTP/1.1 200") == 1
    # vLLM's own bound is 4 MiB.
    assert answered(moe, ready[:-2] + b"a: b\r\n" * HEAD_BYTES) == b""


def answered(engine: Engine, sent: bytes) -> bytes:
    """All that comes back until the engine hangs up."""
    found = b""
    with socket.create_connection(("127.0.0.1", engine.port), timeout=600) as client, suppress(ConnectionResetError):
        client.sendall(sent)
        while part := client.recv(65_536):
            found += part
    return found


def test_an_engine_keeps_a_connection_that_is_silent_for_longer_than_vllm_would(moe: Engine) -> None:
    asking = http.client.HTTPConnection("127.0.0.1", moe.port, timeout=300)
    for pause in (0.0, VLLM_IDLE_SECONDS + 1.5):
        sleep(pause)
        asking.request("GET", "/weight_info", headers={"Authorization": f"Bearer {engine_key(SECRET)}"})
        assert asking.getresponse().read()
    # The trainer closes it sooner.
    assert SERVER_IDLE_SECONDS > 2 * CLIENT_IDLE_SECONDS > 2 * VLLM_IDLE_SECONDS


def test_tokens_are_as_probable_as_transformers_says_after_each_update(moe: Engine, tmp_path: Path) -> None:
    for version, seed in (("1", 11), ("2", 12), ("3", 11)):
        reference = make_model("qwen3_moe", seed)
        updated(moe, version, save_published(reference, tmp_path / version))
        assert moe.get("/weight_info").body == {"weight_version": version}
        assert distance(moe, reference) < CLOSE


def test_an_update_without_one_tensor_is_seen_in_log_probabilities(moe: Engine, tmp_path: Path) -> None:
    updated(moe, "1", save_published(make_model("qwen3_moe", 11), tmp_path / "whole"))
    reference = make_model("qwen3_moe", 12)
    path = without(save_published(reference, tmp_path / "part"), "model.layers.1.mlp.experts.3.down_proj.weight")
    updated(moe, "2", path)
    assert distance(moe, reference) > CLOSE


def test_an_update_that_broke_off_leaves_nothing_that_the_next_one_counts(moe: Engine, tmp_path: Path) -> None:
    path = save_published(make_model("qwen3_moe", 11), tmp_path / "whole")
    part = without(path, "model.layers.1.mlp.experts.3.down_proj.weight")
    moe.post_or_fail("/pause", mode="keep")
    moe.post_or_fail("/start_weight_update")
    update = {"update_info": {"paths": [str(part), str(tmp_path / "is not there")]}}
    assert moe.post("/update_weights", update).status == 500
    reference = make_model("qwen3_moe", 12)
    updated(moe, "2", save_published(reference, tmp_path / "next"))
    assert distance(moe, reference) < CLOSE


def test_log_probabilities_are_those_of_the_distribution_that_was_sampled_from(moe: Engine, tmp_path: Path) -> None:
    reference = make_model("qwen3_moe", 13)
    updated(moe, "4", save_published(reference, tmp_path))
    assert distance(moe, reference, temperature=0.6) < CLOSE


def test_tokens_carry_the_version_of_the_weights_that_chose_them(moe: Engine, tmp_path: Path) -> None:
    old, new = (make_model("qwen3_moe", seed) for seed in (11, 12))
    paths = [save_published(model, tmp_path / str(number)) for number, model in enumerate((old, new))]
    updated(moe, "7", paths[0])
    choice, (before, behind) = _cut_answer(moe, paths)
    assert [span["version"] for span in (before, behind)] == ["7", "8"]
    assert (before["start"], before["end"], behind["end"]) == (0, behind["start"], 150)
    said = np.array([token["logprob"] for token in choice["logprobs"]["content"]])
    by_old, by_new = (log_probabilities(model, PROMPTS[0], choice["token_ids"]) for model in (old, new))
    expected = np.array([*by_old[: before["end"]], *by_new[before["end"] :]])
    assert np.abs(said - expected).max() < CLOSE
    # Weights that have nothing in common are far apart.
    assert np.abs(said - by_old)[before["end"] :].mean() > 0.1


def _cut_answer(engine: Engine, paths: Sequence[Path]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return an answer that got other weights in its middle, and its two spans."""
    # Tokens come too fast for each try to meet the middle.
    for _ in range(20):
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(engine.generate, PROMPTS[0], max_tokens=150, seed=1)
            sleep(LOOK_SECONDS)
            updated(engine, "8", paths[1])
            choice: dict[str, Any] = asked.result()["choices"][0]
        spans = choice["weight_versions"]
        if len(spans) == 2:
            return choice, spans
        updated(engine, "7", paths[0])
    raise AssertionError("no answer was cut in its middle")


def test_an_answer_that_is_aborted_returns_what_it_has(moe: Engine) -> None:
    part = _aborted_answer(moe)
    whole = moe.request_answer(PROMPTS[3], 150, 3).body
    assert (part.finish_reason, whole.finish_reason) == ("abort", "length")
    assert 0 < len(part.tokens) < len(whole.tokens) == 4 * 150
    assert whole.tokens.startswith(part.tokens)
    assert len(part.log_probabilities) == len(part.tokens)
    assert [(span.start, 4 * span.end) for span in part.spans] == [(0, len(part.tokens))]


def _aborted_answer(engine: Engine) -> EngineAnswer:
    for _ in range(20):
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(engine.request_answer, PROMPTS[3], 150, 3)
            sleep(LOOK_SECONDS)
            engine.post_or_fail("/pause", mode="abort")
            part: EngineAnswer = asked.result().body
        engine.post_or_fail("/resume")
        if part.finish_reason == "abort" and part.tokens:
            return part
    raise AssertionError("no answer was aborted in its middle")


def test_equal_seeds_give_equal_answers(moe: Engine) -> None:
    twice = [moe.generate(PROMPTS[1], max_tokens=16, seed=5)["choices"][0]["token_ids"] for _ in range(2)]
    assert twice[0] == twice[1] != moe.generate(PROMPTS[1], max_tokens=16, seed=6)["choices"][0]["token_ids"]


def test_more_prompts_are_answered_than_are_read_at_once(moe: Engine) -> None:
    prompts = [[(5 * number + place) % 512 for place in range(120)] for number in range(32)]

    def answered(seed: int) -> int:
        return len(moe.generate(prompts[seed], max_tokens=2, seed=seed)["choices"][0]["token_ids"])

    with ThreadPoolExecutor(len(prompts)) as pool:
        assert [*pool.map(answered, range(len(prompts)))] == [2] * len(prompts)


def test_an_engine_that_has_answered_leaves_the_cores_to_others(moe: Engine) -> None:
    moe.generate(PROMPTS[2], max_tokens=4)
    first = before = moe.cpu_seconds()
    sleep(LOOK_SECONDS)
    while (now := moe.cpu_seconds()) - before > LOOK_SECONDS / 2:
        before = now
        sleep(LOOK_SECONDS)
    # vLLM's own workers poll for a second before they sleep.
    assert now - first < 0.5


def test_an_answer_ends_at_the_stop_tokens_that_were_named(moe: Engine) -> None:
    whole = moe.generate(PROMPTS[2], max_tokens=16, seed=5)["choices"][0]["token_ids"]
    cut = moe.generate(PROMPTS[2], max_tokens=16, seed=5, stop_token_ids=[whole[7]])["choices"][0]
    assert (cut["token_ids"], cut["finish_reason"]) == (whole[: whole.index(whole[7]) + 1], "stop")


def test_an_answer_is_that_of_the_path_of_vllm(moe: Engine) -> None:
    for seed, prompt in enumerate(PROMPTS):
        theirs = moe.generate(prompt, max_tokens=24, seed=seed)["choices"][0]
        mine = moe.request_answer(prompt, 24, seed).body
        assert np.frombuffer(mine.tokens, "<i4").tolist() == theirs["token_ids"]
        said = [token["logprob"] for token in theirs["logprobs"]["content"]]
        assert np.frombuffer(mine.log_probabilities, "<f4").tolist() == said
        assert [(span.weights, span.start, span.end) for span in mine.spans] == [
            (span["version"], span["start"], span["end"]) for span in theirs["weight_versions"]
        ]
        assert (mine.finish_reason, mine.routed_experts) == ("length", None)


def test_answers_that_are_written_together_have_each_its_own_log_probabilities(moe: Engine, tmp_path: Path) -> None:
    reference = make_model("qwen3_moe", 14)
    updated(moe, "5", save_published(reference, tmp_path))

    def answer(number: int) -> tuple[list[int], list[float]]:
        # Every fourth by vLLM's path, with the likeliest tokens beside each one.
        if number % 4 == 0:
            choice = moe.generate(PROMPTS[number % 8], max_tokens=8 + number, seed=number, logprobs=2)["choices"][0]
            return choice["token_ids"], [token["logprob"] for token in choice["logprobs"]["content"]]
        body = moe.request_answer(PROMPTS[number % 8], 8 + number, number).body
        return np.frombuffer(body.tokens, "<i4").tolist(), np.frombuffer(body.log_probabilities, "<f4").tolist()

    with ThreadPoolExecutor(32) as pool:
        answers = [*pool.map(answer, range(32))]
    assert [len(tokens) for tokens, _ in answers] == [*range(8, 40)]
    for number, (tokens, said) in enumerate(answers):
        expected = log_probabilities(reference, PROMPTS[number % 8], tokens)
        assert np.abs(np.array(said) - expected).max() < CLOSE


def test_an_answer_ends_at_the_tokens_of_the_request(moe: Engine) -> None:
    whole = np.frombuffer(moe.request_answer(PROMPTS[2], 16, 5).body.tokens, "<i4").tolist()
    cut = moe.request_answer(PROMPTS[2], 16, 5, stop_tokens=[whole[7]]).body
    assert np.frombuffer(cut.tokens, "<i4").tolist() == whole[: whole.index(whole[7]) + 1]
    assert cut.finish_reason == "stop"


def test_a_request_that_is_none_is_refused_with_a_reason(moe: Engine) -> None:
    assert moe.post(HttpPath.ANSWER, {"prompt": "AAAA"}).status == 400
    longest = moe.request_answer([1] * 5000, 1)
    assert (longest.status, "5000" in longest.body) == (400, True)


@pytest.fixture(scope="module")
def tied(start: Start) -> Engine:
    """An engine whose output layer is the embedding, which no file of weights names twice."""
    return start("mixtral").await_ready()


def test_an_output_layer_that_is_tied_is_that_of_each_update(tied: Engine, tmp_path: Path) -> None:
    for version, seed in (("1", 11), ("2", 12)):
        reference = make_model("mixtral", seed)
        path = save_published(reference, tmp_path / version)
        assert "lm_head.weight" not in load_file(path)
        updated(tied, version, path)
        assert distance(tied, reference) < CLOSE


@pytest.mark.thorough
@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe_lite", "olmoe", "ernie4_5_moe"])
def test_each_update_makes_an_engine_compute_what_transformers_does(family: str, start: Start, tmp_path: Path) -> None:
    engine = start(family).await_ready()
    for version, seed in (("1", 11), ("2", 12)):
        reference = make_model(family, seed)
        updated(engine, version, save_published(reference, tmp_path / version))
        assert distance(engine, reference) < CLOSE
    engine.kill()


@pytest.fixture(scope="module")
def two_workers(start: Start) -> Engine:
    return start("mixtral", sync="Gloo", tensor=2).await_ready()


def test_an_engine_whose_workers_could_not_join_the_trainer_takes_the_next_weights(two_workers: Engine) -> None:
    two_workers.post_or_fail("/pause", mode="keep")
    two_workers.post_or_fail("/start_weight_update")
    nowhere = _where(free_port(), workers=2)
    for _ in range(2):
        reply = two_workers.post("/init_weight_transfer_engine", {"init_info": nowhere})
        assert (reply.status, "refused" in str(reply.body)) == (500, True)
    _break_off(two_workers)
    _take_weights(two_workers, 23)


def _break_off(engine: Engine) -> None:
    """Leave an update as the trainer does, by a start that is refused."""
    assert engine.post("/start_weight_update").status == 500
    engine.post_or_fail("/finish_weight_update", {"weight_version": "unfinished"})


def test_a_worker_that_could_not_join_lets_the_others_wait_no_longer(two_workers: Engine) -> None:
    # Which of the two gets in is chance, and an engine reads their replies in their order.
    for _ in range(3):
        two_workers.post_or_fail("/pause", mode="keep")
        two_workers.post_or_fail("/start_weight_update")
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        one_only = _where(opened(weights_key(SECRET), store.port, most=1), workers=2)
        reply = two_workers.post("/init_weight_transfer_engine", {"init_info": one_only})
        assert (reply.status, "do not know one key" in str(reply.body)) == (500, True)
        cancel_rendezvous(PrefixStore("weights", store), "rank 0 has left")
        # Answered once both workers have done all that was asked before.
        _break_off(two_workers)
    assert "RankMissing: rank 0 has left" in two_workers.log
    assert "wait timeout" not in two_workers.log
    _take_weights(two_workers, 24)


def _take_weights(two_workers: Engine, seed: int) -> None:
    group, reference = _joined(two_workers, workers=2), make_model("mixtral", seed)
    tensors = {name: tensor.contiguous() for name, tensor in published_tensors(reference).items()}
    two_workers.post_or_fail("/start_weight_update")
    _broadcast(two_workers, group, tensors)
    two_workers.post_or_fail("/finish_weight_update", {"weight_version": "1"})
    two_workers.post_or_fail("/reset_prefix_cache")
    two_workers.post_or_fail("/resume")
    assert distance(two_workers, reference) < CLOSE


def test_weights_come_by_broadcast_to_every_worker_of_an_engine_which_ends_and_leaves_nothing(
    two_workers: Engine,
) -> None:
    engine = two_workers
    group = _joined(engine, workers=2)
    # The second time experts come in stacks, of which each has two parts that come in different buckets.
    for version, seed, arranged in (("1", 21, dict), ("2", 22, _in_stacks)):
        reference = make_model("mixtral", seed)
        tensors = arranged({name: tensor.contiguous() for name, tensor in published_tensors(reference).items()})
        engine.post_or_fail("/pause", mode="keep")
        engine.post_or_fail("/start_weight_update")
        for part in (list(tensors)[::2], list(tensors)[1::2]):
            _broadcast(engine, group, {name: tensors[name] for name in part})
        engine.post_or_fail("/finish_weight_update", {"weight_version": version})
        engine.post_or_fail("/reset_prefix_cache")
        engine.post_or_fail("/resume")
        assert distance(engine, reference) < CLOSE
    assert "vLLM takes stacks of experts in 2 layers" in engine.log
    assert len(engine.workers()) > 2
    blocks, folders = shared_memory(engine), {socket.parent for socket in sockets(engine)}
    # vLLM's build for CPUs without AVX-512 reduces over Gloo, and has no blocks of its own.
    own = {"vllm"} if torch.cpu._is_avx512_supported() else set()  # noqa: SLF001
    assert {re.sub("[^a-z].*", "", block.name) for block in blocks} == {"psm"} | own
    assert len(folders) == 1
    assert engine.stop() == 0
    assert engine.is_gone()
    assert not [path for path in blocks | folders if path.exists()]


def shared_memory(engine: Engine) -> set[Path]:
    """Blocks that its processes pass on to each other."""
    maps = [Path(f"/proc/{pid}/maps").read_text() for pid in engine.workers()]
    return {Path(block) for one in maps for block in re.findall(r"/dev/shm/(?:psm|vllm)_\S+", one)}


def sockets(engine: Engine) -> set[Path]:
    """Files at which its processes listen to each other."""
    opened = [path for pid in engine.workers() for path in Path(f"/proc/{pid}/fd").iterdir()]
    numbers = {match[1] for path in opened if (match := re.match(r"socket:\[(\d+)\]", str(path.readlink())))}
    found = (line.split() for line in Path("/proc/net/unix").read_text().splitlines())
    return {Path(fields[7]) for fields in found if len(fields) == 8 and fields[6] in numbers and fields[7][0] == "/"}


def _in_stacks(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Two stacks of two experts for each projection of a layer of Mixtral."""
    found: dict[str, list[Tensor]] = {}
    for name, tensor in tensors.items():
        expert = re.search(r"experts\.(\d)\.", name)
        first = 0 if expert is None else int(expert[1]) // 2 * 2
        stacked = name if expert is None else name.replace(expert[0], f"experts.{{{first}:{first + 2}/4}}.")
        found.setdefault(stacked, []).append(tensor)
    return {name: torch.stack(one) if "{" in name else one[0] for name, one in sorted(found.items())}


def _joined(engine: Engine, workers: int) -> ProcessGroupGloo:
    inner, world = free_port(), 1 + workers
    store = TCPStore("127.0.0.1", inner, is_master=True, wait_for_workers=False)
    where = _where(opened(weights_key(SECRET), inner), workers)
    joining = threading.Thread(target=engine.post_or_fail, args=("/init_weight_transfer_engine", {"init_info": where}))
    joining.start()
    named = PrefixStore("weights", store)
    join_rendezvous(named, world, timedelta(minutes=5))
    group = ProcessGroupGloo(named, 0, world, timedelta(minutes=5))
    _send(group, torch.zeros(1, dtype=torch.uint8))
    joining.join()
    return group


def _where(port: int, workers: int) -> dict[str, Any]:
    return {
        "master_address": "127.0.0.1",
        "master_port": port,
        "name": "weights",
        "rank_offset": 1,
        "world_size": 1 + workers,
    }


def _broadcast(engine: Engine, group: ProcessGroupGloo, tensors: dict[str, Tensor]) -> None:
    update = {
        "names": list(tensors),
        "dtype_names": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
        "shapes": [list(tensor.shape) for tensor in tensors.values()],
    }
    receiving = threading.Thread(target=engine.post_or_fail, args=("/update_weights", {"update_info": update}))
    receiving.start()
    _send(group, torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in tensors.values()]))
    receiving.join()


def _send(group: ProcessGroupGloo, bucket: Tensor) -> None:
    options = BroadcastOptions()
    options.rootRank = options.rootTensor = 0
    group.broadcast([bucket], options).wait()  # type: ignore[attr-defined]  # its base class's, untyped


def test_an_engine_that_is_asked_to_end_waits_for_no_answer(tied: Engine) -> None:
    tied.post_or_fail("/pause", mode="keep")
    with unanswered(tied):
        assert tied.stop() == 0
    assert tied.is_gone()


@contextmanager
def unanswered(engine: Engine) -> Iterator[None]:
    """A request that a paused engine has taken and does not answer."""

    def ask() -> None:
        # A server that ends may answer that it failed, or just hang up.
        with suppress(OSError):
            engine.request_answer(PROMPTS[0], max_tokens=8)

    asking = threading.Thread(target=ask)
    asking.start()
    # It has taken the request when it answers one that came later.
    sleep(LOOK_SECONDS)
    engine.get("/weight_info")
    assert asking.is_alive()
    yield
    asking.join()


# The last one: it ends the engine.
def test_a_server_whose_core_gets_a_signal_has_got_none_and_ends_without_it(moe: Engine) -> None:
    os.kill(core_of(moe), signal.SIGTERM)
    assert moe.is_gone()
    # An engine that dies has failed.
    assert moe.exit_code() == 1
    assert "engine core exited unexpectedly" in moe.log
    assert "API server: shutdown triggered" not in moe.log
