"""Train language-model agents with reinforcement learning, as a Gymnasium plug-in."""
