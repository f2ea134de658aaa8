"""Text sampled through the fused head, laid out for reading and held against Hugging Face's own computation.

Sampling is fmms.generate's work, loading a model fmms.models'. A row is a dict for one token of one continuation, as
fmms.bench.records saves it.
"""

import html
import itertools
from dataclasses import dataclass
from typing import Any

import torch

from fmms.generation import generate
from fmms.lm_head import find_lm_head
from fmms.sampling import sample

# Background of a token by its log-probability in nats: the likely stay white, the less likely the darker, also in grey.
SHADES = ((-0.1, "#ffffff"), (-0.7, "#fff3d6"), (-2.3, "#fddc9a"), (-4.6, "#f9b75c"), (float("-inf"), "#ee8434"))


@dataclass(frozen=True)
class Batch:
    """Every prompt at every temperature as one batch: row r is prompt r // T, temperature r % T of T temperatures."""

    input_ids: torch.Tensor
    """int64 [B, P], padded on the left."""
    attention_mask: torch.Tensor
    """int64 [B, P]."""
    temperature: torch.Tensor
    """float32 [B]."""
    seed: torch.Tensor
    """int64 [B]: one per prompt, so that the temperatures differ by nothing else."""


def chat_batch(tokenizer, prompts: list[str], temperatures: list[float], seed: int, device="cpu") -> Batch:
    """Chat prompts, with the template's opening of the answer, at several temperatures. ValueError without any."""
    if not prompts or not temperatures:
        raise ValueError(f"{len(prompts)} prompts and {len(temperatures)} temperatures; expected at least one of each")
    if tokenizer.padding_side != "left":
        raise ValueError("tokenizer: it pads on the right; set tokenizer.padding_side = 'left'")
    texts = [
        tokenizer.apply_chat_template([{"role": "user", "content": p}], tokenize=False, add_generation_prompt=True)
        for p in prompts
    ]
    encoded = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
    repeats = len(temperatures)
    return Batch(
        encoded.input_ids.repeat_interleave(repeats, 0).to(device),
        encoded.attention_mask.repeat_interleave(repeats, 0).to(device),
        torch.tensor(temperatures, dtype=torch.float32).repeat(len(prompts)).to(device),
        (seed + torch.arange(len(prompts))).repeat_interleave(repeats).to(device),
    )


def continuations(model, tokenizer, batch: Batch, max_new_tokens: int, impl: str = "auto") -> tuple[Any, list[dict]]:
    """Samples the batch with `fmms.generate` and scores each token with Hugging Face's logits.

    Returns:
        The `GenerateOutput`, and a row per token up to the end of its sequence: prompt (index), temperature, step,
        token_id, text, logprob (fmms, at the temperature; greedy at 1), hf_logprob (the same by Hugging Face),
        hf_logprob_t1 (Hugging Face at temperature 1).
    """
    output = generate(
        model, batch.input_ids, batch.attention_mask, max_new_tokens=max_new_tokens, temperature=batch.temperature,
        seed=batch.seed, impl=impl, return_logprobs=True,
    )  # fmt: skip
    at_t, at_1 = hugging_face_logprobs(model, batch, output.new_tokens)
    repeats = int((batch.seed == batch.seed[0]).sum())
    rows = []
    for r, (ids, length) in enumerate(zip(output.new_tokens.tolist(), output.lengths.tolist(), strict=True)):
        for step, text in enumerate(token_texts(tokenizer, ids[:length])):
            rows.append(
                {
                    "prompt": r // repeats,
                    "temperature": round(float(batch.temperature[r]), 4),
                    "step": step,
                    "token_id": ids[step],
                    "text": text,
                    "logprob": float(output.logprobs[r, step]),
                    "hf_logprob": float(at_t[r, step]),
                    "hf_logprob_t1": float(at_1[r, step]),
                }
            )
    return output, rows


