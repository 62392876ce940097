#!/usr/bin/env bash
# Try the package that is installed in an environment, from an empty folder: every command that needs no pipeline, and
# the loss in a few lines of torch.
#
#   scripts/try_library.sh FOLDER_OF_PYTHON          # the `bin` of a venv with sg-rlhf[math,models,plots,search]
set -euo pipefail
bin=$(cd "${1:?usage: scripts/try_library.sh FOLDER_OF_PYTHON}" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
unset PYTHONPATH

# try WORD COMMAND...: the command succeeds and prints the word.
try() {
  local word=$1 out
  shift
  out=$("$@" 2>&1) || { printf 'failed: %s\n%s\n' "$*" "$out" >&2; exit 1; }
  [[ $out == *"$word"* ]] || { printf 'no "%s" in what this prints: %s\n%s\n' "$word" "$*" "$out" >&2; exit 1; }
}

recipe=configs/kk/grpo_sg_tiny_cpu.yaml
try "" "$bin/python" -m compileall -q "$("$bin/python" -c 'import sg_rlhf, os; print(os.path.dirname(sg_rlhf.__file__))')"
try 0.211 "$bin/sg-rlhf" weights
try Knights "$bin/sg-rlhf" eval --list
try Next "$bin/sg-rlhf" data kk --out data --generate people=2-3 per_size=20 test_per_size=4
try grpo_sg "$bin/sg-rlhf" train --config $recipe --dry-run
try GiB "$bin/sg-rlhf" plan --config configs/kk/grpo_sg_qwen2.5-3b-instruct.yaml
try usage "$bin/sg-rlhf" report --help
try usage "$bin/sg-rlhf" index --help
if refused=$("$bin/sg-rlhf" train --config $recipe data.prompt_dataset=data/train.jsonl eval.dataset=null 2>&1); then
  echo "training started without the pipeline" >&2
  exit 1
fi
[[ $refused == *"scripts/bootstrap.sh"* ]]
cat >library.py <<'PYTHON'
import torch

from sg_rlhf.algo.policy_loss import policy_loss
from sg_rlhf.tasks.math.grading import grade

if __name__ == "__main__":
    assert grade(r"So it is $\boxed{\frac{6}{8}}$.", "3/4").reward == 1
    assert grade(r"So it is $\boxed{(x+1)^2}$.", "x^2+2x+1").reward == 1
    log_probs = torch.full((2, 3), -0.5, requires_grad=True)
    mask = torch.ones(2, 3)
    advantages = torch.tensor([[1.0], [-1.0]]).expand(2, 3)
    old = log_probs.detach()
    policy_loss(log_probs, old, advantages, mask).loss.backward()
    assert log_probs.grad is not None and log_probs.grad.abs().sum() > 0
PYTHON
try "" "$bin/python" library.py
echo "try_library: ok: $("$bin/python" --version), $("$bin/sg-rlhf" --version)"
