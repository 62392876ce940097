"""Log-probs without logits beside the path over logits: values, gradients, memory, time.

The path over logits is what upstream's actor does: the head's product in bfloat16, all of it in
float32, divided by the temperature, then the target's logit minus the log of the sum of
exponentials. The reference is the same in float64 from the same bfloat16 numbers.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.gpu.measure import GIB, costs, largest, relative
from tests.gpu.result import Job, Record

OURS = "sg_rlhf.algo.log_probs.fused_log_probs"
FROM_LOGITS = "sg_rlhf.algo.log_probs.from_logits"
TRITON = "sg_rlhf.algo.log_probs.triton_softmax"
VOCABULARY = 151_936
HIDDEN = {"qwen2.5-3b": 2048, "qwen2.5-7b": 3584}
TOKENS = (1024, 4096, 8192, 16_384, 20_480)
TEMPERATURE = 0.7
#: (hidden, weight, targets) -> log-probs [N]
Head = Callable[[Tensor, Tensor, Tensor], Tensor]


def over_logits(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """The full logits, with torch's own functions."""
    logits = (hidden @ weight.t()).float()
    logits.div_(TEMPERATURE)
    chosen = logits.gather(-1, targets[:, None])[:, 0]
    return chosen - torch.cat([part.logsumexp(-1) for part in logits.split(1024)])


