"""Link prediction: a GCN whose nodes' dot products say which edges there are, with new negative samples in each step.

    python examples/link_prediction.py                          Cora if it is in data/, or handwritten digits

Encoder and decoder are compiled as one. The labelled edges, another number in training than in testing, need no care.
"""

import copy
import sys

import common
import torch
import torch.nn.functional as F
import torch_geometric.transforms as T
from digits import data as digits
from sklearn.metrics import roc_auc_score
from torch_geometric import seed_everything
from torch_geometric.datasets import Planetoid
from torch_geometric.nn import GCNConv
from torch_geometric.utils import negative_sampling

import gnncompile


class Net(torch.nn.Module):
    def __init__(self, in_channels, hidden_channels, out_channels):
        super().__init__()
        self.conv1 = GCNConv(in_channels, hidden_channels)
        self.conv2 = GCNConv(hidden_channels, out_channels)

    def forward(self, x, edge_index, edge_label_index):
        z = self.conv2(self.conv1(x, edge_index).relu(), edge_index)
        return (z[edge_label_index[0]] * z[edge_label_index[1]]).sum(dim=-1)


def load(args):
    dataset = common.load(args, Planetoid, "Planetoid", name=args.dataset, transform=T.NormalizeFeatures())
    data = digits.images_as_nodes() if dataset is None else dataset[0]
    split = T.RandomLinkSplit(num_val=0.0, num_test=0.1, is_undirected=True, add_negative_train_samples=False)
    train_data, _, test_data = split(data)
    return train_data.to(args.device), test_data.to(args.device)


def fit(model, data, test_data, args, steps):
    seed_everything(args.seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)

    def train():
        model.train()
        optimizer.zero_grad()
        negative = negative_sampling(data.edge_index, data.num_nodes, data.edge_label_index.size(1))
        edge_label_index = torch.cat([data.edge_label_index, negative], dim=-1)
        edge_label = torch.cat([data.edge_label, data.edge_label.new_zeros(negative.size(1))])
        out = model(data.x, data.edge_index, edge_label_index)
        loss = F.binary_cross_entropy_with_logits(out, edge_label)
        loss.backward()
        optimizer.step()
        return loss

    for _ in range(args.epochs):
        steps(train)
    return test(model, test_data)


@torch.no_grad()
def test(model, data):
    model.eval()
    out = model(data.x, data.edge_index, data.edge_label_index).sigmoid()
    return float(roc_auc_score(data.edge_label.cpu(), out.cpu()))


def main():
    parser = common.parser(__doc__, hidden_channels=128, out_channels=64, lr=0.01, epochs=100)
    common.add_dataset(parser, ["Cora", "CiteSeer", "PubMed"], "digits")
    args = common.parse(parser, epochs=30, hidden_channels=64, out_channels=32)
    data, test_data = load(args)

    eager = Net(data.num_features, args.hidden_channels, args.out_channels).to(args.device)
    model = gnncompile.compile(copy.deepcopy(eager))

    edges, labels = test_data.edge_label_index, test_data.edge_label
    common.check(eager, model, lambda m: F.binary_cross_entropy_with_logits(m(data.x, data.edge_index, edges), labels))
    return common.compare(
        {
            "eager": lambda steps: fit(eager, data, test_data, args, steps),
            "gnncompile": lambda steps: fit(model, data, test_data, args, steps),
        },
        args.device,
        "test AUC",
        within=0.02,
    )


if __name__ == "__main__":
    sys.exit(main())
