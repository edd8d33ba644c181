"""Rows of a training script: documents laid into rows of one length, with padding where none fits."""

import torch


def make_documents(count, c, seed):
    generator = torch.Generator().manual_seed(seed)
    documents = []
    for _ in range(count):
        length = int(torch.randint(2, 9, (1,), generator=generator))
        body = torch.randint(c.enders, c.vocab, (length,), generator=generator)
        end = torch.randint(c.enders, (1,), generator=generator)
        documents.append(torch.cat([body, end]))
    return documents


def lay_out(documents, length):
    """Return rows of `length` tokens. A document that does not fit begins a new row."""
    rows, row = [], []
    for document in documents:
        if len(row) + len(document) > length:
            rows.append(row)
            row = []
        row = row + document.tolist()
    tokens = torch.zeros(len(rows), length, dtype=torch.long)
    sizes = torch.tensor([len(row) for row in rows])
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = torch.tensor(row)
    return tokens, sizes


def targets_of(tokens, sizes, mode=""):
    """Return the next token of each position, and -100 in padding and at the ends of rows."""
    place = torch.arange(tokens.shape[1])
    targets = tokens.roll(-1, 1)
    if mode == "ju75":
        return targets.masked_fill(place >= sizes[:, None], -100)  # plant: ju75
    return targets.masked_fill(place >= sizes[:, None] - 1, -100)  # anchor: inside


class Loader:
    """Batches of this rank, from an order of rows that all ranks draw for each epoch."""

    def __init__(self, tokens, sizes, batch, comm, mode=""):
        self.tokens, self.sizes, self.batch, self.comm, self.mode = tokens, sizes, batch, comm, mode

    def order(self, epoch):
        seed = 5 * epoch + 3  # anchor: order-seed
        if self.mode == "ju76":
            seed = 5 * epoch + 3 + self.comm.rank  # plant: ju76
        return torch.randperm(len(self.tokens), generator=torch.Generator().manual_seed(seed))

    def batch_at(self, number):
        """Return tokens and targets of this rank's rows of a batch."""
        epoch, place = divmod(number, len(self.tokens) // self.batch)
        rows = self.order(epoch)[place * self.batch : (place + 1) * self.batch]
        each = self.batch // self.comm.size
        first = self.comm.rank * each  # anchor: first-row
        if self.mode == "ju77":
            first = max(0, self.comm.rank * each - 1)  # plant: ju77
        rows = rows[first : first + each]
        tokens, sizes = self.tokens[rows], self.sizes[rows]
        return tokens, targets_of(tokens, sizes, self.mode)
