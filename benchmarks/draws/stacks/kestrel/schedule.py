"""Warm-up of learning rates."""


class Warmup:
    def __init__(self, optimizer, max_lr=None, warmup=2):
        self.optimizer, self.warmup, self.count = optimizer, warmup, 0
        groups = optimizer.param_groups
        if max_lr is None:
            max_lr = [groups[0]["lr"]]  # plant: p28
        if len(max_lr) == 1:
            max_lr = max_lr * len(groups)  # plant: p28
        self.max_lr = max_lr
        self.apply()

    def apply(self):
        share = min(1.0, (self.count + 1) / (self.warmup + 1))
        for group, rate in zip(self.optimizer.param_groups, self.max_lr):
            group["lr"] = share * rate

    def step(self):
        self.count += 1
        self.apply()
