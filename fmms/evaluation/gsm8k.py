"""Grade-school mathematics: problems, model responses as records in JSONL, and whether a response's number is right.

Grading is by exact rational arithmetic on the number after `#### `. Statistics are in fmms.evaluation.statistics.
"""

import datetime
import json
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fmms import atomic

GSM8K = "GSM8K"
GSM_SYMBOLIC = "gsm_symbolic (reasoning-gym)"
"""How these problems are labelled everywhere: templates filled by reasoning-gym, neither GSM8K nor Apple's
GSM-Symbolic, so scores on them compare with each other only."""

FORMAT = 'one JSON object per line with "question" and "answer", where the answer ends in "#### <number>"'

_CURRENCY = "$€£¥₹"
_UNSIGNED = r"(?:[0-9]{1,3}(?:,[0-9]{2,3})*,[0-9]{3}|[0-9]+)(?:\.[0-9]*)?|\.[0-9]+"
# not inside a longer number: of `3,5` or `1.2.3` no part is an answer
_START, _END = r"(?<![0-9])(?<![0-9][,.])", r"(?![,.]?[0-9])"
_NUMBER = re.compile(
    rf"(?P<sign>[-+−–]?)[{_CURRENCY}]?(?P<inner>[-+−–]?) ?"
    rf"{_START}(?P<first>{_UNSIGNED}){_END}"
    rf"(?: ?/ ?(?P<below>{_UNSIGNED}){_END}|\s(?P<top>[0-9]+)/(?P<bottom>[0-9]+){_END})?"
    rf"\s?[%{_CURRENCY}]?"
)
_LONGEST = 100  # characters of a number that is still read: beyond is no answer, and Python limits int() itself
_TIMESTAMP = re.compile(
    r"(?<!\d)(\d{4})-?(\d{2})-?(\d{2})[T_ -]?(\d{2})[-:.]?(\d{2})[-:.]?(\d{2})(?:\.(\d{1,6}))?(?!\d)"
)


class Problem(NamedTuple):
    """A question with its reference answer. dataset: the label that figures and tables show."""

    doc_id: int
    question: str
    reference: str
    dataset: str


@dataclass(frozen=True)
class Record:
    """One response to one question: a line of our JSONL format, whose keys are these names.

    reference: a number, or a worked solution that ends in `#### <number>`. variant: what was compared, by its internal
    name (fmms.evaluation.naming). seed: of the sampler. sampling: its parameters, such as {"temperature": 0.8,
    "top_k": 50, "max_new_tokens": 256}. dataset: the problems' label. extra: whatever else belongs to it.
    """

    doc_id: int
    question: str
    reference: str
    response: str
    variant: str
    seed: int | None = None
    sampling: dict = field(default_factory=dict)
    dataset: str = ""
    extra: dict = field(default_factory=dict)

    @property
    def correct(self) -> bool:
        """Whether the response's final answer equals the reference."""
        return is_correct(self.response, self.reference)


def final_answer(text: str) -> str | None:
    """The number after the first `#### ` of a response as it is written, such as "$1,000"; None where there is none.

    The first, because a model that isn't stopped goes on with questions of its own. Words around the number on that
    line are passed over; the line's first number counts, as in lm-eval's strict match.
    """
    marked = re.search(r"####[ \t]+([^\n]*)", text)
    found = _NUMBER.search(_plain(marked[1])) if marked else None
    return found[0].strip() if found else None


def number(text: str) -> Fraction | None:
    """The exact value of a text that is one number, else None.

    Understands `$29.00`, `1,000`, `29.`, `.5`, `-3`, `-$5`, `3/4`, `1 1/2`, `50%`. A percent sign is a unit, as in the
    references of GSM8K: `50%` is 50, not 0.5. A comma groups digits; `3,5` is no number.
    """
    found = _NUMBER.fullmatch(_plain(text).strip())
    if not found or len(found[0]) > _LONGEST or (found["sign"] and found["inner"]):
        return None
    value = _value(found["first"])
    if found["below"]:
        below = _value(found["below"])
        value = value / below if below else None
    elif found["top"]:
        bottom = int(found["bottom"])
        value = value + Fraction(int(found["top"]), bottom) if bottom else None
    negative = (found["sign"] or found["inner"]) in ("-", "−", "–")
    return -value if negative and value is not None else value


