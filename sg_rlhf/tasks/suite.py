"""The contract of an evaluation suite: what is asked, under which settings, and who grades.

A benchmark is a set of questions under one setting; a data set that is scored under several
settings (Knights & Knaves) is several benchmarks. A `Suite` is data. Most suites use the defaults
of its two functions, `prepare` and `report`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypeAlias

from sg_rlhf.tasks import chat
from sg_rlhf.tasks.contamination import ContaminationRecord
from sg_rlhf.tasks.grade import Grade
from sg_rlhf.tasks.overlap import Problem
from sg_rlhf.tasks.questions import (
    EvalError,
    Question,
    Source,
    first_per_group,
    one_line,
    random_subset,
    sample_seed,
)
from sg_rlhf.tasks.rollout import Environment

#: (response, gold) pairs -> a grade for each, in order.
BatchGrader: TypeAlias = Callable[[Sequence[tuple[str, Any]]], list[Grade]]
#: Everything of `results.json`.
Results: TypeAlias = Mapping[str, Any]
#: What `--grader` and the tables call the suite's own grader.
OURS = "ours"
#: Why dialogues cannot be asked of a server that exchanges text.
NEEDS_TOKENS = (
    "--engine openai: dialogues need token ids, which a vLLM server returns, and the tokenizer of "
    "its model; give --model as a folder or hub id"
)
FinishReason: TypeAlias = Literal["stop", "length", "prompt_too_long"]


@dataclass(frozen=True)
class Sampling:
    """How the responses of a benchmark are sampled.

    Attributes:
        temperature: 0 is greedy.
        max_tokens: tokens of the response alone; cut to what the model's context leaves.
        n: responses per question.
        top_p: nucleus; 1 is all tokens.
    """

    temperature: float
    max_tokens: int
    n: int = 1
    top_p: float = 1.0

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Benchmark:
    """Questions under one setting, with their grader.

    Attributes:
        name, family: as `--only` takes them; several benchmarks may share a family.
        size: number of questions of the whole set; another number is an error, unless `samples`.
        load: folder with the data -> questions and where they are from.
        grade: (response, gold) pairs -> grades, in order.
        pass_at: the k of pass@k that are reported beside the mean over samples.
        headline_groups: groups whose scores are averaged into the benchmark's score; empty means
            one mean over all questions.
        metric: name of the mean over questions, where there is one response to each.
        samples: a file may be a sample of the set, which is then reported as one, and a limit
            draws questions at random instead of taking the first.
        exposure: which models may have seen the questions; None: nothing is said of it.
        questions, sources: filled in by `load_questions`.
    """

    name: str
    family: str
    title: str
    size: int
    settings: Sampling
    load: Callable[[Path | None], tuple[list[Question], list[Source]]]
    grade: BatchGrader
    licence: str
    pass_at: tuple[int, ...] = ()
    headline_groups: tuple[str, ...] = ()
    metric: str = "accuracy"
    samples: bool = False
    exposure: ContaminationRecord | None = None
    questions: Sequence[Question] = ()
    sources: Sequence[Source] = ()

    @property
    def mean_name(self) -> str:
        """Name of the mean over samples: the metric's, or `avg@n` for several samples."""
        return self.metric if self.settings.n == 1 else f"avg@{self.settings.n}"


def one_by_one(grade: Callable[[str, Any], Grade]) -> BatchGrader:
    """A benchmark's grader of one that takes a response at a time."""

    def grade_many(pairs: Sequence[tuple[str, Any]]) -> list[Grade]:
        return [grade(response, gold) for response, gold in pairs]

    return grade_many


def load_questions(
    benchmarks: Sequence[Benchmark], folder: Path | None, limit: int | None, seed: int = 0
) -> list[Benchmark]:
    """Read and check every benchmark's questions.

    The seed draws the limited questions of benchmarks that say so; the others give their first.
    """
    loaded = []
    for benchmark in benchmarks:
        try:
            questions, sources = benchmark.load(folder)
        except ValueError as error:
            raise EvalError(str(error)) from None
        if len(questions) != benchmark.size and not benchmark.samples:
            raise EvalError(
                f"{benchmark.name}: {len(questions)} questions, expected {benchmark.size}"
            )
        if len({question.id for question in questions}) != len(questions):
            raise EvalError(f"{benchmark.name}: two questions have the same id")
        if benchmark.samples:
            kept = random_subset(questions, limit, sample_seed(seed, benchmark.name, "limit", 0))
        else:
            kept = first_per_group(questions, limit)
        loaded.append(replace(benchmark, questions=kept, sources=sources))
    return loaded


