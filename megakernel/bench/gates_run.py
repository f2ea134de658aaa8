"""The second and third milestones: one layer in one launch, op by op; all layers in one launch, layer by layer.

Both decode single tokens, each in a launch of its own, and then look into the memory: every op on its own inputs
(`op_gates`), layers against the reference (`layer_gates`). Figures of these rows are in
megakernel.bench.gates_figures.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from megakernel.bench import layer_gates, op_gates, rounding
from megakernel.bench.reference_run import MODELS, release
from megakernel.config import ModelConfig
from megakernel.engine import SCHEDULES, DecodeEngine
from megakernel.knobs import PRESETS

TOKEN = ("preset", "schedule", "seed", "position")
"""What tells tokens apart: knobs and schedule of the launch, seed of weights and prompt, position of what was read."""
OP_COLUMNS = (*TOKEN, *op_gates.COLUMNS)
WORST_COLUMNS = (*OP_COLUMNS, "n", "failed")
"""Of each result the row of the layer with the largest share of its bound, of n layers, of which some failed."""
LAYER_COLUMNS = (*TOKEN, *layer_gates.LAYER_COLUMNS)
ROUTING_COLUMNS = (*TOKEN, *layer_gates.ROUTING_COLUMNS)
LOGIT_COLUMNS = (*TOKEN, "read", *layer_gates.LOGIT_COLUMNS)
"""read: the token that was read."""
MOST_LINES = 50
"""Of failures in an error's message."""


def config_of(model: str, layers: int = 0, *, dense: bool = True) -> ModelConfig:
    """A model of `reference_run.MODELS`, with another number of layers unless that is 0.

    Args:
        dense: whether it keeps its dense layers; otherwise all have experts.

    Raises:
        ValueError: an unknown model, or fewer layers than 0.
    """
    if model not in MODELS:
        raise ValueError(f"model is {model!r}; expected one of {', '.join(MODELS)}")
    if layers < 0:
        raise ValueError(f"layers is {layers}; expected 0 or more")
    config = MODELS[model]
    layers = layers or config.num_hidden_layers
    first = min(config.first_k_dense_replace, layers) if dense else 0
    return dataclasses.replace(config, num_hidden_layers=layers, first_k_dense_replace=first)


def parse(engine: str) -> tuple[str, str]:
    """Preset and schedule of "h200 static". Raises ValueError for anything else."""
    words = engine.split()
    if len(words) != 2 or words[0] not in PRESETS or words[1] not in SCHEDULES:
        raise ValueError(
            f"engine is {engine!r}; expected one of {', '.join(PRESETS)} and one of {', '.join(SCHEDULES)}, such as "
            "'h200 static'"
        )
    return words[0], words[1]


class Token(NamedTuple):
    """A token that was decoded in a launch of its own."""

    about: dict
    """The columns of TOKEN."""
    engine: DecodeEngine
    read: int
    """The id that was read."""

    @property
    def where(self) -> tuple:
        """Arguments of `op_gates.check` and `layer_gates.compare`."""
        return self.engine.memory, self.read, self.about["position"]


def decode(
    config: ModelConfig,
    engines: Sequence[str],
    seeds: Sequence[int],
    prompt_tokens: int,
    steps: int,
    capacity: int,
    device: torch.device | str,
    look: Callable[[Token], None],
) -> None:
    """Decodes greedily, one token to a launch, and has each looked at before the next.

    Args:
        engines: each a preset and a schedule, see `parse`.
        seeds: of `weights.random` and of the prompt, whose ids are drawn alike. There is an engine for each, one after
            the other: at full size each has 31 GB, twice that while it is made.
        prompt_tokens: length of the prompt; its last token is what the first launch reads.
        steps: launches after a prompt.
        capacity: positions that the cache has room for.
        look: is called with each token; what it keeps of an engine is not freed before the next one is made.

    Raises:
        ValueError: as for `parse` and `DecodeEngine`.
    """
    names = [parse(engine) for engine in engines]
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        prompt = torch.randint(config.vocab_size, (prompt_tokens,), generator=generator).tolist()
        for preset, schedule in names:
            engine = DecodeEngine.random(
                config, seed, device, knobs=PRESETS[preset], capacity=capacity, schedule=schedule
            )
            engine.prefill(prompt)
            read = prompt[-1]
            for _ in range(steps):
                about = dict(preset=preset, schedule=schedule, seed=seed, position=engine.length)
                following = engine.decode(1).tokens.item()
                look(Token(about, engine, read))
                read = following
            del engine
            release(device)


