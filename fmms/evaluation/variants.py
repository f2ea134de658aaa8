"""The same prompts answered by several samplers with the same sampling parameters, in files that a re-run resumes.

A variant is a sampler under a setting (truncation off or on). Every shard of its answers is one JSONL file of
fmms.evaluation.gsm8k's records, written in one step. What the answers say is fmms.evaluation.quality's matter.
"""

import hashlib
import json
import time
from collections.abc import Mapping
from pathlib import Path

import torch

from fmms import atomic, doctor, noise, paths
from fmms.evaluation import gsm8k
from fmms.evaluation.gsm8k import Record
from fmms.evaluation.tasks import Task
from fmms.generation import generate

SCHEMES = {"fmms-token": "token", "fmms": "group"}
EXACT = ("transformers", *SCHEMES)
"""Samplers that must not differ: transformers' own sampling, and fmms with its two noise schemes."""

CONTROL = "control"
"""The negative control, which must be found: noise that is `bias` times too wide, which is `bias` times the
temperature that was asked for."""

SAMPLERS = (*EXACT, CONTROL)
SAY_EVERY = 20.0  # seconds


def settings(temperature: float, top_k: int, top_p: float) -> dict[str, dict]:
    """The two settings that are compared: "plain" at this temperature, "truncated" by top-k and top-p as well."""
    return {
        "plain": {"temperature": temperature, "top_k": None, "top_p": None},
        "truncated": {"temperature": temperature, "top_k": top_k, "top_p": top_p},
    }


def run_folder(profile: str, about: Mapping) -> Path:
    """`build/<profile>/18_quality/<digest>`, where the answers of a run lie; writes its `about.json`.

    The digest is of `about` (whatever decides an answer: model, task, sizes, seed), of the code that samples and of the
    libraries' versions, so another run, or another version, never resumes these answers.
    """
    package = Path(__file__).resolve().parent.parent
    ours = [Path(__file__), Path(__file__).with_name("tasks.py"), *package.glob("*.py"), *package.glob("kernels/*.py")]
    code = hashlib.sha256(b"".join(file.read_bytes() for file in sorted(ours))).hexdigest()
    facts = {**about, "code": code, "torch": torch.__version__, "transformers": doctor.version_of("transformers")}
    text = json.dumps(facts, indent=2, sort_keys=True, default=str)
    folder = paths.build_dir(profile) / "18_quality" / hashlib.sha256(text.encode()).hexdigest()[:12]
    atomic.write_text(folder / "about.json", text + "\n")
    return folder


def answer_all(
    folder: str | Path,
    model,
    tokenizer,
    task: Task,
    choices: Mapping[str, Mapping],
    max_new_tokens: int,
    batch: int,
    seed: int = 0,
    bias: float = 2.0,
    impl: str = "auto",
) -> dict[str, list[Record]]:
    """Setting -> records of every sampler on every problem. Answers that are already in `folder` are read, not made.

    Files: `<folder>/<setting>/<sampler>/shard_00000.jsonl`, `batch` problems each. A record's extra holds `ids`, the
    tokens of the continuation (its end token included), and `seconds` of its batch.

    Args:
        folder: of this run (`run_folder`). choices: as `settings` makes them. seed: of the samplers: a problem has its
            own seed with fmms, a batch with transformers. bias: of the control. impl: of fmms.sample.

    Raises:
        ValueError: a file in the folder that is no shard of this run.
    """
    folder, said = Path(folder), time.monotonic()
    shards = range(0, len(task.problems), batch)
    total, done = len(choices) * len(SAMPLERS) * len(shards), 0
    found: dict[str, list[Record]] = {}
    for number, (setting, sampling) in enumerate(choices.items()):
        found[setting] = []
        for place, sampler in enumerate(SAMPLERS):
            stream = len(SAMPLERS) * number + place
            for start in shards:
                path = folder / setting / sampler / f"shard_{start // batch:05d}.jsonl"
                wanted = task.problems[start : start + batch]
                records = _read(path, wanted, sampler, sampling)
                if records is None:
                    records = _answer(
                        model, tokenizer, task, range(start, start + len(wanted)), sampler, sampling,
                        max_new_tokens=max_new_tokens, seed=seed, stream=stream, bias=bias, impl=impl,
                    )  # fmt: skip
                    gsm8k.write_records(path, records)
                found[setting] += records
                done += 1
                if time.monotonic() - said >= SAY_EVERY:
                    said = time.monotonic()
                    print(f"{done} of {total} batches answered", flush=True)
    return found


