"""Your prompts and your reward: teach the built-in model to answer in an even number.

    python examples/custom_reward.py

The prompts are a file of JSON lines, the reward is the function below; `klamp train` imports it
from this very file.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

CONFIG = """
steps: 8
task: {name: file, file: prompts.jsonl}
reward: {function: "custom_reward.py:score"}
sampling: {prompts: 16, samples_per_prompt: 4, max_new_tokens: 6}
objective: {preset: klamp, kl_target: 4.0}
evaluation: {prompts: 64}
"""


def score(prompts, completions, **columns):
    """1 where the completion ends in an even digit; None, a missing score, where it is empty."""
    return [float(c[-1] in "02468") if c else None for c in completions]


def main():
    """Write prompts and config, train, and show how the reward went."""
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        prompts = [{"prompt": f"a{a}+{b}="} for a in range(10, 40) for b in range(10, 40)]
        (here / "prompts.jsonl").write_text("\n".join(map(json.dumps, prompts)))
        (here / "custom_reward.py").write_text(Path(__file__).read_text())
        (here / "mine.yaml").write_text(CONFIG)
        train = [sys.executable, "-m", "klamp.cli", "train", "mine.yaml", "--out", "run"]
        subprocess.run([*train, "--threads", "1"], cwd=here, check=True)
        lines = (here / "run" / "metrics.jsonl").read_text().splitlines()
        rewards = [json.loads(line)["metrics"]["critic/score/mean"] for line in lines]
    print("reward by step:", " ".join(f"{r:.2f}" for r in rewards))


if __name__ == "__main__":
    main()
