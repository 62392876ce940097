"""The Triton kernels compile for every GPU that we name, without one, and spill no register.

The compiler and the assembler come with Triton. A process of its own: the interpreter of the other
tests replaces the kernels of its process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

#: Compute capabilities: A100, RTX 30, RTX 40, H100, B200, RTX 50.
CAPABILITIES = (80, 86, 89, 90, 100, 120)
#: Above this, fewer than half of an SM's threads run at a time.
MOST_REGISTERS = 64

COMPILE = """
import json, re, subprocess, sys, tempfile
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource
from sg_rlhf.algo.log_probs import triton_softmax as kernels

FLOATS = dict.fromkeys(
    ("logits", "largest", "total", "chosen", "moment", "lse", "grad", "entropy", "grad_entropy"),
    "*fp32",
)
OTHERS = {
    "row_stride": "i32", "columns": "i32", "result_stride": "i32", "index": "*i64",
    "inverse_temperature": "fp32", "with_entropy": "constexpr", "block": "constexpr",
}
found = []
for capability in json.loads(sys.argv[1]):
    for kernel, result in (
        (kernels._fold, None), (kernels._gradient, "*fp32"), (kernels._gradient, "*bf16"),
    ):
        for with_entropy in (False, True):
            types = {**FLOATS, **OTHERS, "result": result}
            compiled = triton.compile(
                ASTSource(
                    kernel,
                    {name: types[name] for name in kernel.arg_names},
                    {"with_entropy": with_entropy, "block": kernels._BLOCK},
                ),
                target=GPUTarget("cuda", capability, 32),
                options={"num_warps": 8},
            )
            with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
                file.write(compiled.asm["ptx"])
                file.flush()
                target = re.search(r"\\.target (\\w+)", compiled.asm["ptx"])[1]
                ptxas = [get_ptxas(capability).path, "-v", f"-arch={target}", "-o", "/dev/null"]
                said = subprocess.run(
                    [*ptxas, file.name],
                    capture_output=True, text=True, check=True,
                ).stderr
            found.append({
                "kernel": kernel.__name__, "capability": capability,
                "spilled": sum(map(int, re.findall(r"(\\d+) bytes spill", said))),
                "registers": int(re.search(r"Used (\\d+) registers", said)[1]),
                "cubin": len(compiled.asm["cubin"]),
            })
print(json.dumps(found))
"""


def test_every_kernel_compiles_for_every_gpu(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    interpreted = ("TRITON_INTERPRET", "SOFTWARE_GPU_VALUES")
    environment = {k: v for k, v in os.environ.items() if k not in interpreted}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, json.dumps(CAPABILITIES)],
        env={**environment, "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == 6 * len(CAPABILITIES)
    for kernel in found:
        assert kernel["cubin"] > 0
        assert kernel["spilled"] == 0, kernel
        assert kernel["registers"] <= MOST_REGISTERS, kernel