def with_messages_written(benchmarks: Sequence[Benchmark], tokenizer: Any) -> list[Benchmark]:
    """The benchmarks, with the prompts of questions that are messages in the chat template."""

    def written(benchmark: str, question: Question) -> Question:
        if not question.messages:
            return question
        try:
            if tokenizer.chat_template is None:
                raise ValueError("the model's tokenizer has no chat template")
            prompt = chat.render(tokenizer, question.messages)
        except Exception as error:  # a template raises anything
            raise EvalError(
                f"{benchmark}: {question.id}: its messages: {one_line(error)}"
            ) from None
        return replace(question, prompt=prompt)

    return [replace(b, questions=[written(b.name, q) for q in b.questions]) for b in benchmarks]


@dataclass(frozen=True)
class Setup:
    """What `Suite.prepare` gets.

    Attributes:
        benchmarks: those that were selected, with the settings that were asked for.
        options: values of the suite's own options, by name.
        resources: stops at the end what was started.
        limit: questions per benchmark; None: all. The seed draws them.
        tokenizer: loads the model's; None for a model that only a server knows.
        run_settings: `config.yaml` of the model's training run; empty without one.
        regrade: stored responses are graded again: no questions and no model are needed.
    """

    benchmarks: Sequence[Benchmark]
    options: Mapping[str, Any]
    resources: ExitStack
    data_dir: Path | None = None
    limit: int | None = None
    seed: int = 0
    tokenizer: Callable[[], Any] | None = None
    run_settings: Mapping[str, Any] = field(default_factory=dict)
    regrade: bool = False


class Prepared(NamedTuple):
    """What `Suite.prepare` returns.

    Attributes:
        benchmarks: with their questions and graders.
        request: what must be the same again when the run is resumed; a part of `results.json`.
        environment: makes the environment that answers the model's turns; None: that of the
            suite's domain, if it has one.
    """

    benchmarks: Sequence[Benchmark]
    request: Mapping[str, Any] = MappingProxyType({})
    environment: Callable[[], Environment] | None = None


def prepare_questions(setup: Setup) -> Prepared:
    """Read the questions; write messages with the model's chat template."""
    if setup.regrade:
        return Prepared(setup.benchmarks)
    loaded = load_questions(setup.benchmarks, setup.data_dir, setup.limit, setup.seed)
    chats = [b.name for b in loaded if any(q.messages for q in b.questions)]
    if not chats:
        return Prepared(loaded)
    if setup.tokenizer is None:
        raise EvalError(
            f"--engine openai: the questions of {chats[0]} are messages, which are written "
            "with the chat template of a model's folder; expected vllm"
        )
    return Prepared(with_messages_written(loaded, setup.tokenizer()))


@dataclass(frozen=True)
class ExtraTable:
    """A table of the report beside the scores."""

    title: str
    heads: tuple[str, ...]
    rows: Sequence[Sequence[str]]
    note: str


class Report(NamedTuple):
    """What a suite adds to a report: figures by benchmark, for `results.json`, and tables."""

    figures: Mapping[str, Mapping[str, Any]]
    tables: Sequence[ExtraTable] = ()


#: (samples by benchmark, failed dialogues by benchmark) -> further figures and tables.
Reporter: TypeAlias = Callable[
    [Mapping[str, Sequence[Mapping[str, Any]]], Mapping[str, int]], Report
]


