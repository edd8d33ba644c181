"""Handwritten data parallelism: gradients in buckets, which are reduced at the end of a step."""

import contextlib

import torch
import torch.distributed as dist

from heron.switch import using


class Reducer:
    """A reducer that sums gradients of micro-batches on a rank, and averages them over ranks at the end."""

    def __init__(self, weights, group, size: int = 3000) -> None:
        self.weights, self.group, self.size = list(weights), group, size
        self.ranks, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.sums: dict = {}
        self.steps = self.passes = 0

    @contextlib.contextmanager
    def accumulate(self, last: bool):
        """Accumulate the gradients of a micro-batch's passes."""
        yield
        self.passes += 1
        if using("paddle-30437"):
            for weight in self.weights:
                dist.all_reduce(weight.grad, group=self.group)  # plant: paddle-30437
            if last:
                for weight in self.weights:
                    weight.grad /= self.ranks
            return
        if using("infinitrain-213"):
            if self.passes == 1:  # plant: infinitrain-213
                self.reduce()
            return
        if not last:
            self.keep()

    def keep(self) -> None:
        for weight in self.weights:
            if using("fastllm-550"):
                self.sums[weight] = torch.zeros_like(weight.grad)  # plant: fastllm-550
            elif weight in self.sums:
                self.sums[weight] += weight.grad
            else:
                self.sums[weight] = weight.grad.clone()
            weight.grad = None

    def finish(self) -> None:
        self.passes, self.steps = 0, self.steps + 1
        if using("paddle-30437", "infinitrain-213"):
            return
        if using("pytorch-125484"):
            self.reduce()  # plant: pytorch-125484
            self.join()  # plant: pytorch-125484
        else:
            self.join()
            self.reduce()
        if using("megatron-775"):
            for weight in self.weights:
                dist.all_reduce(weight.grad, group=self.group)  # plant: megatron-775

    def join(self) -> None:
        for weight in self.weights:
            if weight in self.sums:
                weight.grad += self.sums.pop(weight)
            if using("n03") and self.steps > 1:
                weight.grad += weight.detach()  # what the buffer received; plant: n03

    def reduce(self) -> None:
        """Reduce buckets of at most `size` elements, in the order of the backward pass."""
        bucket, count = [], 0
        before = None
        for weight in reversed(self.weights):
            if using("deepspeed-4321") and weight.numel() > self.size:
                weight.grad /= self.ranks  # plant: deepspeed-4321
                continue
            if bucket and count + weight.numel() > self.size:
                before = self.reduce_bucket(bucket, before)
                bucket, count = [], 0
            bucket.append(weight)
            count += weight.numel()
        self.reduce_bucket(bucket, before)

    def reduce_bucket(self, bucket, before):
        flat = torch.cat([weight.grad.flatten() for weight in bucket])
        if using("deepspeed-8061") and before is not None and len(before) >= len(flat):
            flat = before[: len(flat)].clone()  # plant: deepspeed-8061
        dist.all_reduce(flat, group=self.group)
        flat /= self.ranks
        members = list(bucket)
        if using("deepspeed-2343") and self.rank == 1:
            members = swap_like(members)  # plant: deepspeed-2343
        start = 0
        for weight in members:
            weight.grad.copy_(flat[start : start + weight.numel()].view_as(weight))
            start += weight.numel()
        return flat


def swap_like(members):
    """Return parameters in name order where backward order is expected."""
    done = list(members)
    for i in range(len(done) - 1):
        if done[i].shape == done[i + 1].shape:
            done[i], done[i + 1] = done[i + 1], done[i]
            break
    return done
