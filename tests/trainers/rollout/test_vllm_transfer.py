import tempfile
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from molt_gym.trainers.rollout.vllm_transfer import Sender, broadcast, buckets, join, unpack

CPU = torch.device("cpu")


def weights() -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"embedding": (7, 3), "bias": (3,), "wide": (50, 4), "scalar": (), "norm": (3,)}
    return [(name, torch.randn(shape, generator=generator)) for name, shape in shapes.items()]


@pytest.mark.parametrize("limit", [1, 100, 10_000])
def test_parameters_come_out_of_buckets_as_they_went_in(limit):
    packed = list(buckets(weights(), torch.float32, CPU, limit))
    out = [pair for bucket in packed for pair in unpack(bucket.flat, bucket.names, bucket.shapes)]
    for (name, tensor), (other, value) in zip(weights(), out, strict=True):
        assert name == other
        assert torch.equal(tensor, value)


def test_a_bucket_keeps_to_its_limit_unless_a_single_parameter_is_larger():
    packed = list(buckets(weights(), torch.float32, CPU, 100))
    assert [bucket.names for bucket in packed] == [["embedding", "bias"], ["wide"], ["scalar", "norm"]]
    assert len(list(buckets(weights(), torch.float32, CPU, 10_000))) == 1


def test_a_bucket_is_in_the_engines_dtype_and_shares_nothing_with_the_weights():
    pairs = weights()
    bucket, = buckets(pairs, torch.bfloat16, CPU)
    assert bucket.flat.dtype == torch.bfloat16
    single, = buckets(pairs[:1], torch.float32, CPU)
    before = single.flat.clone()
    pairs[0][1].zero_()
    assert torch.equal(single.flat, before)


def test_buckets_reach_all_workers():
    sender = Sender("gloo", CPU, 2)
    received: dict[int, torch.Tensor] = {}

    def work(rank: int) -> None:
        invitation = sender.invitation()
        store = dist.TCPStore(invitation["address"], invitation["port"], is_master=False)
        group = join(invitation["backend"], store, invitation["address"], invitation["first_rank"] + rank,
                     invitation["ranks"], invitation["timeout"])
        received[rank] = torch.empty(5)
        broadcast(group, received[rank])

    threads = [threading.Thread(target=work, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    sender.join()
    bucket, = buckets([("a", torch.arange(5.0))], torch.float32, CPU)
    assert sender.announcement(bucket) == {"names": ["a"], "shapes": [[5]], "handles": None, "file": None}
    sender.send(bucket)
    for thread in threads:
        thread.join(20)
    assert torch.equal(received[0], bucket.flat) and torch.equal(received[1], bucket.flat)
    sender.close()


def test_a_bucket_as_a_file_holds_its_parameters_and_is_gone_at_the_end(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    sender = Sender("file", CPU, 2)
    sender.join()
    for bucket in buckets(weights(), torch.bfloat16, CPU, 100):
        file = Path(sender.announcement(bucket)["file"])
        sender.send(bucket)
        loaded = load_file(file)
        assert set(loaded) == set(bucket.names)
        for name, tensor in unpack(bucket.flat, bucket.names, bucket.shapes):
            assert torch.equal(loaded[name], tensor)
        assert [path for path in tmp_path.rglob("*") if path.is_file()] == [file]
        sender.discard()
        assert not file.exists()
    sender.close()
    assert not list(tmp_path.iterdir())


def test_workers_that_do_not_come_are_waited_for_until_the_deadline():
    sender = Sender("gloo", CPU, 1, timeout=0.5)
    with pytest.raises(RuntimeError, match="(?i)time"):
        sender.join()
