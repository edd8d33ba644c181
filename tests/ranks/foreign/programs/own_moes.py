"""The expert parallelism of examples/my_moe with mistakes in the exchange of rows."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from my_moe import model as my_moe
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh


class Altered(my_moe.Exchange):
    """The same exchange; a subclass chooses the order in which a rank computes the received rows."""

    def __call__(self, rows: Tensor, counts: Tensor, experts: my_moe.Experts) -> Tensor:
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts, group=self.group)
        arriving = arriving.view(self.num_ranks, -1)
        send, receive = counts.view(self.num_ranks, -1).sum(1).tolist(), arriving.sum(1).tolist()
        received = my_moe.AllToAll.apply(rows, receive, send, self.group)
        expert = torch.arange(arriving.shape[1]).repeat(self.num_ranks)
        order = expert.repeat_interleave(arriving.flatten().cpu()).argsort(stable=True)
        made = self.compute(experts, received, order, arriving.sum(0).tolist())
        return my_moe.AllToAll.apply(made, send, receive, self.group)

    def compute(self, experts: my_moe.Experts, received: Tensor, order: Tensor, counts: list[int]) -> Tensor:
        raise NotImplementedError


class BySender(Altered):
    """Wrong order: rows are sorted by sender where rows sorted by expert are expected."""

    def compute(self, experts: my_moe.Experts, received: Tensor, order: Tensor, counts: list[int]) -> Tensor:
        return experts(received, counts)


class NotPutBack(Altered):
    """Wrong order: results return in the order of the experts."""

    def compute(self, experts: my_moe.Experts, received: Tensor, order: Tensor, counts: list[int]) -> Tensor:
        return experts(received[order], counts)


class Dropped(Altered):
    """An unwanted capacity: rows of an expert beyond the fifth return as zeros."""

    def compute(self, experts: my_moe.Experts, received: Tensor, order: Tensor, counts: list[int]) -> Tensor:
        made = experts(received[order], counts)
        kept = torch.cat([torch.arange(count) < 5 for count in counts])
        return torch.zeros_like(made).index_copy(0, order, made * kept[:, None])


class Rounded(Altered):
    """An exchange that sends rows in bfloat16."""

    def compute(self, experts: my_moe.Experts, received: Tensor, order: Tensor, counts: list[int]) -> Tensor:
        made = experts(received.bfloat16().to(received.dtype)[order], counts)
        return torch.empty_like(made).index_copy(0, order, made)


def alter(kind: type[Altered]) -> Callable[[my_moe.MoE, DeviceMesh], object]:
    def parallelize(model: my_moe.MoE, mesh: DeviceMesh) -> object:
        done = my_moe.parallelize(model, mesh)
        for mixture in model.tower:
            mixture.exchange = kind(mesh["dp_shard"])
        return done

    return parallelize


by_sender, not_put_back, dropped, rounded = map(alter, (BySender, NotPutBack, Dropped, Rounded))
