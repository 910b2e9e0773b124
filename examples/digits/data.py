"""The digits as one graph of images, or of images and pixels, and each image as a graph of pixels.

The data ships inside scikit-learn.
"""

import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from sklearn.neighbors import kneighbors_graph
from torch_geometric.data import Data, HeteroData
from torch_geometric.transforms import NormalizeFeatures
from torch_geometric.utils import grid, to_undirected

NUM_CLASSES = 10
SIDE = 8  # pixels


def images_as_nodes(neighbours: int = 8, seed: int = 0) -> Data:
    """Returns one graph whose nodes are the images, joined to their nearest neighbours (made symmetric).

    Features are the pixels, `[1797, 64]`, float32, scaled to sum to 1 (PyG's `NormalizeFeatures`). `train_index` and
    `test_index` hold a stratified half of the nodes each. Pixels of test images are seen in training, their labels are
    not (transductive, as on citation graphs).
    """
    digits = load_digits()
    adjacency = kneighbors_graph(digits.data, neighbours).tocoo()
    edge_index = to_undirected(torch.from_numpy(np.stack([adjacency.row, adjacency.col])).long())
    train, test = _split(digits.target, seed)
    x, y = torch.from_numpy(digits.data).float(), torch.from_numpy(digits.target).long()
    data = NormalizeFeatures()(Data(x=x, edge_index=edge_index, y=y))
    data.train_index, data.test_index = torch.from_numpy(train), torch.from_numpy(test)
    return data


def images_and_pixels(seed: int = 0) -> HeteroData:
    """Returns a graph of two types of nodes: the 1,797 images, and the 64 pixels that they are made of.

    A pixel ``"inks"`` the images in which it is at least half black, and is ``"inked_by"`` them; it is ``"beside"`` its
    up to 8 neighbours. Images have no features but a constant, `[1797, 1]`; those of pixels are their positions,
    one-hot, `[64, 64]`. Images have labels, `train_index` and `test_index` (:func:`images_as_nodes`).
    """
    digits = load_digits()
    (row, col), _ = grid(SIDE, SIDE)
    image, pixel = torch.from_numpy(digits.data >= 8).nonzero(as_tuple=True)
    data = HeteroData()
    data["image"].x = torch.ones(len(digits.data), 1)
    data["image"].y = torch.from_numpy(digits.target).long()
    train, test = _split(digits.target, seed)
    data["image"].train_index, data["image"].test_index = torch.from_numpy(train), torch.from_numpy(test)
    data["pixel"].x = torch.eye(SIDE * SIDE)
    data["pixel", "inks", "image"].edge_index = torch.stack([pixel, image])
    data["image", "inked_by", "pixel"].edge_index = torch.stack([image, pixel])
    data["pixel", "beside", "pixel"].edge_index = torch.stack([row, col])[:, row != col]
    return data


def images_as_graphs(seed: int = 0) -> tuple[list[Data], list[Data]]:
    """Returns training and test graphs, one per image: inked pixels are nodes, joined to their up to 8 neighbours.

    Node features are the intensity and the position across and down, `[num_nodes, 3]`, float32 in 0 to 1. The number of
    nodes differs from image to image.
    """
    digits = load_digits()
    (row, col), _ = grid(SIDE, SIDE)  # every pixel with its 8 neighbours, and itself
    pairs = torch.stack([row, col])[:, row != col]
    graphs = [
        _pixel_graph(torch.from_numpy(image).float() / 16, pairs, int(label))
        for image, label in zip(digits.data, digits.target, strict=True)
    ]
    train, test = _split(digits.target, seed)
    return [graphs[i] for i in train], [graphs[i] for i in test]


def _pixel_graph(pixels: torch.Tensor, pairs: torch.Tensor, label: int) -> Data:
    inked = pixels > 0
    number = inked.cumsum(0) - 1
    edge_index = number[pairs[:, inked[pairs[0]] & inked[pairs[1]]]]
    index = inked.nonzero().flatten()
    down, across = index // SIDE / (SIDE - 1), index % SIDE / (SIDE - 1)
    x = torch.stack([pixels[index], across, down], dim=1)
    return Data(x=x, edge_index=edge_index, y=torch.tensor([label]))


def _split(labels: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
    train, test = train_test_split(np.arange(len(labels)), test_size=0.5, stratify=labels, random_state=seed)
    return np.sort(train), np.sort(test)
