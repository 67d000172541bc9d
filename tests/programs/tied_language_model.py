"""A language model whose output layer shares the weights of the embedding."""
import torch
from torch import nn
from torch.nn import functional as F


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0,
                                                  batch_first=True)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        mask = nn.Transformer.generate_square_subsequent_mask(
            tokens.shape[1], dtype=torch.float64)
        return self.head(self.encoder(self.embedding(tokens), mask))


results = []
net = Model()
optimizer = torch.optim.AdamW(net.parameters(), 0.01)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, 8)
for size in (8, 8, 7, 3):
    tokens = torch.randint(11, (size, 6))
    loss = F.cross_entropy(net(tokens[:, :-1]).flatten(0, 1),
                           tokens[:, 1:].flatten(), ignore_index=0)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(net.parameters(), 0.5)
    optimizer.step()
    schedule.step()
    results.append(loss)