def equal(answer: str | None, reference: str) -> bool:
    """Whether an answer's number is exactly the reference's: `29`, `$29.00` and `29.` are, 28.999 isn't. False for None
    and for what is no number; ValueError when the reference is none."""
    wanted = number(reference)
    if wanted is None:
        raise ValueError(f"the reference {reference[:80]!r} is no number")
    return answer is not None and number(answer) == wanted


def is_correct(response: str, reference: str) -> bool:
    """Whether the number after `#### ` in a response equals that of the reference (a number or a worked solution)."""
    bare = final_answer(reference) if "####" in reference else reference
    return equal(final_answer(response), bare if bare is not None else reference)


def gsm_symbolic(n: int, seed: int = 0) -> list[Problem]:
    """n problems of reasoning-gym's `gsm_symbolic` generator: the same list for a seed, drawn apart for each seed.

    Each problem draws one of 100 templates and its numbers independently, so problems are independent and the mean
    score estimates that over the generator. The prompt must ask for an end in `#### <number>`; the questions don't.

    Raises:
        ImportError: reasoning-gym is missing. ValueError: n or seed out of range.
    """
    if not 1 <= n <= _SPAN or not 0 <= seed < 2**31:
        raise ValueError(f"expected n from 1 to {_SPAN} and a seed from 0 to 2**31 - 1, got {n} and {seed}")
    try:
        import reasoning_gym
    except ImportError as error:
        raise ImportError(f"{GSM_SYMBOLIC} problems need reasoning-gym: pip install -e '.[evaluation]'") from error
    # Item i of reasoning-gym's seed s is item 0 of its seed s + i: neighbouring seeds would share nearly all problems.
    items = reasoning_gym.create_dataset("gsm_symbolic", size=n, seed=seed * _SPAN)
    return [Problem(i, items[i]["question"], str(items[i]["answer"]), GSM_SYMBOLIC) for i in range(n)]


_SPAN = 2**20  # problems that belong to one seed


def gsm8k(path: str | Path | None = None, split: str = "test") -> list[Problem]:
    """GSM8K: from a local file, else through the `datasets` library (`openai/gsm8k`, which needs a network once).

    path: JSONL as published: one JSON object per line with "question" and "answer", which ends in `#### <number>`.

    Raises:
        FileNotFoundError: no such file, or nothing to load from; the message names the format.
        ValueError: another format.
    """
    if path is not None:
        path = Path(path)
        if not path.is_file():
            raise FileNotFoundError(f"no GSM8K file at {path}; expected {FORMAT}")
        return [_problem(i, row, f"{path.name}:{line}") for i, (line, row) in enumerate(_json_lines(path))]
    offline = f"pass path=, a local file: {FORMAT} (test.jsonl of the dataset's authors is such a file)"
    try:
        import datasets
    except ImportError as error:
        raise FileNotFoundError(f"GSM8K needs `pip install datasets` and a network; or {offline}") from error
    try:
        rows = datasets.load_dataset("openai/gsm8k", "main", split=split)
    except Exception as error:  # it fails in as many ways as networks do
        reason = " ".join(str(error).split())[:160]
        raise FileNotFoundError(f"`datasets` could not load openai/gsm8k ({reason}); {offline}") from error
    return [_problem(i, row, f"row {i}") for i, row in enumerate(rows)]


def write_records(path: str | Path, records: Iterable[Record]) -> Path:
    """Writes records as JSONL, UTF-8, one object per line with the keys of Record, in one step; returns the path."""
    lines = [json.dumps(asdict(record), ensure_ascii=False, allow_nan=False) for record in records]
    return atomic.write_text(path, "".join(f"{line}\n" for line in lines))


def read_records(path: str | Path) -> list[Record]:
    """Records of our own runs as `write_records` wrote them. ValueError with file and line for any other content.

    Keys that Record doesn't have are an error too: a typing mistake would otherwise pass for a missing value.
    """
    path = Path(path)
    known = Record.__dataclass_fields__
    records, seen = [], set()
    for line, row in _json_lines(path):
        where = f"{path.name}:{line}"
        missing = [key for key in ("doc_id", "question", "reference", "response", "variant") if key not in row]
        unknown = [key for key in row if key not in known]
        if missing or unknown:
            raise ValueError(f"{where}: missing {missing}, unknown {unknown}; the keys are {', '.join(known)}")
        record = Record(**row)
        texts = (record.question, record.reference, record.response, record.variant)
        if type(record.doc_id) is not int or not all(isinstance(text, str) for text in texts):
            raise ValueError(f"{where}: doc_id must be a whole number and question, reference, response, variant texts")
        key = (record.doc_id, record.variant, record.seed, record.dataset)
        if key in seen:
            raise ValueError(f"{where}: a second response to doc_id {key[0]} of variant {key[1]!r}, seed {key[2]}")
        seen.add(key)
        records.append(record)
    return records


