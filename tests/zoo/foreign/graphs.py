"""torch-geometric: graphs, through the package's own LightningDataset and loaders."""

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from tests.features.columns import GLOBAL_BATCH, Here
from tests.features.declared import by
from tests.features.network import Report, weights
from tests.zoo.foreign.batches import Batches, logged
from tests.zoo.foreign.declared import use
from tests.zoo.subjects import NUM_SAMPLES, NUM_STEPS, Trained, generator

WIDTH, NODES = 8, 4


def _graphs(count: int = NUM_SAMPLES) -> list[Any]:
    from torch_geometric.data import Data

    stream = generator()
    ring = torch.arange(NODES)
    edges = torch.stack([ring, ring.roll(1)])
    return [
        Data(
            x=torch.randn(NODES, WIDTH, generator=stream),
            edge_index=torch.cat([edges, edges.flip(0)], dim=1),
            y=torch.randn(1, generator=stream),
        )
        for _ in range(count)
    ]


class GraphNetwork(nn.Module):
    """One of the package's basic models, a pool, and a head."""

    def __init__(self, name: str) -> None:
        from torch_geometric import nn as layers

        super().__init__()
        self.layers = getattr(layers, name)(WIDTH, WIDTH, num_layers=3)
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, batch: Any) -> Tensor:
        from torch_geometric.nn import global_mean_pool

        nodes = self.layers(batch.x, batch.edge_index)
        return self.head(global_mean_pool(nodes, batch.batch, batch.num_graphs)).squeeze(1)


class Graphs(Trained):
    def loss(self, batch: Any) -> Tensor:
        return F.mse_loss(self.network(batch), batch.y)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, on_epoch=True, sync_dist=True, batch_size=batch.num_graphs)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss(batch), sync_dist=True, batch_size=batch.num_graphs)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.network(batch)


def _trained(here: Here, name: str) -> Report:
    from torch_geometric.loader import DataLoader

    torch.manual_seed(5)
    module, data = Graphs(GraphNetwork(name)), Batches(here, _graphs(), DataLoader)
    trainer = here.trainer(max_epochs=1)
    trainer.fit(module, datamodule=data)
    trainer.save_checkpoint(here.folder / "module.ckpt")
    torch.manual_seed(6)
    loaded = Graphs.load_from_checkpoint(here.folder / "module.ckpt", network=GraphNetwork(name))
    return {
        "weights": weights(module),
        "logged": logged(trainer),
        "predicted": torch.cat(trainer.predict(module, datamodule=data)),
        "loaded": torch.cat(trainer.predict(loaded, datamodule=data)),
    }


CALLS = "`loader.DataLoader`; fit, predict, `load_from_checkpoint`"


GRAPHS: Any = {
    "refused": by("tensor_parallel", "found nothing in Graphs to split"),
    "whole": ("pipeline_parallel",),  # a DataBatch joins the samples' graphs into one
}


@use("torch-geometric", "GCN", CALLS, **GRAPHS)
def gcn(here: Here) -> Report:
    return _trained(here, "GCN")


@use("torch-geometric", "GAT", CALLS, **GRAPHS)
def gat(here: Here) -> Report:
    return _trained(here, "GAT")


@use(
    "torch-geometric", "GIN in a LightningDataset", "`LightningDataset`; fit and validate", **GRAPHS
)
def lightning_dataset(here: Here) -> Report:
    from torch_geometric.data.lightning import LightningDataset

    torch.manual_seed(5)
    graphs = _graphs(GLOBAL_BATCH)
    data = LightningDataset(graphs, graphs, batch_size=here.column.batch_size)
    trainer, module = here.trainer(max_epochs=NUM_STEPS), Graphs(GraphNetwork("GIN"))
    trainer.fit(module, datamodule=data)
    return {"weights": weights(module), "logged": logged(trainer)}
