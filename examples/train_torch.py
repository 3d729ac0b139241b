"""Train a small PyTorch model on handwritten digits, with its norms replaced by cunorm's.

Needs torch and scikit-learn. On a GPU the kernels run there, else on the CPU executor. Prints the test accuracy.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn

import cunorm.torch

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32, device=device).unsqueeze(1) / 16
labels = torch.tensor(digits.target, device=device)

model = nn.Sequential(
    *(nn.Conv2d(1, 32, 3, padding=1), nn.GroupNorm(8, 32), nn.SiLU()),
    *(nn.Conv2d(32, 32, 3, stride=2, padding=1), nn.GroupNorm(8, 32), nn.SiLU()),
    *(nn.Flatten(), nn.LayerNorm(512), nn.Linear(512, 10)),
).to(device)
print(cunorm.torch.replace(model, fuse_silu=True))

optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
for epoch in range(2):
    for batch in torch.randperm(1437).split(64):
        loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    print(f"epoch {epoch}: loss {loss.item():.3f}")

with torch.no_grad():
    accuracy = (model(images[1437:]).argmax(1) == labels[1437:]).float().mean().item()
print(f"test accuracy {accuracy:.3f}")
