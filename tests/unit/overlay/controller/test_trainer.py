"""The controller's own decisions, without the models and engines that it controls."""

from __future__ import annotations

import argparse
import io
import json
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch
from torchdata.stateful_dataloader import StatefulDataLoader
from transformers import get_scheduler

from sg_rlhf.config.derived.async_config import AsyncConfig
from sg_rlhf.overlay.controller import engine_sync, rollout_stats, run_start
from sg_rlhf.overlay.controller import trainer as controller
from sg_rlhf.overlay.controller.controller_state import TOKENS, ControllerState
from sg_rlhf.overlay.controller.engine_sync import EngineSync
from sg_rlhf.overlay.controller.evaluation_loop import EvaluationLoop
from sg_rlhf.overlay.controller.metric_log import MetricLog
from sg_rlhf.overlay.controller.sample_log import SampleLog
from sg_rlhf.overlay.controller.trainer import Controller
from sg_rlhf.overlay.driver import run as cli
from sg_rlhf.overlay.learner.actor import resumed_rates
from sg_rlhf.overlay.learner.experience_maker import ScoredRollout
from sg_rlhf.overlay.reporting import activity
from sg_rlhf.overlay.reporting import terminal as progress
from sg_rlhf.overlay.reporting.errors import (
    CheckpointError,
    NonFiniteError,
    RunStopped,
    SyncError,
    UnusablePrompts,
)
from sg_rlhf.overlay.reporting.timing import PhaseTimer
from sg_rlhf.overlay.rollout import engine_pool
from sg_rlhf.overlay.rollout.async_buffer import BUFFER_KEY
from sg_rlhf.overlay.rollout.engine_pool import START_TIMEOUT
from sg_rlhf.overlay.rollout.generator import SamplesGenerator
from sg_rlhf.overlay.rollout.samples import Sampling
from sg_rlhf.overlay.settings import rollout_plan
from sg_rlhf.run_dir import jsonl_log


def trainer(prompts: int = 10, **sg: Any) -> Any:
    """One that has just been built, over ``prompts`` prompts in rollouts of 4."""
    made: Any = object.__new__(Controller)
    made.args = SimpleNamespace(
        rollout=SimpleNamespace(
            batch_size=4, n_samples_per_prompt=4, temperature=1.0, top_p=1.0, max_new_tokens=None
        ),
        data=SimpleNamespace(max_len=64),
        train=SimpleNamespace(
            batch_size=8,
            num_episodes=3,
            max_epochs=1,
            enable_ema=False,
            async_enable=False,
            partial_rollout_enable=False,
            dynamic_batch_enable=False,
        ),
        algo=SimpleNamespace(
            dynamic_filtering_enable=False, advantage=SimpleNamespace(estimator="group_norm")
        ),
        vllm=SimpleNamespace(enable_sleep=False),
        logger=SimpleNamespace(wandb=SimpleNamespace(key=None), tensorboard_dir=None),
        eval=SimpleNamespace(steps=2, temperature=1.0, n_samples_per_prompt=1),
    )
    made.args.sg = SimpleNamespace(
        engine_timeout=0.0,
        engine_restarts=3,
        wandb="disabled",
        trackio=False,
        sync_check_tolerance=0.05,
        max_staleness=1,
        **sg,
    )
    made._engine_handles, made._processes, made._policy = [], {}, None
    made._generator = SimpleNamespace(
        pop_filtered_tokens=lambda: 0, buffer=None, sampling=Sampling.of_rollouts(made.args)
    )
    made._kl_controller = SimpleNamespace(value=0.001)
    made._state = ControllerState(made._generator, made._kl_controller)
    made._plan = rollout_plan.plan(prompts, made.args)
    made._prompts = SimpleNamespace(dataset=SimpleNamespace(check=lambda: None))
    made._run_dir = None
    made._async_config = made._buffer = None
    made._staleness, made._sync_metrics = {}, {}
    made._clock, made._global_step = PhaseTimer(), 0
    made._sample_log = SampleLog(made.args, None)
    log_to(made, None)
    return made