def read_folder(folder: str | Path) -> list[Record]:
    """The records of a folder's `*.jsonl` files, such as the shards of a run, in the order of doc_id.

    One response for each doc_id: ValueError where there are two. [] for an empty folder, FileNotFoundError without one.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"no folder at {folder}; expected one with *.jsonl files of records")
    records: dict[int, Record] = {}
    for file in sorted(folder.glob("*.jsonl")):
        for record in read_records(file):
            if record.doc_id in records:
                raise ValueError(
                    f"{file.name}: a second response to doc_id {record.doc_id} in {folder.name}/; "
                    "keep each variant and seed in a folder of its own"
                )
            records[record.doc_id] = record
    return [records[doc_id] for doc_id in sorted(records)]


def read_lm_eval(where: str | Path, variant: str) -> list[Record]:
    """Records from lm-eval's `samples_gsm8k*.jsonl` (`lm_eval --log_samples`): one for each doc_id, in their order.

    lm-eval writes a line for every filter (strict-match, flexible-extract) of a document; their responses are the same,
    and the grading here is `Record.correct`. What lm-eval made of it is in extra["exact_match"], filter -> 0 or 1.

    Args:
        where: a file, or a folder in which (or below which) the latest by the timestamp in its name is taken.
        variant: name of what answered.

    Raises:
        FileNotFoundError: no such file.
        ValueError: two tasks of one run in the folder, several responses to a document, lines of another kind.
    """
    path = _latest_samples(Path(where))
    records: dict[int, Record] = {}
    for line, row in _json_lines(path):
        try:
            doc_id, responses, question = int(row["doc_id"]), row["resps"][0], row["doc"]["question"]
            reference = str(row["doc"].get("answer", row.get("target")))
        except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"{path.name}:{line} is no gsm8k sample of lm-eval: no {error}") from error
        if isinstance(responses, list) and len(responses) != 1:
            raise ValueError(f"{path.name}:{line}: doc_id {doc_id} has {len(responses)} responses; expected one")
        response = str(responses[0] if isinstance(responses, list) else responses)
        graded = {str(row["filter"]): row["exact_match"]} if "exact_match" in row and "filter" in row else {}
        if doc_id in records:
            if records[doc_id].response != response:
                raise ValueError(f"{path.name}:{line}: doc_id {doc_id} has another response than before")
            records[doc_id].extra["exact_match"].update(graded)
            continue
        sampling, extra = _generation_arguments(row), {"exact_match": graded, "source": path.name}
        records[doc_id] = Record(doc_id, question, reference, response, variant, None, sampling, GSM8K, extra)
    if not records:
        raise ValueError(f"{path.name} holds no samples")
    return [records[doc_id] for doc_id in sorted(records)]


def latest_run(folder: str | Path) -> Path:
    """The most recent run folder in `folder` by the timestamp in its name: `20260131-235900`, `2026-01-31T23-59-00`
    and the like, with words around them. FileNotFoundError when there is none."""
    folder = Path(folder)
    stamped = [
        (stamp, path.name, path)
        for path in (folder.iterdir() if folder.is_dir() else ())
        if path.is_dir() and (stamp := timestamp(path.name))
    ]
    if not stamped:
        raise FileNotFoundError(f"no run in {folder}: expected folders named by date and time, such as 20260131-235900")
    return max(stamped)[2]


def run_name(moment: datetime.datetime) -> str:
    """A folder's name for a run begun at `moment`, such as "20260131-235900": names sort by time."""
    return moment.strftime("%Y%m%d-%H%M%S")


def timestamp(name: str) -> datetime.datetime | None:
    """The date and time that a file's or folder's name holds, None without one."""
    for found in _TIMESTAMP.finditer(name):
        *parts, fraction = found.groups()
        try:
            return datetime.datetime(*map(int, parts), int((fraction or "").ljust(6, "0")))
        except ValueError:
            continue
    return None


