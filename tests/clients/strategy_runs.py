"""What ranks do in the tests of ShardwiseStrategy: the same LightningModule under DDP and under every stage."""

import warnings
from pathlib import Path

import torch
from torch import nn

STAGES = ["zero0", "zero1", "zero2", "zero3", "zero2_offload", "zero3_offload"]


def run_all(rank, world_size, folder):
    """Rank 0's findings, by name."""
    quiet()
    found = {"ddp": fit("ddp", f"{folder}/ddp"), "ddp bf16": fit("ddp", f"{folder}/ddp16", precision="bf16-mixed")}
    for stage in STAGES:
        found[stage] = fit(stage, f"{folder}/{stage}")
    for precision in ("bf16-mixed", "bf16-true", "16-true"):
        found[precision] = fit("zero3", f"{folder}/{precision}", precision=precision)
    found["zero2 bf16-true"] = fit("zero2", f"{folder}/zero2-true", precision="bf16-true")
    found["deferred"] = fit("zero3", f"{folder}/deferred", deferred=True)
    found["manual"] = fit("zero3", f"{folder}/manual", manual=True)
    found["ddp manual"] = fit("ddp", f"{folder}/ddp-manual", manual=True)
    found |= resumed(folder)
    found["refused"] = refused(folder)
    found["raised"] = raised(folder)
    make_trainer("zero3", f"{folder}/left", keeps_model=False).fit(module(), loader())
    return found if rank == 0 else None


def alone(rank, world_size, folder):
    """One process continues from the checkpoint of two, and reads the weights that they saved."""
    quiet()
    model = module()
    trainer = make_trainer("zero2", f"{folder}/alone", devices=1, max_epochs=3)
    trainer.fit(model, loader(), ckpt_path=f"{folder}/zero3/last.ckpt")
    read = type(model).load_from_checkpoint(f"{folder}/weights.ckpt")
    return {"steps": trainer.global_step, "weights": state_of(read), "losses": model.seen}


def quiet():
    import logging

    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


def fit(stage, folder, manual=False, **options):
    """Losses, the validation's result, and the weights afterwards."""
    model = module(manual)
    how = {"accumulate_grad_batches": 1} if manual else {"gradient_clip_val": 0.5}
    trainer = make_trainer(stage, folder, **how, **options)
    trainer.fit(model, loader(), loader())
    return {"losses": model.seen, "val": float(trainer.callback_metrics["val"]), "weights": state_of(model)}


def resumed(folder):
    """Two epochs and a third one from the checkpoint; a test of the checkpoint; weights alone in a file."""
    from lightning.pytorch.callbacks import ModelCheckpoint

    straight = module()
    make_trainer("zero3", f"{folder}/straight", max_epochs=3).fit(straight, loader(), loader())
    keeping = ModelCheckpoint(f"{folder}/zero3", filename="kept", save_top_k=1, monitor="val", save_last=True)
    first = module()
    make_trainer("zero3", f"{folder}/first", callbacks=[keeping]).fit(first, loader(), loader())
    again = module()
    trainer = make_trainer("zero2", f"{folder}/again", max_epochs=3)
    trainer.fit(again, loader(), ckpt_path=keeping.last_model_path)
    tested = make_trainer("zero3", f"{folder}/tested").test(
        module(), loader(), ckpt_path=keeping.last_model_path, verbose=False
    )
    small = module()
    weights = WeightsAtEnd(f"{folder}/weights.ckpt")
    make_trainer("zero3", f"{folder}/small", callbacks=[weights]).fit(small, loader(), loader())
    files = sorted(path.name for path in Path(keeping.last_model_path).iterdir())
    return {
        "straight": straight.seen,
        "halves": first.seen + again.seen,
        "tested": tested[0]["test"],
        "after two": state_of(small),
        "files": files,
    }


def refused(folder):
    """Messages of what cannot be done."""
    found = []
    for options in ({"precision": "64-true"}, {"gradient_clip_algorithm": "value", "gradient_clip_val": 0.1}):
        try:
            make_trainer("zero2", folder, **options).fit(module(), loader())
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


def raised(folder):
    """How a fit ends in which the module raises on all ranks."""
    import lightning.pytorch as pl

    class Raising(pl.Callback):
        def on_train_batch_start(self, *args):
            raise KeyError("a bad batch")

    try:
        make_trainer("zero3", f"{folder}/raised", callbacks=[Raising()], enable_checkpointing=False).fit(
            module(), loader()
        )
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def make_trainer(stage, folder, devices=2, deferred=False, keeps_model=True, **options):
    import lightning.pytorch as pl

    from shardwise.integrations.lightning import ShardwiseStrategy

    chosen = {"max_epochs": 2, "accumulate_grad_batches": 2, "logger": False, "enable_progress_bar": False}
    if "callbacks" not in options:
        chosen |= {"enable_checkpointing": False}
    config = {"preset": stage, "gradients": {"order": "sharded"}}
    strategy = "ddp" if stage == "ddp" else ShardwiseStrategy(config, deferred=deferred, keeps_model=keeps_model)
    return pl.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        default_root_dir=folder,
        enable_model_summary=False,
        **{**chosen, **options},
    )


def loader():
    from torch.utils.data import DataLoader

    generator = torch.Generator().manual_seed(1)
    rows = [(torch.randn(8, generator=generator), torch.randn(1, generator=generator)) for _ in range(24)]
    return DataLoader(rows, batch_size=2)


def state_of(model):
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def WeightsAtEnd(path):  # a class, once Lightning is imported
    import lightning.pytorch as pl

    class Saving(pl.Callback):
        def on_train_end(self, trainer, module):
            trainer.save_checkpoint(path, weights_only=True)

    return Saving()


def module(manual=False):
    import lightning.pytorch as pl

    class Small(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = not manual
            self.seen = []

        def configure_model(self):
            if not hasattr(self, "net"):
                torch.manual_seed(0)
                blocks = [nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3)]
                self.net = nn.Sequential(nn.Linear(8, 16), *blocks, nn.Linear(16, 1))

        def forward(self, x):
            return self.net(x)

        def training_step(self, batch, index):
            loss = nn.functional.mse_loss(self(batch[0]).float(), batch[1].float())
            self.seen.append(loss.item())
            if manual:
                optimizer = self.optimizers()
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()
            return loss

        def validation_step(self, batch, index):
            self.log("val", nn.functional.mse_loss(self(batch[0]).float(), batch[1].float()), sync_dist=True)

        def test_step(self, batch, index):
            self.log("test", nn.functional.mse_loss(self(batch[0]), batch[1]), sync_dist=True)

        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
            return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1), "interval": "epoch"}]

    return Small()