def log_to(made: Any, run_dir: Path | None) -> None:
    made._run_dir = run_dir
    made._log = MetricLog(made.args, run_dir)
    made._evaluation = EvaluationLoop(made.args, [], None, made._generator, made._clock, made._log)


def test_a_resumed_run_says_which_learning_rate_it_goes_on_with(tmp_path: Path) -> None:
    """Checkpoints have the schedule's step and base rate, and not its length."""
    made, name = trainer(), "cosine_with_min_lr"

    def scheduler(steps: int, lr: float) -> torch.optim.lr_scheduler.LambdaLR:
        optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2))], lr=lr)
        return get_scheduler(name, optimizer, 0, steps, {"min_lr_rate": 0.1})

    done = scheduler(8, 2e-4)
    for _ in range(8):
        done.optimizer.step()
        done.step()

    def remarks(steps: int, lr: float) -> list[str]:
        resumed = scheduler(steps, lr)
        resumed.load_state_dict(done.state_dict())
        made.args.actor = SimpleNamespace(
            lr_scheduler=name, optim="adam", adam=SimpleNamespace(lr=lr)
        )
        return run_start.rate_remarks(made.args, resumed_rates(resumed), steps)

    assert remarks(8, 2e-4) == []
    longer = (
        "learning rate: 2e-05 at the checkpoint, 0.00011 from here on: "
        "actor.lr_scheduler=cosine_with_min_lr now ends after 16 optimizer steps"
    )
    assert remarks(16, 2e-4) == [longer]
    assert remarks(16, 3e-4) == [
        longer,
        "learning rate: actor.adam.lr=0.0003 is not used: a resumed run keeps 0.0002; for another "
        "rate start another run from the checkpoint's model",
    ]
    run_start.write_plan(tmp_path, made._plan, {}, [longer])
    assert json.loads((tmp_path / progress.PLAN).read_text())["remarks"][-1] == longer


def test_the_plan_has_whole_rollouts_and_says_what_it_leaves_out(tmp_path: Path) -> None:
    made = trainer()
    assert made._plan.optimizer_steps == 2 * 3 * 2
    run_start.write_plan(tmp_path, made._plan, {})
    plan = json.loads((tmp_path / progress.PLAN).read_text())
    assert plan["rollouts"] == 6
    terminal = io.StringIO()
    bar = progress.Progress(tmp_path, terminal)
    (tmp_path / progress.PLAN).write_text(json.dumps(plan))
    bar._read()
    bar._read()
    assert terminal.getvalue().count("2 of 10 prompts are left out of each epoch") == 1


