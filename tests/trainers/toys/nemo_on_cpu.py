"""nemo_automodel where there is no GPU: it asks for the current one, and is told the processor.

`rank` is a process of an actor; tests start several.
"""

from typing import Any

import torch
import torch.distributed as dist


class _Cuda:
    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)

    def current_device(self) -> torch.device:
        return torch.device("cpu")


class _Torch:
    cuda = _Cuda()

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def device(self, *_: Any) -> torch.device:
        return torch.device("cpu")


def patch(put: Any = setattr) -> None:
    """In this process, for good unless `put` is that of a MonkeyPatch."""
    import nemo_automodel._transformers.auto_model as auto_model
    import nemo_automodel.components.models.qwen3_moe.model as qwen3_moe

    for module in (auto_model, qwen3_moe):
        put(module, "torch", _Torch())


def rank(number: int, ranks: int, port: int, spec: Any, jobs: Any, answers: Any) -> None:
    """Call methods of an actor, given by name with their arguments, and answer with the results, weights as arrays."""
    from molt_gym.trainers.actor.fsdp_actor import FsdpActor
    from molt_gym.trainers.actor.launch import join_group

    torch.set_num_threads(1)
    patch()
    join_group(dist.TCPStore("127.0.0.1", port, ranks), number, ranks)
    actor = FsdpActor(spec)
    while (job := jobs.get()) is not None:
        name, *arguments = job
        result = getattr(actor, name)(*arguments)
        answers.put({key: tensor.numpy() for key, tensor in result} if name == "weights" else result)
    actor.close()
    dist.destroy_process_group()