@torch.no_grad()
def hugging_face_logprobs(model, batch: Batch, new_tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of given continuations by the model's own logits, in one pass over the whole text.

    Returns:
        float32 [B, n] each: at the batch's temperatures (greedy rows at 1), and at temperature 1.
    """
    n = new_tokens.shape[1]
    ids = torch.cat([batch.input_ids, new_tokens], -1)
    mask = torch.cat([batch.attention_mask, torch.ones_like(new_tokens)], -1)
    found = []
    for r in range(len(ids)):  # one at a time, for [n, V] logits rather than [B, n, V], and without padding
        real = mask[r].bool()
        logits = model(ids[r : r + 1, real], logits_to_keep=n + 1).logits[0, :-1].float()
        temperature = batch.temperature[r]
        temperature = torch.where(temperature == 0, 1.0, temperature)
        scores = [(logits / t).log_softmax(-1).gather(-1, new_tokens[r, :, None])[:, 0] for t in (temperature, 1.0)]
        found.append(torch.stack(scores))
    at_t, at_1 = torch.stack(found, 1)
    return at_t, at_1


@torch.no_grad()
def first_token_distribution(model, prompt_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Last hidden state [1, D], after the final norm, and next-token logits fp32 [V] of one prompt [P], both by
    Hugging Face's own forward pass.

    In bfloat16 and float16 Hugging Face rounds the logits to that dtype, which shifts probabilities by several per
    cent; the logits are then the head's from that hidden state in fp32.
    """
    seen = []
    hook = model.get_output_embeddings().register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    try:
        logits = model(prompt_ids[None]).logits[0, -1].float()
    finally:
        hook.remove()
    hidden = seen[-1][0, -1:]
    return hidden, logits if hidden.dtype == torch.float32 else find_lm_head(model).logits(hidden)[0]


def head_draws(model, hidden: torch.Tensor, draws: int, seed: int, impl: str = "auto"):
    """`draws` tokens from one hidden state [1, D] at temperature 1 through the fused head, with its logits."""
    head = find_lm_head(model)
    return sample(
        hidden, head.weight, 1.0, seed=seed, num_samples=draws, return_logprobs=True, return_logits=True, impl=impl,
        **head.sample_arguments(),
    )  # fmt: skip


@torch.no_grad()
def greedy_difference(model, prompt_ids: torch.Tensor, ours: torch.Tensor, theirs: torch.Tensor) -> dict:
    """Compares two greedy continuations [n] of one prompt [P] up to the first token that differs.

    Returns:
        tokens compared, equal (leading tokens that are), gap: by how many nats the model's logits there prefer one of
        the two to the other, None if all are equal, and tie: how large a gap rounding the logits to the model's dtype
        can make or hide.
    """
    n = min(len(ours), len(theirs))
    differs = (ours[:n] != theirs[:n]).nonzero()[:, 0].tolist()
    equal = differs[0] if differs else n
    if equal == n and len(ours) == len(theirs):
        return {"tokens": n, "equal": n, "gap": None, "tie": None}
    if equal == n:  # one ended early, though the same tokens led there: no rounding explains that
        return {"tokens": max(len(ours), len(theirs)), "equal": n, "gap": float("inf"), "tie": 0.0}
    hidden, logits = first_token_distribution(model, torch.cat([prompt_ids, ours[:equal]]))
    tie = 2 * torch.finfo(hidden.dtype).eps * float(logits.abs().max())
    return {"tokens": n, "equal": equal, "gap": float((logits[ours[equal]] - logits[theirs[equal]]).abs()), "tie": tie}


def token_texts(tokenizer, ids: list[int]) -> list[str]:
    """What each token adds to the text. A character spread over several tokens comes with the last of them."""
    texts, before = [], ""
    for end in range(1, len(ids) + 1):
        whole = tokenizer.decode(ids[:end], clean_up_tokenization_spaces=False)
        # The replacement character stands for a character that isn't complete yet.
        complete = end == len(ids) or not whole.endswith("�")
        texts.append(whole[len(before) :] if complete else "")
        before = whole if complete else before
    return texts


def shaded_html(rows: list[dict], logprob: str = "logprob") -> str:
    """One continuation as HTML: each token on a background that tells its log-probability, and in its tooltip."""
    pieces = []
    for row in rows:
        shade = next(colour for least, colour in SHADES if row[logprob] >= least)
        text = html.escape(row["text"] if isinstance(row["text"], str) else "")
        text = text.replace("\n", "↵<br>")
        tip = f"{row['token_id']}: {row[logprob]:.2f} nats"
        pieces.append(f'<span style="background:{shade};color:#1c1c1e" title="{tip}">{text}</span>')
    return "".join(pieces)


def legend_html() -> str:
    """The shades and the log-probabilities that they stand for."""
    edges = [least for least, _ in SHADES]
    names = [f"above {edges[0]:g}", *(f"{b:g} to {a:g}" for a, b in itertools.pairwise(edges[:-1]))]
    names.append(f"below {edges[-2]:g}")
    boxes = [
        f'<span style="background:{colour};color:#1c1c1e;border:1px solid #d9dce1;padding:0 .4em">{name}</span>'
        for (_, colour), name in zip(SHADES, names, strict=True)
    ]
    return f'<p style="font-size:.85rem">log-probability in nats: {" ".join(boxes)}</p>'


def continuations_html(prompts: list[str], rows: list[dict], logprob: str = "logprob") -> str:
    """A legend, then each prompt with its continuations by temperature, as HTML."""
    parts = [legend_html()]
    temperatures = sorted({row["temperature"] for row in rows})
    for index, prompt in enumerate(prompts):
        parts.append(f"<h3>{html.escape(prompt)}</h3>\n<table>")
        parts.append("<thead><tr><th>T</th><th>continuation</th></tr></thead>\n<tbody>")
        for temperature in temperatures:
            own = [row for row in rows if row["prompt"] == index and row["temperature"] == temperature]
            own.sort(key=lambda row: row["step"])
            parts.append(
                f'<tr><td style="text-align:left">{temperature:g}</td>'
                f'<td style="text-align:left">{shaded_html(own, logprob)}</td></tr>'
            )
        parts.append("</tbody></table>")
    return "\n".join(parts)
