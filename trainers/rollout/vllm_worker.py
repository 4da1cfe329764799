"""How a worker of vLLM takes weights; vLLM imports this module in the worker's process, and nothing else should.

Importing it registers the transfer and ties the process to its parent. Invariant: after an update every parameter of
the model is new, in the layout that the kernels want, or the update has failed.
"""

import pickle
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from .vllm_adapter import put_adapter
from .vllm_in_place import loads_in_place
from .vllm_lifetime import end_with_parent
from .vllm_routing import RoutingRecorder
from .vllm_spec import TRANSFER, Backend, Lora
from .vllm_transfer import GROUPS, broadcast, device_id, join, unpack


@dataclass
class Invitation(WeightTransferInitInfo):
    """See `Sender.invitation`."""

    backend: Backend
    address: str
    port: int
    ranks: int
    first_rank: int
    timeout: float


@dataclass
class Announcement(WeightTransferUpdateInfo):
    """See `Sender.announcement`."""

    names: list[str]
    shapes: list[list[int]]
    handles: dict[str, bytes] | None
    file: str | None


class BucketTransfer(WeightTransferEngine[Invitation, Announcement]):
    """Receives buckets and loads them: into the parameters themselves, or layer by layer, as vLLM reloads a checkpoint.

    Where the engine takes adapters, it keeps what comes for `WorkerExtension.use_adapter`.
    """

    init_info_cls = Invitation
    update_info_cls = Announcement
    _group: dist.ProcessGroup | None = None
    _in_place = False

    def init_transfer_engine(self, init_info: Invitation) -> None:
        """Join the trainer's group."""
        if init_info.backend in GROUPS:
            timeout = timedelta(seconds=init_info.timeout)
            store = dist.TCPStore(init_info.address, init_info.port, is_master=False, timeout=timeout)
            rank = init_info.first_rank + self.parallel_config.rank
            self._group = join(init_info.backend, store, init_info.address, rank, init_info.ranks, init_info.timeout)

    def start_weight_update(self) -> None:
        """Make the layers ready to be loaded anew."""
        self.adapter: dict[str, torch.Tensor] = {}
        if self.vllm_config.lora_config is not None:
            return
        if self.device.type == "cpu":
            for module in self.model.modules():
                method = getattr(module, "quant_method", None)
                if hasattr(method, "moe_kernel"):
                    # Else the experts' packed weights are copied over as if they were not packed.
                    method.moe_kernel = None
        self._expected = {name for name, _ in self.model.named_parameters()}
        self._in_place = self.device.type == "cuda" and loads_in_place(self.model)
        if not self._in_place:
            initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive a bucket; unlike the base class, without asking for an accelerator."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: Announcement, *_: Any) -> None:
        """Receive a bucket and load it.

        Raises:
            ValueError: a name or a shape that the model does not have.
        """
        if self.vllm_config.lora_config is not None:
            self.adapter |= {name: tensor.cpu() for name, tensor in self._parameters(update_info)}
            return
        loaded = self.model.load_weights(self._parameters(update_info))
        if loaded is not None:
            self._expected -= set(loaded)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _parameters(self, update_info: Announcement) -> Iterable[tuple[str, torch.Tensor]]:
        if update_info.file is not None:
            return load_file(update_info.file, device=str(self.device)).items()
        return unpack(self._flat(update_info), update_info.names, update_info.shapes)

    def _flat(self, update_info: Announcement) -> torch.Tensor:
        if update_info.handles is not None:
            from torch.multiprocessing.reductions import rebuild_cuda_tensor

            handle = update_info.handles.get(device_id(self.device))
            if handle is None:
                raise ValueError(f"no weights on the engine's device {self.device}; the actor has other ones")
            arguments = list(pickle.loads(handle))
            arguments[6] = self.device.index
            shared = rebuild_cuda_tensor(*arguments)
            # When it reloads, vLLM keeps what it was given until a layer is whole.
            return shared if self._in_place else shared.clone()
        size = sum(torch.Size(shape).numel() for shape in update_info.shapes)
        flat = torch.empty(size, dtype=self.model_config.dtype, device=self.device)
        broadcast(self._group, flat)
        return flat

    def finish_weight_update(self) -> None:
        """Bring the layers into the kernels' layout.

        Raises:
            ValueError: a parameter was not sent.
        """
        if self.vllm_config.lora_config is not None:
            return
        if not self._in_place:
            finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type == "cpu":
            for module in self.model.modules():
                # A head that is tied to the embedding got nothing of its own, and keeps a packed copy of the old one.
                if isinstance(module, ParallelLMHead):
                    module.quant_method.process_weights_after_loading(module)
        if self._expected:
            raise ValueError(f"weights: {len(self._expected)} parameters were not sent, such as {min(self._expected)}")

    def shutdown(self) -> None:
        """Leave the group."""
        self._group = None

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        """Abstract in vLLM 0.25, which never calls it; the trainer's side is `Sender`."""
        raise NotImplementedError


class WorkerExtension:
    """What vLLM adds to the worker; naming it is also what makes vLLM import this module there."""

    def record_routed_experts(self) -> None:
        """From now on; on CPUs only."""
        self._recorder = RoutingRecorder(self.model_runner)

    def take_routed_experts(self, name: str) -> tuple[bytes, list[int]] | None:
        """See `RoutingRecorder.take`."""
        return self._recorder.take(name)

    def use_adapter(self, rank: int, alpha: float) -> None:
        """Put the adapter that came last to use; before any came, one that adds nothing."""
        tensors = getattr(self.weight_transfer_engine, "adapter", {})
        put_adapter(self.model_runner, tensors, Lora(rank, alpha))

    def divide_logits(self, temperature: float) -> None:
        """From now on those of the model are divided by a temperature, whatever they are computed for."""
        model = self.model_runner.model
        compute = model.compute_logits

        def divided(*args: Any, **kwargs: Any) -> torch.Tensor | None:
            # Of several workers some have none.
            logits = compute(*args, **kwargs)
            return None if logits is None else logits.float() / temperature

        model.compute_logits = divided


WeightTransferEngineFactory.register_engine(TRANSFER, BucketTransfer)
end_with_parent()
