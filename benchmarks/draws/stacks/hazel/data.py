"""A corpus of documents, packed into rows, and a loader of the rows of a rank."""

import torch


def make_documents(count, cfg, seed):
    """Return documents of random lengths. Each begins with a small id."""
    generator = torch.Generator().manual_seed(seed)
    documents = []
    for _ in range(count):
        length = int(torch.randint(3, 14, (), generator=generator))
        words = torch.randint(cfg.first_word, cfg.vocab, (length,), generator=generator)
        words[0] = torch.randint(cfg.first_word, (), generator=generator)
        documents.append(words)
    return documents


def pack(documents, length):
    """Pack documents into rows of some length, in order. A document that is too long goes on in the next row."""
    stream = torch.cat(documents)
    rows = len(stream) // length
    return stream[: rows * length].view(rows, length)


class Loader:
    """Rows of a rank, in an order that is drawn anew in each epoch. `size` is the number of rows of all ranks."""

    def __init__(self, rows, size, rank, ranks, seed=0, variant=""):
        self.rows, self.size, self.rank, self.ranks = rows, size, rank, ranks
        self.seed, self.variant = seed, variant
        self.epoch = self.cursor = 0  # the cursor counts rows of all ranks

    def order(self):
        epoch = 0 if self.variant == "hazel-epoch-order" else self.epoch  # plant: hazel-epoch-order
        generator = torch.Generator().manual_seed(1000 * self.seed + epoch)
        return torch.randperm(len(self.rows), generator=generator)

    def next(self):
        """Return this rank's rows of the next global batch. Rows that fill no batch are left out."""
        if self.cursor + self.size > len(self.rows):
            self.epoch, self.cursor = self.epoch + 1, 0
        order = self.order()
        batch = order[self.cursor : self.cursor + self.size]
        mine = batch[self.rank :: self.ranks]  # anchor: mine
        if self.variant == "hazel-blocks":
            part = order.chunk(self.ranks)[self.rank]  # plant: hazel-blocks
            mine = part[self.cursor // self.ranks :][: self.size // self.ranks]
        self.cursor += self.size
        return self.rows[mine]

    def state_dict(self):
        return {"epoch": self.epoch, "cursor": self.cursor}

    def load_state_dict(self, state):
        self.epoch, self.cursor = state["epoch"], state["cursor"]  # anchor: cursor
        if self.variant == "hazel-cursor-rank":
            self.cursor = state["cursor"] // self.ranks  # plant: hazel-cursor-rank