def scores(records: Iterable[Record]) -> tuple[list[int], dict[str, np.ndarray]]:
    """What the statistics take: the questions' ids and, for each variant, its scores on them in that order.

    A question answered with several seeds has the mean over them as its score, and a variant then has float64 [n] with
    values from 0 to 1.

    Raises:
        ValueError: variants answered other questions, or a question's text or reference differs between records.
    """
    right: dict[str, dict[int, list[bool]]] = {}
    asked: dict[int, tuple[str, str]] = {}
    for record in records:
        about = (record.question, record.reference)
        if asked.setdefault(record.doc_id, about) != about:
            raise ValueError(f"doc_id {record.doc_id} is two different questions; pairing needs one set of problems")
        right.setdefault(record.variant, {}).setdefault(record.doc_id, []).append(record.correct)
    ids = sorted(asked)
    for variant, answers in right.items():
        missing = [doc_id for doc_id in ids if doc_id not in answers]
        if missing:
            some = ", ".join(map(str, missing[:5]))
            raise ValueError(
                f"variant {variant!r} lacks {len(missing)} of {len(ids)} questions (doc_id {some}); a paired "
                "comparison needs the same questions of all variants"
            )
        if len({len(answers[doc_id]) for doc_id in ids}) > 1:
            raise ValueError(f"variant {variant!r} answered some questions more often than others")
    return ids, {variant: np.array([np.mean(answers[i]) for i in ids]) for variant, answers in right.items()}


def _plain(text: str) -> str:
    """Without the marks of Markdown and LaTeX that models put around a number."""
    text = re.sub(r"\\(?:boxed|text|mathrm|mathbf)\{([^{}]*)\}", r"\1", text)
    text = re.sub(r"\\[dt]?frac\{([^{}]*)\}\{([^{}]*)\}", r"\1/\2", text)
    return re.sub(r"\*\*|__|`", "", text).replace("\\$", "$").replace("\\%", "%").replace("\\(", "").replace("\\)", "")


def _value(digits: str) -> Fraction:
    whole = digits.replace(",", "").rstrip(".")
    return Fraction(whole if not whole.startswith(".") else f"0{whole}")


def _problem(doc_id: int, row: dict, where: str) -> Problem:
    try:
        question, answer = row["question"], row["answer"]
        fits = isinstance(question, str) and final_answer(answer) is not None
    except (KeyError, TypeError):
        fits = False
    if not fits:
        raise ValueError(f"{where} is no GSM8K problem; expected {FORMAT}")
    return Problem(doc_id, question, answer, GSM8K)


def _json_lines(path: Path):
    """(line number, object) of each line that isn't blank; ValueError with file and line for what is no object."""
    if not path.is_file():
        raise FileNotFoundError(f"no file at {path}; expected JSON objects, one per line")
    for line, text in enumerate(path.read_text(encoding="utf-8").split("\n"), 1):
        if not text.strip():
            continue
        try:
            row = json.loads(text)
        except ValueError as error:
            raise ValueError(f"{path.name}:{line} is no JSON: {error}") from error
        if not isinstance(row, dict):
            raise ValueError(f"{path.name}:{line} is no JSON object")
        yield line, row


def _latest_samples(where: Path) -> Path:
    if where.is_file():
        return where
    files = sorted(where.rglob("samples_gsm8k*.jsonl")) if where.is_dir() else []
    if not files:
        raise FileNotFoundError(
            f"no samples_gsm8k*.jsonl in {where}; lm_eval --tasks gsm8k --log_samples --output_path writes them"
        )
    stamps = {file: timestamp(file.name) or datetime.datetime.fromtimestamp(file.stat().st_mtime) for file in files}
    latest = [file for file in files if stamps[file] == max(stamps.values())]
    if len(latest) > 1:
        raise ValueError(f"{' and '.join(file.name for file in latest)} are of one run; pass the file you mean")
    return latest[0]


def _generation_arguments(row: dict) -> dict:
    """lm-eval's generation arguments, which its versions write as a dict or as a list of lists."""
    try:
        arguments = row["arguments"]
        found = arguments["gen_args_0"]["arg_1"] if isinstance(arguments, dict) else arguments[0][1]
    except (KeyError, IndexError, TypeError):
        return {}
    return dict(found) if isinstance(found, dict) else {}
