"""What ranks do in the tests of Lightning: its own DeepSpeedStrategy."""

import importlib
import importlib.util

from clients.devices import share_gpu


def run_all(rank, world_size, folder, device):
    import shardwise.as_deepspeed  # noqa: F401  # first, before lightning

    if device == "cuda":
        share_gpu(rank)
    found = {stage: fit(stage, f"{folder}/{stage}", device, world_size) for stage in (2, 3)}
    return found if rank == 0 else None


def lightning(module=""):
    """Lightning is published under two names; both may be installed, and their classes differ."""
    name = "lightning.pytorch" if importlib.util.find_spec("lightning") else "pytorch_lightning"
    return importlib.import_module(name + module)


def fit(stage, folder, *place):
    """Losses of two epochs, and of a third one that goes on from the checkpoint."""
    model, trainer = module(), make_trainer(stage, folder, 2, *place)
    trainer.fit(model, loader(), loader())
    again = module()
    make_trainer(stage, folder, 3, *place).fit(again, loader(), ckpt_path=trainer.checkpoint_callback.best_model_path)
    straight = module()
    make_trainer(stage, f"{folder}/straight", 3, *place).fit(straight, loader())
    return {"losses": model.seen, "resumed": again.seen, "straight": straight.seen, "merged": merged(folder, trainer)}


def merged(folder, trainer):
    """The checkpoint as one file, by Lightning's own function: its keys, and the weights that a plain module gets."""
    import torch

    convert = lightning(".utilities.deepspeed").convert_zero_checkpoint_to_fp32_state_dict
    if trainer.global_rank > 0:
        return None
    convert(trainer.checkpoint_callback.best_model_path, f"{folder}/merged.pt")
    found = torch.load(f"{folder}/merged.pt", weights_only=False)
    again = module()
    again.configure_model()
    again.load_state_dict(found["state_dict"])
    return found["epoch"], found["global_step"], [param.sum().item() for param in again.parameters()]


def make_trainer(stage, folder, epochs, device, world_size):
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return lightning().Trainer(
        accelerator=cpu() if device == "cpu" else device,
        devices=world_size,
        strategy=lightning(".strategies").DeepSpeedStrategy(stage=stage),
        max_epochs=epochs,
        default_root_dir=folder,
        **quiet,
    )


def cpu():
    """Lightning's strategy asks for CUDA; this accelerator says so and is the CPU."""
    import torch

    class CpuAsCuda(lightning(".accelerators").CUDAAccelerator):
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
    import torch
    from torch import nn

    class Small(lightning().LightningModule):
        def __init__(self):
            super().__init__()
            self.seen = []

        def configure_model(self):
            if not hasattr(self, "net"):
                torch.manual_seed(0)
                with torch.device("cpu"):  # Lightning's contexts differ: on the GPU for stage 2, not for stage 3
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
