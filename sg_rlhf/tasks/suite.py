"""The contract of an evaluation suite: what is asked, under which settings, and who grades.

A benchmark is a set of questions under one setting. Where a data set is scored under several
settings (Knights & Knaves), each is a benchmark of its own: responses made under one setting are
never graded as if they had been made under another.

`sg-rlhf eval` calls `check` and `prepare`, generates and grades the responses, and writes the
report, to which `statistics` and `tables` add. Most suites need none of these methods: their
benchmarks are all that they are.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

from sg_rlhf.common.text import truncate
from sg_rlhf.data_io.records import DataError, json_objects, parquet_rows, read_each
from sg_rlhf.tasks import chat
from sg_rlhf.tasks.contamination import ContaminationRecord
from sg_rlhf.tasks.grade import Grade, Grader
from sg_rlhf.tasks.overlap import Problem, Text
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
#: Prompts -> their tokens; empty lists where only the server could tell.
Tokenize: TypeAlias = Callable[[Sequence[str]], list[list[int]]]
#: Everything of `results.json`.
Results: TypeAlias = Mapping[str, Any]
#: What `--grader` and the tables call the suite's own grader.
OURS = "ours"
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
        name: as `--only` takes it.
        family: `--only FAMILY` selects all benchmarks that share it.
        title: as in the tables.
        size: number of questions of the whole set; another number is an error, unless `samples`.
        settings: how responses are sampled.
        load: folder with the data -> questions and where they are from.
        grade: (response, gold) pairs -> grades, in order.
        licence: of the questions.
        pass_at: the k of pass@k that are reported beside the mean over samples.
        headline_groups: groups whose scores are averaged into the benchmark's score; empty means
            one mean over all questions.
        metric: name of the mean over questions, where there is one response to each.
        samples: a file may be a sample of the set, which is then reported as one, and a limit
            draws questions at random instead of taking the first.
        exposure: which models may have seen the questions; None: nothing is said of it.
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

    @property
    def mean_name(self) -> str:
        """Name of the mean over samples: the metric's, or `avg@n` for several samples."""
        return self.metric if self.settings.n == 1 else f"avg@{self.settings.n}"


def one_by_one(grade: Grader) -> BatchGrader:
    """A benchmark's grader of one that takes a response at a time."""

    def grade_many(pairs: Sequence[tuple[str, Any]]) -> list[Grade]:
        return [grade(response, gold) for response, gold in pairs]

    return grade_many


class LoadedBenchmark(NamedTuple):
    """A benchmark with the questions that are asked, and the files that they came from."""

    benchmark: Benchmark
    questions: list[Question]
    sources: list[Source]