# --------------------------------------------------------------------------------------------------------- measurements


def measure_layer(
    model: str,
    engines: Sequence[str],
    seeds: Sequence[int],
    prompt_tokens: int,
    capacity: int,
    device: torch.device | str = "cpu",
    say: Callable[[str], None] = print,
) -> list[dict]:
    """A model of one layer, which has experts: every op of one token in one launch, rows of OP_COLUMNS.

    Args:
        model: whose widths the layer has, of `reference_run.MODELS`.
        engines, seeds, prompt_tokens, capacity, device: as for `decode`.
        say: is told about progress.

    Raises:
        ValueError: as for `config_of` and `decode`.
    """
    rows: list[dict] = []

    def look(token: Token) -> None:
        checked = op_gates.check(*token.where, weights=token.engine.weights)
        rows.extend(_short(token.about | row) for row in checked)
        failed = [row["result"] for row in checked if not row["passed"]]
        say(f"{_name(token)}: {len(checked)} results, {'failed: ' + ', '.join(failed) if failed else 'all passed'}")

    decode(config_of(model, 1, dense=False), engines, seeds, prompt_tokens, 1, capacity, device, look)
    return rows


@dataclasses.dataclass
class Measured:
    """What was measured of the tokens of whole models."""

    ops: list[dict]
    """Rows of WORST_COLUMNS."""
    layers: list[dict]
    """Rows of LAYER_COLUMNS."""
    routing: list[dict]
    """Rows of ROUTING_COLUMNS."""
    logits: list[dict]
    """Rows of LOGIT_COLUMNS."""


def measure_model(
    model: str,
    layers: int,
    engines: Sequence[str],
    seeds: Sequence[int],
    prompt_tokens: int,
    steps: int,
    capacity: int,
    device: torch.device | str = "cpu",
    say: Callable[[str], None] = print,
) -> Measured:
    """All layers chained in one launch for each token: `op_gates.check` and `layer_gates.compare` of each.

    Args:
        model, layers: as for `config_of`.
        engines, seeds, prompt_tokens, steps, capacity, device: as for `decode`.
        say: is told about progress.

    Raises:
        ValueError: as for `config_of` and `decode`.
    """
    measured = Measured([], [], [], [])

    def look(token: Token) -> None:
        weights = token.engine.weights
        checked = op_gates.check(*token.where, weights=weights)
        compared = layer_gates.compare(*token.where, weights=weights)
        measured.ops += [_short(token.about | row) for row in op_gates.worst(checked)]
        measured.layers += [_short(token.about | row) for row in compared.layers]
        measured.routing += [_short(token.about | row) for row in compared.routing]
        measured.logits.append(_short(token.about | {"read": token.read} | compared.logits))
        failed = sum(not row["passed"] for row in checked), len(compared.failed)
        say(f"{_name(token)}: {failed[0]} of {len(checked)} ops failed, {failed[1]} gates of layers unexplained")

    decode(config_of(model, layers), engines, seeds, prompt_tokens, steps, capacity, device, look)
    return measured


def _name(token: Token) -> str:
    return "{preset} {schedule}, seed {seed}, position {position}".format(**token.about)


def _short(row: Mapping) -> dict:
    """Six digits, and of cosines nine, because what matters is how far they are from 1: the files are committed."""
    digits = {name: 9 if name.endswith("cosine") else 6 for name in row}
    return {
        name: float(f"{value:.{digits[name]}g}") if isinstance(value, float) else value for name, value in row.items()
    }


# --------------------------------------------------------------------------------------------------------------- tables


def ops_table(rows) -> Any:
    """A line for each result, in the order of a token: the largest share of its bound under each preset, and how many
    passed; of a DataFrame of the rows of `measure_layer` or of `Measured.ops`, another one."""
    import pandas

    lines = []
    for result in result_order(rows):
        some = rows[rows["result"] == result]
        line = {"result": result, "op": " / ".join(some["op"].unique())}
        line |= {
            preset: f"{_largest(one['share']):.3g}" if len(one := some[some["preset"] == preset]) else ""
            for preset in rows["preset"].unique()
        }
        count = int(some["n"].sum()) if "n" in some else len(some)
        failed = int(some["failed"].sum()) if "failed" in some else int((~some["passed"]).sum())
        lines.append(line | {"least cosine": some["cosine"].min(), "passed": f"{count - failed} of {count}"})
    return pandas.DataFrame(lines)


