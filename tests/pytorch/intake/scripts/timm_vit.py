"""A vision transformer of timm, its loss, its scheduler, GradScaler and an averaged copy."""

import timm
import torch
from timm.loss import LabelSmoothingCrossEntropy
from timm.scheduler import CosineLRScheduler
from timm.utils import ModelEmaV3

device = "cuda" if torch.cuda.is_available() else "cpu"
net = timm.create_model(
    "vit_tiny_patch16_224", pretrained=False, num_classes=10, img_size=64, depth=2
).to(device)
average = ModelEmaV3(net, decay=0.99)
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, weight_decay=0.05)
schedule = CosineLRScheduler(optimizer, t_initial=50, warmup_t=3, warmup_lr_init=1e-5)
loss_of, scaler = LabelSmoothingCrossEntropy(0.1), torch.amp.GradScaler(device)
for step in range(40):
    x, y = torch.randn(4, 3, 64, 64, device=device), torch.randint(0, 10, (4,), device=device)
    with torch.autocast(device, torch.bfloat16):
        loss = loss_of(net(x), y)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    average.update(net)
    schedule.step(step)
