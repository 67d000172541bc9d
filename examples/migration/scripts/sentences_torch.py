"""Fine-tuning in PyTorch: groups of parameters, a schedule with warm-up,
clipping, and batches that are dicts."""
import argparse

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--lr", type=float, default=0.02)
parser.add_argument("--clip", type=float, default=0.5)
parser.add_argument("--dtype", default="float32")
parser.add_argument("--out", default="sentences.pt")
opt = parser.parse_args()

WORDS, LENGTH, CLASSES = 50, 12, 4


class Classifier(nn.Module):
    """The mean of the words' vectors, then two layers."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 16)
        self.norm = nn.LayerNorm(16)
        self.hidden = nn.Linear(16, 32)
        self.head = nn.Linear(32, CLASSES)

    def forward(self, *, input_ids, attention_mask):
        vectors = self.norm(self.embedding(input_ids))
        mask = attention_mask.unsqueeze(-1).to(vectors.dtype)
        mean = (vectors * mask).sum(1) / mask.sum(1)
        return self.head(torch.tanh(self.hidden(mean)))


def sentences(n, seed):
    """Word numbers, padded; the words of a sentence determine its class."""
    random = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(n):
        length = int(torch.randint(4, LENGTH + 1, (), generator=random))
        ids = torch.zeros(LENGTH, dtype=torch.long)
        ids[:length] = torch.randint(1, WORDS, (length,), generator=random)
        rows.append({"input_ids": ids, "attention_mask": (ids > 0).long(),
                     "labels": (ids.sum() // 7) % CLASSES})
    return rows


def groups(model):
    """Biases and norms without decay; the head learns faster."""
    plain = [p for name, p in model.named_parameters()
             if p.ndim < 2 and not name.startswith("head")]
    head = list(model.head.parameters())
    decayed = [p for p in model.parameters() if p.ndim > 1 and not any(
        p is q for q in head)]
    return [{"params": decayed, "weight_decay": 0.01},
            {"params": plain, "weight_decay": 0.0},
            {"params": head, "lr": 2 * opt.lr, "betas": (0.8, 0.99)}]


def inputs(batch):
    return {name: x for name, x in batch.items() if name != "labels"}


def loss_of(output, batch):
    return F.cross_entropy(output, batch["labels"])


torch.manual_seed(1)
model = Classifier().to(getattr(torch, opt.dtype))
train_data = DataLoader(sentences(120, 1), opt.batch_size, shuffle=True)
test_data = DataLoader(sentences(40, 2), opt.batch_size)
optimizer = torch.optim.AdamW(groups(model), lr=opt.lr)
steps = opt.epochs * len(train_data)
scheduler = torch.optim.lr_scheduler.LambdaLR(
    optimizer, lambda n: min(1, (n + 1) / 4) * max(0, 1 - n / steps))
for epoch in range(opt.epochs):
    model.train()
    total = rows = right = 0
    for batch in train_data:
        output = model(**inputs(batch))
        loss = loss_of(output, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), opt.clip)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        total += loss.item() * len(batch["labels"])
        rows += len(batch["labels"])
    model.eval()
    with torch.no_grad():
        for batch in test_data:
            output = model(**inputs(batch))
            right += int((output.argmax(1) == batch["labels"]).sum())
    print(f"epoch {epoch}: loss {total / rows:.12f}, rate "
          f"{scheduler.get_last_lr()[0]:.6f}, accuracy {right / 40:.3f}")
torch.save(model.state_dict(), opt.out)