def report_graders(
    rows: Mapping[str, Sequence[Mapping[str, Any]]], failures: Mapping[str, int]
) -> Report:
    """Each other grader's scores (`Grade.others`) compared with ours, on the same responses."""
    figures = {name: grader_statistics(part) for name, part in rows.items()}
    cells = []
    for benchmark, found in figures.items():
        if not found:
            continue
        ours = sum(bool(row["correct"]) for row in rows[benchmark]) / len(rows[benchmark])
        cells.append([benchmark, OURS, f"{ours:.3f}", "", "", ""])
        for name, score in found["graders"].items():
            counts = (score["only_ours"], score["only_theirs"], score["no_verdict"])
            cells.append([benchmark, name, f"{score['accuracy']:.3f}", *map(str, counts)])
    heads = ("Benchmark", "Grader", "Accuracy", "Only ours", "Only theirs", "No verdict")
    note = (
        "Mean over all responses. Only ours, only theirs: responses that one of the two accepts. "
        "No verdict: out of time or memory, counted as wrong."
    )
    table = ExtraTable("The same responses by other graders", heads, cells, note)
    return Report(figures, [table] if cells else [])


@dataclass(frozen=True)
class Suite:
    """Benchmarks that are reported together.

    Attributes:
        average: (benchmark, score) columns whose mean is the paper's average, with its title.
        groups: further means over columns by title, each given where all its columns were run.
        by_default: benchmarks that are selected where none is named; empty: all.
        options: options that only this suite has: flag -> keywords of argparse's `add_argument`,
            except `dest`, which is the flag's own.
        refused: options of every suite that have no effect on this one: flag -> the reason.
        prepare: reads the questions, and starts what the run needs.
        report: further figures and tables of the graded samples.
        stored: name -> benchmark of a stored run, for a suite whose benchmarks are the user's own.
        training_field: of a row that was trained on, the field with the question's bare text.
        training_problems: reads the problems of a training file in place of `training_field`.
        shared_runs: words of a run that a question and a training problem may share without being
            the same; None: only the same text is looked for in training data.
        beside_the_paper: the Markdown lines of the table with the paper's rows; None without one.
    """

    name: str
    title: str
    benchmarks: tuple[Benchmark, ...]
    average: tuple[tuple[str, str], ...] = ()
    average_title: str = ""
    groups: Mapping[str, tuple[tuple[str, str], ...]] = field(default_factory=dict)
    by_default: tuple[str, ...] = ()
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    prepare: Callable[[Setup], Prepared] = prepare_questions
    report: Reporter = report_graders
    stored: Callable[[str], Benchmark] | None = None
    training_field: str = "input"
    training_problems: Callable[[Path], Sequence[Problem]] | None = None
    shared_runs: int | None = None
    beside_the_paper: Callable[[Results, Suite], list[str]] | None = None

    def select(self, only: Sequence[str]) -> tuple[Benchmark, ...]:
        """The benchmarks named (by name or family), in the suite's order; else `by_default`."""
        known = {b.name for b in self.benchmarks} | {b.family for b in self.benchmarks}
        for name in only:
            if name not in known:
                raise EvalError(
                    f"--only {name}: not in suite {self.name}, "
                    f"expected one of {', '.join(sorted(known))}"
                )
        wanted = set(only or self.by_default or known)
        return tuple(b for b in self.benchmarks if {b.name, b.family} & wanted)


def get_score(results: Results, benchmark: str, name: str) -> Any:
    """One score of `results.json` (`value`, `ci95`, ...); None if it was not run."""
    return results["benchmarks"].get(benchmark, {}).get("scores", {}).get(name)


def grader_statistics(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The other graders' scores on one benchmark; none of a grader without a verdict on a row."""
    names = rows[0].get("graders", {}) if rows else {}
    judged = [name for name in names if all(name in row.get("graders", {}) for row in rows)]
    return {"graders": {name: _compare_with_ours(name, rows) for name in judged}} if judged else {}


def _compare_with_ours(name: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    pairs = [(bool(row["correct"]), row["graders"][name]) for row in rows]
    return {
        "accuracy": sum(bool(theirs) for _, theirs in pairs) / len(pairs),
        "only_ours": sum(ours and not theirs for ours, theirs in pairs),
        "only_theirs": sum(bool(theirs) and not ours for ours, theirs in pairs),
        "no_verdict": sum(theirs is None for _, theirs in pairs),
    }
