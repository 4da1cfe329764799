"""Rejection sampling: a model plays, and learns from the best that it did.

    python examples/sft.py

What got the full reward is kept, and trained on in the very tokens that were sampled. The same call takes
conversations: a file of lines such as {"messages": [...], "tools": [...]}, or a dataset.
"""

import molt_gym

if __name__ == "__main__":
    before = molt_gym.evaluate("CodeExec-v0", "tiny")
    tries = molt_gym.rollout("CodeExec-v0", "tiny", 512)
    result = molt_gym.sft(tries, "tiny", rollouts__min_reward=1.0, epochs=3, eval__share=0.1)
    after = molt_gym.evaluate("CodeExec-v0", result.run_dir / "model")
    print(f"pass@1 {before.pass_at[1]:.2f} → {after.pass_at[1]:.2f}; the model is in {result.run_dir / 'model'}")
