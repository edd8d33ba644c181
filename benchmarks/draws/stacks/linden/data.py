"""Rows of a training script: documents put behind each other, cut, and read in a drawn order."""

import torch


def make_documents(count, sizes, seed):
    """Return documents of different lengths, each of which begins with a special token."""
    generator = torch.Generator().manual_seed(seed)
    documents = []
    for _ in range(count):
        length = int(torch.randint(3, 14, (1,), generator=generator))
        body = torch.randint(sizes.specials, sizes.vocab, (length,), generator=generator)
        head = torch.randint(sizes.specials, (1,), generator=generator)
        documents.append(torch.cat([head, body]))
    return documents


def pack(documents, length):
    """Return rows of `length` + 1 tokens, where a row begins with the last token of the one before."""
    stream = torch.cat(documents)
    count = (len(stream) - 1) // length
    return torch.stack([stream[i * length : (i + 1) * length + 1] for i in range(count)])


class Reader:
    """Batches of a rank. All ranks draw the same order of rows, another one in each epoch."""

    def __init__(self, rows, batch, rank, ranks):
        self.rows, self.batch, self.rank, self.ranks = rows, batch, rank, ranks
        self.given = 0  # rows of all ranks

    def order(self, epoch):
        seed = 11 + epoch
        return torch.randperm(len(self.rows), generator=torch.Generator().manual_seed(seed))

    def read(self):
        """Return tokens and targets of this rank's rows of the next batch."""
        each = self.batch // self.ranks
        per_epoch = len(self.rows) // self.batch * self.batch
        epoch, first = divmod(self.given, per_epoch)
        order = self.order(epoch)
        start = first + self.rank * each
        rows = self.rows[order[start : start + each]]
        self.given += self.batch
        return rows[:, :-1], rows[:, 1:]