def result_order(rows) -> list[str]:
    """The results of all presets in the order in which a token computes them; a DataFrame with preset and result."""
    order: list[str] = []
    for _, some in rows.groupby("preset", sort=False):
        place = 0
        for result in some["result"].unique():
            if result in order:
                place = order.index(result) + 1
            else:
                order.insert(place, result)
                place += 1
    return order


GATES = {
    "residual": f"error <= {layer_gates.LAYER_ERROR:.0%}, cosine >= {layer_gates.LAYER_COSINE:g}",
    **dict.fromkeys(("latent", "rotary key", "keys", "values"), f"error <= {layer_gates.ROW_ERROR:.0%}"),
}


def gates_table(ops, layers, routing, logits) -> Any:
    """The gates as they fell: of each how many passed, how many are explained by what, how many failed; DataFrames of
    the rows of `Measured`."""
    import pandas

    lines = []

    def line(gate, bound, statuses, passed):
        counts = statuses.value_counts()
        explained = {"routing": ("routing", "near-tie", "downstream"), "rounding": ("rounding", "both errors")}
        lines.append(
            {"gate": gate, "bound": bound, "n": len(statuses), "passed": int(counts.get(passed, 0))}
            | {name: int(sum(counts.get(status, 0) for status in some)) for name, some in explained.items()}
            | {"failed": int(sum(counts.get(status, 0) for status in layer_gates.BAD))}
        )

    for result in layers["result"].unique():
        line(result, GATES[result], layers[layers["result"] == result]["status"], "passed")
    if len(routing):
        line("experts", "those of the reference", routing["status"], "equal")
    bound = f"cosine >= {layer_gates.LOGIT_COSINE:g}, same token or margin < {rounding.NEAR_TIE:g}"
    line("logits", bound, logits["status"], "passed")
    count, failed = int(ops["n"].sum()), int(ops["failed"].sum())
    bound = f"error <= {op_gates.SHARE:.0%} + {op_gates.FLOOR:g}"
    lines.append({"gate": "ops, own inputs", "bound": bound, "n": count, "passed": count - failed, "failed": failed})
    table = pandas.DataFrame(lines)
    return table.astype(dict.fromkeys(("n", "passed", "routing", "rounding", "failed"), "Int64"))


def layers_table(layers, routing, published) -> Any:
    """A line for each preset and layer, the worst of its tokens along the launch's path, beside published errors.

    Args:
        layers, routing: DataFrames of the rows of `Measured`.
        published: of `fmms.bench.published.layer_gates`, or None.

    Returns:
        A DataFrame of texts.
    """
    import pandas

    lines = []
    for (preset, layer), some in layers.groupby(["preset", "layer"], sort=False):
        state = some[some["result"] == "residual"]
        line = {
            "preset": preset,
            "layer": str(layer),
            "error": f"{_largest(state['path_rel']):.2%}",
            "cosine": f"{state['path_cosine'].min():.6f}",
            "launch from fp32": f"{state['own_rms'].median():.2%}",
            "reference from fp32": f"{state['reference_rms'].median():.2%}",
        }
        for result in (name for name in some["result"].unique() if name != "residual"):
            line[result] = f"{_largest(some[some['result'] == result]['path_rel']):.2%}"
        counts = {}
        if len(routing):
            chosen = routing[(routing["preset"] == preset) & (routing["layer"] == layer)]
            counts = chosen["status"].value_counts()
        line["experts"] = ", ".join(f"{counts[name]} {name}" for name in layer_gates.ROUTING_STATUSES if name in counts)
        theirs = [] if published is None else published[published["layer"] == layer].to_dict("records")
        for row in theirs:
            line |= {"MI300X error": f"{row['rel']:.2%}", "MI300X cosine": f"{row['cosine']:.6f}"}
            line |= {"MI300X keys": f"{row['k_row_rel']:.2%}", "MI300X values": f"{row['v_row_rel']:.2%}"}
        lines.append(line)
    table = pandas.DataFrame(lines).fillna("")
    last = [name for name in table if name == "experts" or name.startswith("MI300X")]
    return table[[name for name in table if name not in last] + last]