def load_questions(
    benchmarks: Sequence[Benchmark], folder: Path | None, limit: int | None, seed: int = 0
) -> list[LoadedBenchmark]:
    """Read and check every benchmark's questions.

    Args:
        seed: draws the limited questions of benchmarks that say so; the others give their first.

    Raises:
        EvalError: a file is missing or another than expected; names it.
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
        loaded.append(LoadedBenchmark(benchmark, kept, sources))
    return loaded


def with_messages_written(
    loaded: Sequence[LoadedBenchmark], tokenizer: Any
) -> list[LoadedBenchmark]:
    """The questions, with the prompts of those that are messages in the model's chat template.

    Raises:
        EvalError: the tokenizer has no template, or its template refuses the messages.
    """

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

    return [
        part._replace(questions=[written(part.benchmark.name, q) for q in part.questions])
        for part in loaded
    ]


@dataclass(frozen=True)
class EvalPlan:
    """What `Suite.prepare` found; a suite may give one of its own with more in it.

    Attributes:
        loaded: what is asked.
        request: what must be the same again when the run is resumed, beside what every run has;
            a part of `results.json`.
        tokenize: of the prompts; None: as the model's tokenizer does by default.
        environment: makes the environment that answers the model's turns; None: that of the
            suite's domain with its default settings, or, for a domain without one, one response to
            each prompt.
    """

    loaded: Sequence[LoadedBenchmark]
    request: Mapping[str, Any] = field(default_factory=dict)
    tokenize: Tokenize | None = None
    environment: Callable[[], Environment] | None = None


@dataclass(frozen=True)
class ExtraTable:
    """A table of the report beside the scores; `about`: what its figures are, for its title."""

    title: str
    about: str
    heads: tuple[str, ...]
    rows: Sequence[Sequence[str]]
    note: str


@dataclass(frozen=True)
class Suite:
    """Benchmarks that are reported together.

    Attributes:
        average: (benchmark, score) columns whose mean is the paper's average; empty where every
            benchmark has a mean of its own.
        average_title: what the tables call it.
        groups: further means over columns by title, each given where all its columns were run.
        by_default: benchmarks that are selected where none is named; empty: all.
        training_field: of a row that was trained on, the field with the question's bare text.
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
    training_field: str = "input"
    shared_runs: int | None = None
    beside_the_paper: Callable[[Results, Suite], list[str]] | None = None

    def select(self, only: Sequence[str]) -> tuple[Benchmark, ...]:
        """The benchmarks named (by name or family), in the suite's order.

        Where none is named these are `by_default`.

        Raises:
            EvalError: a name is unknown; says which there are.
        """
        known = {b.name for b in self.benchmarks} | {b.family for b in self.benchmarks}
        for name in only:
            if name not in known:
                raise EvalError(
                    f"--only {name}: not in suite {self.name}, "
                    f"expected one of {', '.join(sorted(known))}"
                )
        wanted = set(only or self.by_default or known)
        return tuple(b for b in self.benchmarks if {b.name, b.family} & wanted)

    def add_options(self, parser: argparse._ActionsContainer) -> None:
        """Options that this suite alone has; with another one they are refused."""

    def for_arguments(self, args: argparse.Namespace) -> Suite:
        """The suite, or one with benchmarks that the command line describes.

        Raises:
            EvalError: it does not; one line for the user.
        """
        return self

    def known(self, stored: Mapping[str, Any]) -> dict[str, Benchmark]:
        """The benchmarks by name, to read a stored run.

        Args:
            stored: the benchmarks in its request.
        """
        return {benchmark.name: benchmark for benchmark in self.benchmarks}

    def check(self, args: argparse.Namespace) -> None:
        """What can be wrong in the command line alone.

        Raises:
            EvalError: one line for the user.
        """

    def applies_template(self, args: argparse.Namespace) -> bool:
        """Whether the prompts go through the model's chat template without `--chat-template`."""
        return False

    def missing(self, benchmarks: Sequence[Benchmark], args: argparse.Namespace) -> list[str]:
        """What the run needs beside a model, and nobody gave: a phrase for each, with the remedy.

        Called before anything is started. What is found where it is looked for by default is set
        in `args`.

        Args:
            args: as they were given; `run_settings` is the `config.yaml` of the run that the model
                is from, empty without one. Without a model (None) all is looked for; with one, what
                `prepare` finds missing too may be left to it.
        """
        if args.model is not None:
            return []
        try:
            load_questions(benchmarks, args.data_dir, args.limit, args.seed)
        except EvalError as error:
            return [f"questions: {error}"]
        return []

    def with_graders(
        self, benchmarks: Sequence[Benchmark], args: argparse.Namespace, resources: ExitStack
    ) -> tuple[Sequence[Benchmark], Mapping[str, Any]]:
        """The benchmarks with the graders that the command line names.

        Also called to grade stored responses again, with no questions and no model.

        Args:
            resources: stops at the end what was started.

        Returns:
            The benchmarks, and what must be the same again when the run is resumed.

        Raises:
            EvalError: a grader is missing.
        """
        return benchmarks, {}

    def prepare(
        self,
        benchmarks: Sequence[Benchmark],
        args: argparse.Namespace,
        tokenizer: Callable[[], Any],
        resources: ExitStack,
    ) -> EvalPlan:
        """Read the questions, and start what the run needs.

        Args:
            benchmarks: those that were selected.
            tokenizer: loads the model's; None for a model behind a server.
            resources: stops at the end what was started.

        Raises:
            EvalError: something is missing or does not start.
        """
        loaded = load_questions(benchmarks, args.data_dir, args.limit, args.seed)
        chats = [b.benchmark.name for b in loaded if any(q.messages for q in b.questions)]
        if not chats:
            return EvalPlan(loaded)
        if args.engine == "openai":
            raise EvalError(
                f"--engine openai: the questions of {chats[0]} are messages, which are written "
                "with the chat template of a model's folder; expected vllm"
            )
        return EvalPlan(with_messages_written(loaded, tokenizer()))

    def training_problems(self, path: Path) -> Sequence[Problem]:
        """The problems of a file that was trained on, as `Question.problem` has them.

        Raises:
            ValueError: the file cannot be read; names it.
        """

        def problem_of(row: Mapping[str, Any], number: int) -> Text:
            text = row.get(self.training_field)
            if isinstance(text, list) and text and isinstance(text[-1], dict):
                text = text[-1].get("content")  # as `Question.problem` has it
            if not isinstance(text, str):
                raise DataError(f"{self.training_field}: {truncate(text)}, expected text")
            return Text(f"row {number}", text)

        rows = parquet_rows(path) if path.suffix == ".parquet" else json_objects(path)
        return read_each(path, rows, problem_of, "row")

    def statistics(self, rows: Sequence[Mapping[str, Any]], failures: int) -> dict[str, Any]:
        """Further figures of one benchmark's rows, for `results.json`.

        By default those of other graders (`Grade.others`).

        Args:
            failures: how often a dialogue of it could not be held.
        """
        return grader_statistics(rows)

    def tables(self, results: Results) -> Sequence[ExtraTable]:
        """Tables of these figures."""
        return grader_tables(results)


