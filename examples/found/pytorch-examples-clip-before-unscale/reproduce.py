"""The order of calls of pytorch/examples' minGPT-ddp trainer with AMP, on one device.

Run as `python reproduce.py EXAMPLES`, a checkout of pytorch/examples. The calls are read from
distributed/minGPT-ddp/mingpt/trainer.py. Exits with 1 when gradients are clipped while they are scaled.
"""

import sys
import textwrap
import types
from pathlib import Path

import torch

print("torch", torch.__version__)
path = Path(sys.argv[1]) / "distributed/minGPT-ddp/mingpt/trainer.py"
source = path.read_text()
first = source.index("                self.scaler.scale(loss).backward()")
calls = textwrap.dedent(source[first : source.index("            else:", first)])


def gradients(scaled):
    """Return the gradients with which the optimizer steps."""
    torch.manual_seed(0)
    model, seen = torch.nn.Linear(8, 8), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: seen.append(model.weight.grad.clone()))
    scaler = torch.amp.GradScaler("cpu", enabled=scaled)
    config = types.SimpleNamespace(grad_norm_clip=1.0)
    trainer = types.SimpleNamespace(scaler=scaler, model=model, config=config, optimizer=optimizer)
    loss = model(torch.randn(4, 8)).square().mean()
    exec(calls, {"self": trainer, "loss": loss, "torch": torch})
    return seen[0].norm().item()


expected, actual = gradients(scaled=False), gradients(scaled=True)
print(f"norm of the weight's gradient at the step: {expected:.3g} without a scaler, {actual:.3g} with it")
sys.exit(abs(actual / expected - 1) > 0.01)