def _largest(values) -> float:
    """NaN if there is one."""
    return float(values.max(skipna=False))


# ------------------------------------------------------------------------------------------------------------- verdicts


def layer_reading(rows, profile: str) -> str:
    """What the ops of one layer say, in sentences of HTML; a DataFrame of `measure_layer`."""
    tokens = len(rows.drop_duplicates(list(TOKEN)))
    computed = rows[rows["bound"] > 0]
    worst = computed.loc[computed["share"].idxmax()]
    exact = int((rows["max_error"] == 0).sum())
    where = " The host build on a CPU, sizes of a tiny model." if profile == "cpu" else ""
    return (
        f"<p>{int(rows['passed'].sum())} of {len(rows)} results of {tokens} tokens passed; {exact} are equal to "
        f"PyTorch's to the bit. The largest error is {worst['share']:.2g} of its bound: {worst['result']} of preset "
        f"{worst['preset']}.{where}</p>"
    )


def model_reading(layers, routing, logits, profile: str) -> str:
    """What the layers say, in sentences of HTML; DataFrames of the rows of `Measured`."""
    state = layers[layers["result"] == "residual"]
    last = state[state["layer"] == state["layer"].max()]
    ratio = (state["own_rms"] / state["reference_rms"]).median()
    cache = layers[layers["result"] != "residual"]
    over = int((cache["status"] != "passed").sum())
    text = (
        f"Along the launch's path the residual stream is off by at most {state['path_rel'].max():.2%} of its largest "
        f"entry, cosine at least {state['path_cosine'].min():.5f}. After the last layer the launch is "
        f"{last['own_rms'].median():.2%} from fp32, the bf16 reference {last['reference_rms'].median():.2%}; over all "
        f"layers the launch's distance is {ratio:.2f} times the reference's (medians). "
    )
    if over:
        text += (
            f"{over} of {len(cache)} results in the cache are off by more than {layer_gates.ROW_ERROR:.0%}: so far "
            "apart are two decodes in bf16 here. "
        )
    if len(routing):
        counts = routing["status"].value_counts()
        differ = len(routing) - int(counts.get("equal", 0))
        text += f"{differ} of {len(routing)} choices of experts are not those that the reference makes by itself. "
    same = int((logits["token"] == logits["reference_token"]).sum())
    text += f"{same} of {len(logits)} tokens are the reference's."
    if profile == "cpu":
        text += " A tiny model on a CPU: its errors are not those of V2-Lite."
    return f"<p>{text}</p>"


def require_ops(rows: Iterable[Mapping]) -> None:
    """AssertionError that lists the results that failed; rows of `measure_layer`."""
    text = "{op}, {result}: off by {max_error:.3g} of {max_reference:.3g}, bound {bound:.3g}"
    _require(_failure(row, text) for row in rows if not row["passed"])


def require_model(measured: Measured) -> None:
    """AssertionError that lists the ops that failed, and the gates of layers that failed and are not explained."""
    ops = [row for row in measured.ops if row["failed"]]
    lines = [_failure(row, "{op}, {result}: {failed} of {n} failed, this one by {share:.3g} bounds") for row in ops]
    distance = "{own_rms:.2%} from fp32, the reference {reference_rms:.2%}"
    for rows, text in (
        (measured.layers, "{result}: off by {rel:.2%}, cosine {cosine:.6f}; " + distance),
        (measured.routing, "experts {experts}, the reference's {reference_experts}"),
        (measured.logits, "logits: cosine {cosine:.6f}, token {token}, the reference's {reference_token}; " + distance),
    ):
        lines += [_failure(row, text) for row in rows if row["status"] in layer_gates.BAD]
    _require(lines)


def _failure(row: Mapping, text: str) -> str:
    where = "{preset} {schedule}, seed {seed}, position {position}, ".format(**row)
    return where + (f"layer {row['layer']}, " if row.get("layer") is not None else "") + text.format(**row)


def _require(failed: Iterable[str]) -> None:
    lines = list(failed)
    if lines:
        more = [f"and {len(lines) - MOST_LINES} more"] if len(lines) > MOST_LINES else []
        raise AssertionError("\n".join([f"{len(lines)} gates failed:", *lines[:MOST_LINES], *more]))
