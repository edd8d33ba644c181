"""An optimizer with factored second moments, whose state is spread over ranks with the same parameters."""

import torch
import torch.distributed as dist

from juniper.grid import add_up
from juniper.parallel import list_places


class Factored:
    """Each parameter has an owner among the ranks that have it, which alone keeps its state.

    The direction is put in the place of the gradient, for an optimizer that subtracts it times its rate.
    """

    def __init__(self, model):
        self.c, self.grid, self.step = model.c, model.grid, 0
        self.places = list_places(model)
        self.owners = {}
        for is_expert in (False, True):
            self.assign([place for place in self.places if place.is_expert == is_expert])
        self.state = {place.name: self.new_state(place.tensor) for place in self.places if self.owns(place)}

    def comm_of(self, place):
        return self.grid.edp if place.is_expert else self.grid.tokens

    def assign(self, places):
        """Give each parameter to the rank with the least elements so far."""
        held = [0] * (self.comm_of(places[0]).size if places else 0)
        for place in sorted(places, key=lambda place: -place.tensor.numel()):
            owner = held.index(min(held))
            held[owner] += place.tensor.numel()
            self.owners[place.name] = owner

    def owns(self, place):
        return self.owners[place.name] == self.comm_of(place).rank

    def new_state(self, x):
        x = x.detach()
        state = {"mean": torch.zeros_like(x)}
        if x.dim() == 1:
            return {**state, "square": torch.zeros_like(x)}
        return {**state, "rows": torch.zeros_like(x[..., 0]), "columns": torch.zeros_like(x[..., 0, :])}

    def cut_comm(self, place):
        axis, _ = place.cut
        return getattr(self.grid, axis) if axis else None

    def average_over(self, x, comm):
        return add_up(x, comm) / comm.size

    def second_moment(self, place, square, keep):
        """Move the second moment of the owned parameter, and return it."""
        state, tp, mode = self.state[place.name], self.grid.tp, self.grid.mode
        if square.dim() == 1:
            state["square"].lerp_(square, 1 - keep)
            return state["square"]
        rows, columns = square.mean(-1), square.mean(-2)
        axis, dim = place.cut
        if axis == "tp" and dim == 1:
            rows = self.average_over(rows, tp)
        if axis == "tp" and dim == 0 and mode != "ju57":  # plant: ju57
            columns = self.average_over(columns, tp)  # anchor: columns
        state["rows"].lerp_(rows, 1 - keep)
        state["columns"].lerp_(columns, 1 - keep)
        mean = state["rows"].mean(-1, keepdim=True)
        if axis == "tp" and dim == 0:
            mean = self.average_over(mean, tp)
        return (state["rows"] / mean)[..., None] * state["columns"][..., None, :]

    def direction(self, place, gradient):
        c, mode, state = self.c, self.grid.mode, self.state[place.name]
        keep = 1 - self.step**-0.8
        moment = self.second_moment(place, gradient.square() + 1e-12, keep)
        update = gradient / moment.sqrt()
        if mode == "ju60":
            update = update + c.decay * place.tensor  # plant: ju60
        square, comm = update.square().sum(), self.cut_comm(place)
        count = update.numel() * (comm.size if comm else 1)
        if mode == "ju56":
            count = update.numel()  # plant: ju56
        elif comm:
            square = add_up(square, comm)  # anchor: rms
        update = update / ((square / count).sqrt() / c.update_rms).clamp(min=1.0)
        state["mean"].lerp_(update, 1 - c.beta)
        decays = place.tensor.dim() > 1 and mode != "ju60"
        return state["mean"] + (c.decay * place.tensor if decays else 0.0)

    @torch.no_grad()
    def update(self):
        mode = self.grid.mode
        self.step += 1
        rate = min(1.0, self.step / self.c.warmup)
        for place in self.places:
            gradient, comm = place.tensor.grad, self.comm_of(place)
            if self.owns(place):
                gradient.copy_(rate * self.direction(place, gradient))
            if mode == "ju58" and place.tensor.dim() == 1:
                continue  # plant: ju58
            if comm.size > 1:
                dist.broadcast(gradient, group=comm.group, group_src=self.owners[place.name])

    def saved(self):
        moments = {name: {key: x.clone() for key, x in state.items()} for name, state in self.state.items()}
        return {"step": self.step, "moments": moments}

    @torch.no_grad()
    def load(self, saved):
        mode = self.grid.mode
        if mode != "ju61":  # plant: ju61
            self.step = saved["step"]  # anchor: step
        for name, state in self.state.items():
            for key, x in state.items():
                if mode == "ju62" and key == "columns":
                    continue  # plant: ju62
                x.copy_(saved["moments"][name][key])  # anchor: moments