def exact(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """In float64."""
    log_p = (hidden.double() @ weight.double().t() / TEMPERATURE).log_softmax(-1)
    return log_p.gather(-1, targets[:, None])[:, 0]


def heads(record: Record, job: Job) -> dict[str, Head]:
    """What is here to be compared; ``over logits`` always is."""
    found: dict[str, Head] = {"over logits": over_logits}
    if importlib.util.find_spec(OURS) is None:
        record.skip("log-probs without logits", f"{OURS} is not in this version")
    else:
        module, from_logits = map(importlib.import_module, (OURS, FROM_LOGITS))

        def without_logits(kernel: Any, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
            log_probs: Tensor = module.selected_log_probs(
                hidden, weight, targets, temperature=TEMPERATURE, kernel=kernel
            )[0]
            return log_probs

        def one_buffer(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
            logits = (hidden @ weight.t()).float()
            log_probs: Tensor = from_logits.log_probs_from_logits(logits, targets, TEMPERATURE)
            return log_probs

        if job.on_cuda:
            _skip_triton(record)
        found |= {
            # The default: Triton's kernels on CUDA, where they compile.
            "without logits": functools.partial(without_logits, None),
            "without logits, torch": functools.partial(without_logits, module.TORCH_KERNEL),
            "over logits, one buffer": one_buffer,
        }
    try:
        from sg_rlhf.overlay.patches import flash_attn_shim

        flash_attn_shim.install()  # upstream imports flash-attn at its top
        from openrlhf.models.utils import log_probs_from_logits
    except Exception as error:  # whatever of its own imports is missing
        record.skip("upstream's own function", f"openrlhf: {type(error).__name__}: {error}"[:150])
    else:

        def upstream(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
            logits = (hidden @ weight.t()).float()
            log_probs: Tensor = log_probs_from_logits(logits, targets, TEMPERATURE)
            return log_probs

        found["upstream"] = upstream
    return found


def _skip_triton(record: Record) -> None:
    """Say so if Triton's kernels cannot be compiled: then the default are PyTorch's operations."""
    try:
        importlib.import_module(TRITON).check("cuda")
    except Exception as error:  # whatever Triton, the C compiler or the driver raise
        record.skip("Triton's kernels", f"{type(error).__name__}: {error}"[:150])


def inputs(tokens: int, hidden: int, vocabulary: int, job: Job) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states of the size that a final norm gives; logits spread as a model's."""
    generator = torch.Generator(job.device).manual_seed(tokens)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=job.device, dtype=torch.float32)

    states = normal(tokens, hidden).to(torch.bfloat16).requires_grad_()
    head = (normal(vocabulary, hidden) * (3.0 / hidden**0.5)).to(torch.bfloat16).requires_grad_()
    targets = torch.randint(
        0, vocabulary, (tokens,), generator=generator, device=job.device, dtype=torch.long
    )
    return states, head, targets


def with_gradients(head: Head, hidden: Tensor, weight: Tensor, targets: Tensor) -> list[Tensor]:
    """[log-probs, gradient of the hidden states, gradient of the head]."""
    log_probs = head(hidden, weight, targets)
    slope = torch.linspace(-1.0, 1.0, len(targets), device=hidden.device, dtype=log_probs.dtype)
    return [log_probs.detach(), *torch.autograd.grad(log_probs, (hidden, weight), slope)]


def values(record: Record, job: Job, found: dict[str, Head]) -> None:
    """Each beside float64; no path may be worse than the one over logits."""
    vocabulary = 1003 if job.small else VOCABULARY
    for model, hidden in {"small": 64}.items() if job.small else HIDDEN.items():
        data = inputs(64 if job.small else 256, hidden, vocabulary, job)
        expected = with_gradients(exact, *data)
        base = with_gradients(over_logits, *data)
        for name, head in found.items():
            if name == "over logits":
                record.figure(f"{model}: largest error of {name}", largest(base[0], expected[0]))
                continue
            got = with_gradients(head, *data)
            record.within(
                f"{model}: {name}, log-probs",
                largest(got[0], expected[0]),
                1.1 * largest(base[0], expected[0]) + 1e-4,
            )
            record.check(f"{model}: {name}, none above 0", bool((got[0] <= 0).all()))
            for part, index in (("gradient of hidden", 1), ("gradient of the head", 2)):
                limit = 1.2 * relative(base[index], expected[index]) + 1e-3
                record.within(
                    f"{model}: {name}, {part}", relative(got[index], expected[index]), limit
                )
    _entropy(record, job, vocabulary)


def _entropy(record: Record, job: Job, vocabulary: int) -> None:
    """The entropy, whose gradient others lost."""
    if importlib.util.find_spec(OURS) is None:
        return
    module = importlib.import_module(OURS)
    hidden, weight, targets = inputs(32, 64, vocabulary, job)
    _, entropy = module.selected_log_probs(
        hidden, weight, targets, temperature=TEMPERATURE, with_entropy=True
    )
    log_p = (hidden.double() @ weight.double().t() / TEMPERATURE).log_softmax(-1)
    expected = -(log_p.exp() * log_p).sum(-1)
    record.within("entropy", largest(entropy, expected), 1e-3)
    slopes = [
        torch.autograd.grad(x.sum(), hidden, retain_graph=True)[0] for x in (entropy, expected)
    ]
    record.within("gradient of the entropy", relative(*slopes), 0.02)


def costs_of_a_step(record: Record, job: Job, found: dict[str, Head]) -> None:
    """Forward and backward, and forward alone as the old and reference passes do it."""
    vocabulary = 1003 if job.small else VOCABULARY
    for model, hidden in {"small": 64}.items() if job.small else HIDDEN.items():
        for tokens in (128,) if job.small else TOKENS:
            data = inputs(tokens, hidden, vocabulary, job)
            gradients = sum(x.numel() * x.element_size() for x in data[:2])
            logits = 4 * tokens * vocabulary
            calls: dict[str, Callable[[], Any]] = {}
            for name, head in found.items():
                calls[name] = functools.partial(with_gradients, head, *data)
                calls[f"{name}, forward"] = functools.partial(_forward, head, *data)
            if job.on_cuda:
                torch.cuda.empty_cache()
            measured = costs(calls, job.device, repeats=2 if job.small else 5)
            for name, cost in measured.items():
                own = 0 if name.endswith("forward") else gradients
                extra = None if cost.peak_bytes is None else max(0, cost.peak_bytes - own)
                record.figure(
                    f"head_{model}_T{tokens}_{name}",
                    {
                        "ms": "out of memory" if cost.milliseconds is None else cost.milliseconds,
                        "extra_gib": None if extra is None else extra / GIB,
                        "extra_of_fp32_logits": None if extra is None else extra / logits,
                    },
                )
            if job.on_cuda and tokens == 4096 and "without logits" in measured:
                _compare(record, model, measured, gradients, logits)


def _compare(record: Record, model: str, measured: Any, gradients: int, logits: int) -> None:
    mine, base = measured["without logits"], measured["over logits"]
    at = f"{model}, 4,096 tokens, without logits"
    if mine.peak_bytes is None:
        record.check(f"{at}: fits into memory", False)
        return
    extra = (mine.peak_bytes - gradients) / logits
    record.goal(f"{at}: memory beside the gradients, share of the fp32 logits", extra, 0.05)
    if base.peak_bytes is None:
        record.skip(f"{at}: beside the path over logits", "that runs out of memory")
        return
    record.within(f"{at}: peak bytes, at most those over logits", mine.peak_bytes, base.peak_bytes)
    ratio = mine.milliseconds / base.milliseconds
    record.goal(f"{at}: time, of the path over logits", ratio, 1.0)


@torch.no_grad()
def _forward(head: Head, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return head(hidden, weight, targets)


def run(record: Record, job: Job) -> None:
    """All of it, with what is installed."""
    found = heads(record, job)
    values(record, job, found)
    costs_of_a_step(record, job, found)