def get_score(results: Results, benchmark: str, name: str) -> Any:
    """One score of `results.json` (`value`, `ci95`, ...); None if it was not run."""
    return results["benchmarks"].get(benchmark, {}).get("scores", {}).get(name)


def grader_statistics(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Each other grader's scores compared with ours, on the same responses of one benchmark.

    Nothing for a grader without a verdict on every row.
    """
    names = rows[0].get("graders", {}) if rows else {}
    judged = [name for name in names if all(name in row.get("graders", {}) for row in rows)]
    return {"graders": {name: _compare_with_ours(name, rows) for name in judged}} if judged else {}


def grader_tables(results: Results) -> Sequence[ExtraTable]:
    """One row per benchmark and grader; none without other graders."""
    rows = []
    for benchmark, found in results["benchmarks"].items():
        scores = found.get("graders", {})
        if scores:
            # Over all responses, as theirs: a benchmark's own score may be that of some groups.
            first = next(iter(scores.values()))
            responses = found["n_questions"] * found["settings"]["n"]
            ours = first["accuracy"] + (first["only_ours"] - first["only_theirs"]) / responses
            rows.append([benchmark, OURS, f"{ours:.3f}", "", "", ""])
        for name, score in scores.items():
            counts = (score["only_ours"], score["only_theirs"], score["no_verdict"])
            rows.append([benchmark, name, f"{score['accuracy']:.3f}", *map(str, counts)])
    if not rows:
        return ()
    heads = ("Benchmark", "Grader", "Accuracy", "Only ours", "Only theirs", "No verdict")
    note = (
        "Mean over all responses. Only ours, only theirs: responses that one of the two accepts. "
        "No verdict: out of time or memory, counted as wrong."
    )
    return (ExtraTable("The same responses by other graders", "responses", heads, rows, note),)


def _compare_with_ours(name: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    pairs = [(bool(row["correct"]), row["graders"][name]) for row in rows]
    return {
        "accuracy": sum(bool(theirs) for _, theirs in pairs) / len(pairs),
        "only_ours": sum(ours and not theirs for ours, theirs in pairs),
        "only_theirs": sum(bool(theirs) and not ours for ours, theirs in pairs),
        "no_verdict": sum(theirs is None for _, theirs in pairs),
    }
