"""What ranks do in the tests of Lightning: its own DeepSpeedStrategy, on the CPU."""


def run_all(rank, world_size, folder):
    import shardwise.as_deepspeed  # noqa: F401  # first, before lightning

    found = {stage: fit(stage, f"{folder}/{stage}") for stage in (2, 3)}
    return found if rank == 0 else None


def fit(stage, folder):
    """Losses of two epochs, and of a third one that goes on from the checkpoint."""
    model, trainer = module(), make_trainer(stage, folder, epochs=2)
    trainer.fit(model, loader(), loader())
    again = module()
    make_trainer(stage, folder, epochs=3).fit(again, loader(), ckpt_path=trainer.checkpoint_callback.best_model_path)
    straight = module()
    make_trainer(stage, f"{folder}/straight", epochs=3).fit(straight, loader())
    return {"losses": model.seen, "resumed": again.seen, "straight": straight.seen}


def make_trainer(stage, folder, epochs):
    import lightning.pytorch as pl
    from lightning.pytorch.strategies import DeepSpeedStrategy

    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    strategy = DeepSpeedStrategy(stage=stage)
    return pl.Trainer(
        accelerator=cpu(), devices=2, strategy=strategy, max_epochs=epochs, default_root_dir=folder, **quiet
    )


def cpu():
    """Lightning's strategy asks for CUDA; this accelerator says so and is the CPU."""
    import torch
    from lightning.pytorch.accelerators import CUDAAccelerator

    class CpuAsCuda(CUDAAccelerator):
        def setup_device(self, device):
            pass

        def setup(self, trainer):
            pass

        def get_device_stats(self, device):
            return {}

        def teardown(self):
            pass

        @staticmethod
        def parse_devices(devices):
            return int(devices)

        @staticmethod
        def get_parallel_devices(devices):
            return [torch.device("cpu", index) for index in range(devices)]

        @staticmethod
        def auto_device_count():
            return 2

        @staticmethod
        def is_available():
            return True

    return CpuAsCuda()


def loader():
    import torch
    from torch.utils.data import DataLoader

    generator = torch.Generator().manual_seed(1)
    rows = [(torch.randn(8, generator=generator), torch.randn(1, generator=generator)) for _ in range(16)]
    return DataLoader(rows, batch_size=2)


def module():
    import lightning.pytorch as pl
    import torch
    from torch import nn

    class Small(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.seen = []

        def configure_model(self):
            if not hasattr(self, "net"):
                torch.manual_seed(0)
                self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))

        def training_step(self, batch, index):
            loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
            self.seen.append(loss.item())
            return loss

        def validation_step(self, batch, index):
            self.log("val", nn.functional.mse_loss(self.net(batch[0]), batch[1]), sync_dist=True)

        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
            return [optimizer], [{"scheduler": schedule, "interval": "epoch"}]

    return Small()