@torch.no_grad()
def continuations(
    model,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    sampler: str,
    sampling: Mapping,
    seeds: torch.Tensor,
    max_new_tokens: int,
    ends: list[int],
    bias: float = 2.0,
    impl: str = "auto",
) -> list[list[int]]:
    """New tokens of each prompt, up to and with the token that ends it.

    Args:
        input_ids, attention_mask: int64 [B, P], padded on the left. sampler: of SAMPLERS. seeds: int64 [B]; of
            transformers' one generator the first counts. ends: tokens that end a sequence.
    """
    if sampler == "transformers":
        new = _by_transformers(model, input_ids, attention_mask, sampling, int(seeds[0]), max_new_tokens, ends)
    else:
        temperature, top_k, top_p = (sampling[name] for name in ("temperature", "top_k", "top_p"))
        out = generate(
            model, input_ids, attention_mask, max_new_tokens=max_new_tokens, seed=seeds, impl=impl, top_k=top_k,
            top_p=top_p, temperature=temperature * (bias if sampler == CONTROL else 1.0),
            noise_scheme=SCHEMES.get(sampler, "group"), eos_token_id=ends or None,
        )  # fmt: skip
        if not bool(out.valid.all()):
            raise RuntimeError(f"{sampler}: the logits of {int((~out.valid).sum())} sequences became NaN or infinite")
        new = out.new_tokens
    return [_until(row, ends) for row in new.tolist()]


def _answer(
    model,
    tokenizer,
    task: Task,
    chosen: range,
    sampler: str,
    sampling: Mapping,
    *,
    max_new_tokens,
    seed,
    stream,
    bias,
    impl,
) -> list[Record]:
    began, device = time.perf_counter(), model.device
    texts = task.texts(tokenizer)[chosen.start : chosen.stop]
    encoded = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=not task.chat).to(device)
    # by the problem, not by its place in the batch; each variant has a stream of its own, so that no two share noise
    own = noise.row_seeds(seed + 1_000_003 * stream, chosen.stop, device)[chosen.start :]
    new = continuations(
        model, encoded.input_ids, encoded.attention_mask, sampler, sampling, own, max_new_tokens, task.ends(tokenizer),
        bias, impl,
    )  # fmt: skip
    seconds = round(time.perf_counter() - began, 3)
    parameters = {**sampling, "max_new_tokens": max_new_tokens}
    return [
        Record(
            problem.doc_id, problem.question, problem.reference,
            task.opening + tokenizer.decode(ids, skip_special_tokens=True), sampler, seed, parameters, problem.dataset,
            {"ids": ids, "seconds": seconds},
        )
        for problem, ids in zip(task.problems[chosen.start : chosen.stop], new, strict=True)
    ]  # fmt: skip


def _by_transformers(model, input_ids, attention_mask, sampling, seed, max_new_tokens, ends) -> torch.Tensor:
    from transformers import GenerationConfig

    # every setting is named: one that is left out is taken from the model's own configuration, 50 for top_k
    config = GenerationConfig(
        do_sample=True, temperature=sampling["temperature"], top_k=sampling["top_k"] or 0,
        top_p=1.0 if sampling["top_p"] is None else sampling["top_p"], repetition_penalty=1.0,
        max_new_tokens=max_new_tokens, eos_token_id=ends or None, pad_token_id=ends[0] if ends else 0,
    )  # fmt: skip
    devices = [input_ids.device] if input_ids.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed & (2**63 - 1))
        out = model.generate(input_ids, attention_mask=attention_mask, generation_config=config)
    return out[:, input_ids.shape[1] :]


def _until(ids: list[int], ends: list[int]) -> list[int]:
    for place, token in enumerate(ids):
        if token in ends:
            return ids[: place + 1]
    return ids


def _read(path: Path, wanted, sampler: str, sampling: Mapping) -> list[Record] | None:
    """The records of a shard, None where there is no file; ValueError when they are not of these problems."""
    if not path.is_file():
        return None
    records = gsm8k.read_records(path)
    asked = [(record.doc_id, record.question, record.variant) for record in records]
    same = all({**record.sampling, **sampling} == record.sampling for record in records)
    if not same or asked != [(problem.doc_id, problem.question, sampler) for problem in wanted]:
        raise ValueError(f"{path.parent.name}/{path.name} holds other answers than this run's; delete it")
    return records
