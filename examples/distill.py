"""On-policy distillation: a model learns to act as a better one would, on what it samples itself.

    python examples/distill.py

The teacher is made here, by a few steps of reinforcement learning; any model with the same tokenizer can be one.
"""

import molt_gym

ENV = "CodeExec-v0"

if __name__ == "__main__":
    teacher = molt_gym.train(ENV, "tiny", steps=16, eval__before=False, eval__after=False)
    result = molt_gym.distill(ENV, "tiny", teacher.run_dir / "model", steps=60)
    divergence = [line["policy/kl_ref"] for line in result.metrics if "policy/kl_ref" in line]
    print(f"KL to the teacher {divergence[0]:.3f} → {divergence[-1]:.3f} nats per token; "
          f"the student is in {result.run_dir / 'model'}")