def test_too_few_prompts_for_one_rollout_are_bad_usage(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*_args: Any) -> None:
        trainer(3).prepare()

    with pytest.raises(UnusablePrompts):
        run(argparse.Namespace())
    monkeypatch.setattr(cli, "train", run)
    monkeypatch.setattr(cli.signal, "signal", lambda *_: None)
    assert cli.main(argparse.Namespace()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: rollout.batch_size=4: the data set has only 3 prompts")
    assert not issubclass(UnusablePrompts, RunStopped)  # which would be exit status 1


def test_prompts_for_another_family_are_bad_usage_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def check() -> None:
        raise UnusablePrompts("the prompts are Llama 3's")

    def run(*_args: Any) -> None:
        made = trainer()
        made._prompts.dataset.check = check
        made.prepare()

    monkeypatch.setattr(cli, "train", run)
    monkeypatch.setattr(cli.signal, "signal", lambda *_: None)
    assert cli.main(argparse.Namespace()) == 2
    assert capsys.readouterr().err == "error: the prompts are Llama 3's\n"


def test_a_run_that_stopped_says_when_and_how_to_go_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def run(*_args: Any) -> None:
        raise error

    (tmp_path / "checkpoints" / "_actor" / "global_step4").mkdir(parents=True)
    activity.write_to(activity.log_file(tmp_path))
    activity.set_status(5, "ppo_train")
    activity.write_to(None)
    args = argparse.Namespace(
        sg=SimpleNamespace(run_dir=tmp_path), ckpt=SimpleNamespace(path=tmp_path / "checkpoints")
    )
    monkeypatch.setattr(cli, "train", run)
    monkeypatch.setattr(cli.signal, "signal", lambda *_: None)
    error: RunStopped = NonFiniteError("the gradient is NaN")
    assert cli.main(args) == 1
    assert capsys.readouterr().err == (
        "stopped: the gradient is NaN; this was while updating (rollout 5); the same command "
        "resumes from the last checkpoint, global_step4\n"
    )
    error = CheckpointError("no checkpoint is whole")
    assert cli.main(args) == 1
    assert capsys.readouterr().err == "stopped: no checkpoint is whole\n"


@pytest.mark.parametrize(
    ("is_async", "checked"),
    [
        (False, [(1, 16, 1.0)]),
        (True, [(1, 16, 1.0), (2, 2, 4.0), (3, 2, 4.0), (4, 2, 4.0)]),
    ],
)
def test_the_first_sync_that_follows_a_rollout_is_checked(
    monkeypatch: pytest.MonkeyPatch, is_async: bool, checked: list[Any]
) -> None:
    """Number, sequences, and how many tolerances pass. Some samples cannot show other weights."""
    made = trainer()
    made.args.train.async_enable = is_async
    found: list[Any] = []

    class Sync(EngineSync):
        def send(self) -> None:
            """Nothing to send."""

    def check(
        _policy: Any, _pool: Any, batch: Any, _args: Any, sync: int, tolerances: float
    ) -> dict[str, float]:
        found.append((sync, len(batch), tolerances))
        return {}

    monkeypatch.setattr(engine_sync.log_prob_check, "check", check)
    made._sync = Sync(made.args, None, [])
    made._sync_weights()  # on resuming, before any rollout
    assert not found and not made._sync_metrics
    made._sample_log.check_batch = [([1, 2], [True])] * 16
    for rollout in range(4):
        made._sync.version = rollout + 1
        made._sync_weights()
    assert found == checked


@pytest.fixture
def stopped_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Start again a run with these evaluations; its evaluations after it, and what was saved."""

    def start(step: int, evaluated: list[int]) -> tuple[list[tuple[int, bool]], list[Any]]:
        rows = [{"global_step": s, "again": False} for s in evaluated]
        jsonl_log.append(tmp_path / jsonl_log.EVALUATIONS, rows)
        made, saved = trainer(eval_at_start=True), []
        log_to(made, tmp_path)
        made._evaluation._loader = [1]
        states = {
            "global_step": step, "episode": 0, "total_consumed_prompts": 0,
            "data_loader_state_dict": {},
        }  # fmt: skip
        monkeypatch.setattr(made, "_client_states", lambda: states)
        monkeypatch.setattr(run_start, "prepare_run_dir", lambda *_: None)
        monkeypatch.setattr(made, "_rate_remarks", list)
        monkeypatch.setattr(made, "_sync_weights", lambda: None)

        def train(_episode: int, _prompts: int) -> None:
            made._global_step = max(step, 1)

        monkeypatch.setattr(made, "_train", train)
        if not step:  # as prepare_run_dir does
            jsonl_log.drop_after(tmp_path, -1)
        monkeypatch.setattr(
            made._evaluation, "_evaluate", lambda *_: {"eval_accuracy": 1.0, "again": True}
        )
        monkeypatch.setattr(made, "_save_if_best", lambda *given: saved.append(given))
        made.fit()
        rows = jsonl_log.read(tmp_path / jsonl_log.EVALUATIONS)
        return [(row["global_step"], row["again"]) for row in rows], saved

    return start


def test_a_resumed_run_makes_up_for_the_evaluation_that_a_kill_lost(stopped_at: Any) -> None:
    rows, saved = stopped_at(4, evaluated=[0, 2])
    assert rows == [(0, False), (2, False), (4, True)]
    ((metrics, states),) = saved
    assert (metrics["eval_accuracy"], states["global_step"]) == (1.0, 4)


def test_what_was_evaluated_is_not_evaluated_again(stopped_at: Any) -> None:
    assert stopped_at(4, evaluated=[0, 2, 4]) == ([(0, False), (2, False), (4, False)], [])


def test_between_evaluations_a_resumed_run_makes_the_last_one_only(stopped_at: Any) -> None:
    assert stopped_at(3, evaluated=[0, 2]) == ([(0, False), (2, False), (3, True)], [])


def test_a_run_that_starts_over_has_one_evaluation_before_its_first_rollout(
    stopped_at: Any,
) -> None:
    assert stopped_at(0, evaluated=[0]) == ([(0, True), (1, True)], [])


@pytest.mark.parametrize("made_by", ["asynchronous", "synchronous"])
def test_the_best_checkpoint_of_a_lost_evaluation_holds_what_the_resumed_one_held(
    monkeypatch: pytest.MonkeyPatch, made_by: str
) -> None:
    loader = StatefulDataLoader(range(8), batch_size=1)
    rows = iter(loader)
    next(rows)
    place = loader.state_dict()
    batch = {"number": 1, "prompts": [3, 4], "completed": {}, "last": False, "counts": (0, 0)}
    kept = {"batches": [batch], "next": 2, "epochs": 0, "in_epoch": True, "num_drawn": 2}
    states = {"global_step": 4, "episode": 0, "data_loader_state_dict": place}
    if made_by == "asynchronous":
        states[BUFFER_KEY] = kept
    made, saved = trainer(), []
    prompts = StatefulDataLoader(range(8), batch_size=1)
    generator = SamplesGenerator(made.args, prompts, None)  # type: ignore[arg-type]
    made._state = ControllerState(generator, made._kl_controller, "eval_accuracy")
    engines: Any = SimpleNamespace(trainer_lock=threading.Condition())
    config = AsyncConfig(1, 1, batch_size=4, request_size=4)
    generator.start_async(config, states, engines)
    monkeypatch.setattr(made, "_call_ranks", lambda *_, **given: saved.append(given))
    made._global_step = 4
    made._save_if_best({"eval_accuracy": 1.0}, dict(states))
    made._save_if_best({"eval_accuracy": 0.9}, dict(states))  # not the best
    (given,) = saved
    assert given["tag"] == "best_global_step4" and given["metric_value"] == 1.0
    client_states = given["client_states"]
    assert client_states["best_eval_metric_value"] == 1.0
    assert client_states["data_loader_state_dict"] == place
    if made_by == "asynchronous":
        assert client_states[BUFFER_KEY] == kept
    else:
        assert not client_states[BUFFER_KEY]["batches"]


@pytest.mark.parametrize(("empty", "found"), [(2, 2.0), (0, None)])
def test_responses_without_a_token_are_counted(
    monkeypatch: pytest.MonkeyPatch, empty: int, found: float | None
) -> None:
    made = trainer()
    scored = ScoredRollout([], [], empty, None, None)
    made._experience_maker = SimpleNamespace(score=lambda _samples, _rollout: scored)
    made._engines = SimpleNamespace(
        pop_replacement_count=lambda: 0, trainer_lock=threading.Condition()
    )
    made._sync = SimpleNamespace()
    stats = {"rollout/num_samples": 1.0}
    monkeypatch.setattr(controller, "rollout_stats", lambda *_: stats)
    monkeypatch.setattr(made._sample_log, "collect", lambda *_: None)
    monkeypatch.setattr(made._sample_log, "some_responses", lambda _experiences: [])
    monkeypatch.setattr(made._sample_log, "frac_tokens_without_text", lambda _experiences: 0.0)
    monkeypatch.setattr(made._sample_log, "example", lambda _experiences: ["", 1.0])
    monkeypatch.setattr(made, "_send_to_ranks", lambda _experiences: None)
    monkeypatch.setattr(made, "_update_policy", lambda _scored: {})
    monkeypatch.setattr(made, "_sync_weights", lambda: None)
    metrics, _ = made.train_step([])
    assert metrics.get("rollout/empty_responses") == found and made._global_step == 1


class Ranks:
    """Two ranks that run their calls in order; from ``stuck`` on the second answers none."""

    def __init__(self, stuck: str, deadline: float) -> None:
        self.stuck, self.deadline, self.is_stuck = stuck, deadline, False

    def async_run_method(self, method_name: str) -> list[Any]:
        self.is_stuck = self.is_stuck or method_name == self.stuck
        return [self.deadline, None if self.is_stuck else self.deadline]

    def get(self, references: list[Any], timeout: float | None = None) -> Any:
        if None not in references:
            return references
        assert timeout is not None, "waits without limit"
        raise ray.exceptions.GetTimeoutError


@pytest.mark.parametrize(
    ("stuck", "of_ranks", "line"),
    [
        ("join_engines", 120.0, "the engines were not connected to the trainer again .* 150 s"),
        ("join_engines", float("inf"), f"not connected to the .* again within {START_TIMEOUT:g} s"),
        ("broadcast_to_vllm", 120.0, "a rank of the policy did not finish it within 150 s"),
    ],
)
def test_the_first_weight_sync_has_a_deadline(
    monkeypatch: pytest.MonkeyPatch, stuck: str, of_ranks: float, line: str
) -> None:
    """A rank that waits, for an engine or for a rank that failed, answers nothing meanwhile."""
    ranks = Ranks(stuck, of_ranks)
    engine = SimpleNamespace(instance=SimpleNamespace(remote=lambda: "instance"))
    local = SimpleNamespace(get=ranks.get, exceptions=ray.exceptions)
    monkeypatch.setattr(engine_sync, "ray", local)
    monkeypatch.setattr(engine_pool, "ray", local)
    sync = EngineSync(trainer().args, ranks, [engine])
    with pytest.raises(SyncError, match=line):
        sync._rejoin() if stuck == "join_engines" else sync._broadcast()


@pytest.mark.parametrize("replaced", [0, 2])
def test_an_evaluations_row_counts_the_engines_that_were_replaced_in_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, replaced: int
) -> None:
    """No rollout's row is written after the last evaluation."""
    made = trainer()
    log_to(made, tmp_path)
    made._evaluation._loader = [1]
    made._evaluation.pop_replacement_count = lambda: replaced
    monkeypatch.setattr(made._evaluation, "_evaluate", lambda *_: {"eval_accuracy": 1.0})
    made._evaluation.run(4)
    (row,) = jsonl_log.read(tmp_path / jsonl_log.EVALUATIONS)
    assert row.get("engines/replaced", 0) == replaced


def test_a_group_whose_rewards_are_all_equal_gives_no_signal() -> None:
    stds = [0.0, 0.0, 1.4, 1.4, 0.7, 0.7]  # of three prompts, two responses each
    places = [[0, 2, 4], [3, 5, 1]]
    experiences = [
        SimpleNamespace(index=own, info={"group_reward_std": torch.tensor([stds[i] for i in own])})
        for own in places
    ]
    assert rollout_stats.frac_reward_zero_std(experiences, 2) == pytest.approx(1 / 3)


def test_a_resumed_run_continues_the_token_counts() -> None:
    kl: Any = SimpleNamespace(value=0.001)
    filtered: Any = SimpleNamespace(pop_filtered_tokens=lambda: 10, buffer=None)
    first = ControllerState(filtered, kl)
    first.count_tokens(generated=105, trained=90)
    resumed = ControllerState(SimpleNamespace(pop_filtered_tokens=lambda: 0, buffer=None), kl)  # type: ignore[arg-type]
    states = first.add_to({"global_step": 1})
    assert states[TOKENS] == {"generated_tokens": 115, "trained_tokens": 90}
    resumed.restore(states)
    assert resumed.count_tokens(generated=100, trained=100) == {
        "progress/generated_tokens": 215.0, "progress/trained_tokens": 190.0,
    }  # fmt: skip
