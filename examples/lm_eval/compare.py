"""The example tasks in this process and, if a server's address is given, over HTTP: the numbers must agree.

    python -m examples.lm_eval.compare --model PATH [--url http://127.0.0.1:8000] [--json OUT]

Needs lm_eval (pip install 'lm_eval[api]'), no network and no torch. Start the server on the same checkpoint with the
same --dtype and --numerics. Exit code 1 when a number differs by more than --tolerance.
"""

import argparse
import json
import os
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")

from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

import flint_jax
from flint_jax.integrations.lm_eval import FlintLM

TASKS = ["flint_choice", "flint_text", "flint_generate"]


def evaluate(model, **options) -> dict[str, list]:
    """Task -> what the model answered, sample by sample."""
    manager = TaskManager(include_path=str(Path(__file__).parent), include_defaults=False)
    found = simple_evaluate(model, tasks=TASKS, task_manager=manager, bootstrap_iters=0, **options)
    return {task: [sample["resps"] for sample in samples] for task, samples in found["samples"].items()}


def numbers(answers) -> list:
    """Answers as a flat list of numbers, flags and texts."""
    if isinstance(answers, list | tuple):
        return [leaf for answer in answers for leaf in numbers(answer)]
    try:
        return [float(answers)] if not isinstance(answers, bool) else [answers]
    except ValueError:
        return [answers]


def main() -> int:
    """Run, compare, print a line a task."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--url")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--numerics", default="serving")
    parser.add_argument("--max-length", type=int, default=128, help="small, so that a text needs windows")
    parser.add_argument("--tolerance", type=float, default=1e-3)
    parser.add_argument("--json", type=Path, help="write the answers there")
    args = parser.parse_args()
    lm = flint_jax.load(args.model, dtype=args.dtype, numerics=args.numerics, progress=False)
    answers = {"flint_jax": evaluate(FlintLM(lm=lm, max_length=args.max_length, batch_size=4))}
    worst = 0.0
    if args.url:
        options = {
            "model": lm.name,
            "base_url": f"{args.url.rstrip('/')}/v1/completions",
            "tokenizer_backend": "remote",
            # the harness takes two off: one for the token it has generated, one for the windows' overlap
            "max_length": args.max_length + 2,
            "seed": 0,
        }
        answers["local-completions"] = evaluate("local-completions", model_args=options, batch_size=4)
        for task in TASKS:
            pairs = list(zip(*(numbers(answers[name][task]) for name in answers), strict=True))
            far = max((abs(a - b) for a, b in pairs if isinstance(a, float)), default=0.0)
            same = all(a == b for a, b in pairs if not isinstance(a, float))
            print(f"{task:<16} {len(pairs):>3} answers, numbers differ by {far:.1e} at most, others equal: {same}")
            worst = max(worst, far if same else float("inf"))
    if args.json:
        args.json.write_text(json.dumps(answers))
    return int(worst > args.tolerance)


if __name__ == "__main__":
    sys.exit(main())
