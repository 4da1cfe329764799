"""Everything that learns: rollout engines, the actor, algorithms, the loop."""

import os

# Threads that spin while they wait for each other take the cores from those who have work: with an engine and an actor
# on the same cores, or anything else running, that costs ten times what it saves. Read when torch starts its threads.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
