"""A plain Accelerate loop, as `accelerate launch` runs it: accumulation, clipping, saved and loaded states, weights."""

import sys

import torch
from accelerate import Accelerator, InitProcessGroupKwargs
from torch import nn
from torch.utils.data import DataLoader

BACKEND = "nccl" if torch.cuda.is_available() else "gloo"
accelerator = Accelerator(kwargs_handlers=[InitProcessGroupKwargs(backend=BACKEND)])
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
generator = torch.Generator().manual_seed(1)
rows = [(torch.randn(8, generator=generator), torch.randn(1, generator=generator)) for _ in range(20)]
model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, DataLoader(rows, batch_size=2), schedule)


def epoch():
    losses = []
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses.append(accelerator.gather(loss.detach()[None]).mean().item())
    return losses


folder = sys.argv[1]
first = epoch()
accelerator.save_state(f"{folder}/state")
second = epoch()
accelerator.load_state(f"{folder}/state")
again = epoch()
accelerator.save_model(model, f"{folder}/model")
plain = type(accelerator.unwrap_model(model)).__name__
if accelerator.is_main_process:
    print("FOUND", accelerator.num_processes, plain, second == again, first, flush=True)
accelerator.end_training()
